"""A fuzzer: hostile files and arguments through the commands, and kills at any moment.

`python -m tests.tools.fuzz --cases 5000 --kills 500` runs for long; a short run with fixed seeds is part of the
tests. Each case is a tree of files and a command. The command runs in a process of its own, with limits; what it did is
judged by the contract (exit codes, no traceback, nothing outside its output) and, where it wrote a model, by
float64 arithmetic over what the safetensors library reads.
"""
