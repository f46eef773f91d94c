"""The run of a baseline: training, the choice of an epoch, then the same merge and scores."""
