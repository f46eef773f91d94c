"""Read what the files in a run's folder say, part by part and as one story."""
