"""One fit: its course from the prior to the vector, its end, its trackers."""
