"""Measure from records what a model has forgotten and kept."""
