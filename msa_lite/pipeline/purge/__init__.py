"""Remove what still holds the data of a run."""
