"""Define benchmarks: items, records and metrics, one module each."""
