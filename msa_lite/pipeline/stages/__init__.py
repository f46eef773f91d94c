"""A run is a list of stages: the loops over it, and what each stage costs, from headers and row counts."""
