"""The model in memory while it is tuned: loaded, adapted, and brought to the first rung that fits."""
