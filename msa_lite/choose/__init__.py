"""Choose the best candidate: strengths (α, β) of the vectors, or an epoch of a baseline.

1. `candidates`: the models to choose from; `search` says which strengths to try next.
2. `validation`: each candidate is scored on the validation rows, which `division` has set apart from the test rows.
3. `rules`: the rule ranks its scores beside the target's.
4. `choice`: the highest rank is chosen and written down, with the tables and pictures of all candidates, reasons to
   doubt the choice, and what to try instead.
"""
