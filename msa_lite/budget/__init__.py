"""Predict memory, disk and time of a stage from a model's config and headers, in plain numbers, without torch."""
