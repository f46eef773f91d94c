"""A table of the paper, or one's own: what is made of its rows, and what is left to make."""
