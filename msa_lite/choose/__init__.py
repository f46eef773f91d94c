"""Choose the best candidate: strengths (α, β) of the vectors, or an epoch of a baseline.

1. `search` says which strengths to try next; `choice` holds the candidates and scores each of them once.
2. `validation`: rows are divided into those to choose by and those of the final scores; a model is scored on the first.
3. `rules`: the rule ranks a candidate's scores beside the target's.
4. `choice`: the highest rank is chosen and written down, with the tables and pictures of all candidates, reasons to
   doubt the choice, and what to try instead.
"""
