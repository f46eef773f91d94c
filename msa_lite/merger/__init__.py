"""The merge: θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0) = θ_D + Σ weight · vector, in blocks of rows.

formula.py holds the arithmetic and the terms of the sum. inputs.py finds the models, plan.py checks them before the
first byte is written, stream.py merges blocks on threads, fidelity.py measures the rounding. A merge goes to a
checkpoint (model.py), to one adapter (adapter.py), into memory (memory.py) or to a mergekit recipe (translate.py).
"""

from msa_lite.merger.adapter import MergedAdapter as MergedAdapter
from msa_lite.merger.adapter import merge_adapters as merge_adapters
from msa_lite.merger.adapter import merge_terms_to_adapter as merge_terms_to_adapter
from msa_lite.merger.formula import Term as Term
from msa_lite.merger.inputs import hash_vector as hash_vector
from msa_lite.merger.memory import OpenMerge as OpenMerge
from msa_lite.merger.memory import open_merge as open_merge
from msa_lite.merger.mergekit import mergekit_recipe as mergekit_recipe
from msa_lite.merger.model import Merged as Merged
from msa_lite.merger.model import merge as merge
from msa_lite.merger.model import merge_terms as merge_terms
from msa_lite.merger.on_device import OnDevice as OnDevice
from msa_lite.merger.on_device import as_tensor as as_tensor
from msa_lite.merger.plan import DTYPES as DTYPES
from msa_lite.merger.plan import Precision as Precision
from msa_lite.merger.plan import check_mergeable as check_mergeable

__all__ = [
    "DTYPES",
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
