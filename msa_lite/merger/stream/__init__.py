"""The merge to a model, block by block."""
