"""Give the verdict on a run and put it into words."""
