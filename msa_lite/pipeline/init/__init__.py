"""A first recipe, from a look at a model and the data."""
