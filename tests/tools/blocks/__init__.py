"""The blocks of code in README and docs: read them, check that they are possible, and run them.

`read` finds the blocks and the marks above them. `check` says what is impossible in a block, without any model. `run`
does what a page says, from its first block to its last, in a folder that `folder` has prepared.
"""
