"""Define metrics and scores of a model, and write tables in each format."""
