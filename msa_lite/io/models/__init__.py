"""Models in memory: loading, heads, precision, devices, streaming of layers."""
