"""The second moments of the inputs of a model's linear layers, for the filter of vectors."""
