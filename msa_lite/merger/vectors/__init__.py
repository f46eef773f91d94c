"""The vectors of a merge: opened, renamed to the target's names, as deltas of its tensors."""
