#!/bin/sh
# Run the tests that need a GPU; the table of measured peaks, the plan's predictions and tokens/s comes at the end.
# Arguments go to pytest: tests/gpu/run.sh -k memory. Writes up to 20 GB of random weights to the temporary folder.
cd "$(dirname "$0")/../.." && exec python -m pytest -m gpu -p no:cacheprovider tests/gpu "$@"
