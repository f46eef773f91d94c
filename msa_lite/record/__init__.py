"""The removal record of a run for an auditor: what was to be forgotten, what came out, and how to check it."""
