"""The merge: θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0) = θ_D + Σ weight · vector, in blocks of rows.

formula.py holds the arithmetic and the terms of the sum, fidelity.py measures the rounding. vectors/ opens vectors,
checks/ finds the inputs and checks them before the first byte is written. A merge goes to a checkpoint or into memory
(stream/), to one adapter (adapters/) or to a mergekit recipe (mergekit/). filtering.py filters a forget vector first,
by the moments of moments.py.
"""

from msa_lite.merger.adapters.output import MergedAdapter, merge_adapters, merge_terms_to_adapter
from msa_lite.merger.checks.checked import Precision, check_mergeable
from msa_lite.merger.checks.inputs import hash_vector
from msa_lite.merger.fidelity import Merged
from msa_lite.merger.formula import Term
from msa_lite.merger.mergekit.recipes import mergekit_recipe
from msa_lite.merger.stream.block import OnDevice, as_tensor
from msa_lite.merger.stream.model import merge, merge_terms
from msa_lite.merger.stream.stream import OpenMerge, open_merge

__all__ = [
    "Merged",
    "MergedAdapter",
    "OnDevice",
    "OpenMerge",
    "Precision",
    "Term",
    "as_tensor",
    "check_mergeable",
    "hash_vector",
    "merge",
    "merge_adapters",
    "merge_terms",
    "merge_terms_to_adapter",
    "mergekit_recipe",
    "open_merge",
]
