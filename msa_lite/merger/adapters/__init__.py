"""The merge to one adapter."""
