"""Write the card of a model, an adapter or a vector."""
