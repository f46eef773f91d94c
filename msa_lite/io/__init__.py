"""Files, checkpoints, models in memory, processes and the terminal: what all other rooms stand on."""
