"""Training in stages: targets, ideals and the checkpoints before them."""
