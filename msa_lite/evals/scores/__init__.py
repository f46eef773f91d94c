"""Ask models the questions of a benchmark, once each, and write records and reports."""
