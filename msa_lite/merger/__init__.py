"""The merge: θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0) = θ_D + Σ weight · vector, in blocks of rows.

formula.py holds the arithmetic and the terms of the sum. inputs.py finds the models, checked.py checks them before the
first byte is written, stream.py merges blocks on threads, fidelity.py measures the rounding. A merge goes to a
checkpoint (model.py), to one adapter (adapter.py), into memory (`open_merge`) or to a mergekit recipe (mergekit.py).
"""

from msa_lite.merger.adapter_output import MergedAdapter, merge_adapters, merge_terms_to_adapter
from msa_lite.merger.checked import Precision, check_mergeable
from msa_lite.merger.formula import Term
from msa_lite.merger.inputs import hash_vector
from msa_lite.merger.mergekit import mergekit_recipe
from msa_lite.merger.model import Merged, merge, merge_terms
from msa_lite.merger.on_device import OnDevice, as_tensor
from msa_lite.merger.stream import OpenMerge, open_merge

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
