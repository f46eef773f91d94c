"""Recipes of mergekit: written, read, and run by mergekit itself."""
