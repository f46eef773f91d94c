"""A table of the paper, or one's own: its rows, at their own size or small; what is made, and what is left."""
