"""The run of MSA, of the task vector and of a sweep: vectors, choice, merge, scores, verdict, report."""
