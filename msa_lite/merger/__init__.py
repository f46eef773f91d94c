"""The merge: θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0), streamed through a target in blocks of rows.

formula.py is the arithmetic, plan.py what is checked before the first byte, stream.py the blocks and threads,
fidelity.py what rounding left of the update, model.py the merge to a checkpoint, adapter.py the same as one adapter,
memory.py the same for a model in memory, translate.py as a recipe for mergekit.
"""

from msa_lite.merger.adapter import MergedAdapter as MergedAdapter
from msa_lite.merger.adapter import merge_adapters as merge_adapters
from msa_lite.merger.memory import OpenMerge as OpenMerge
from msa_lite.merger.memory import open_merge as open_merge
from msa_lite.merger.model import Merged as Merged
from msa_lite.merger.model import merge as merge
from msa_lite.merger.plan import DTYPES as DTYPES
from msa_lite.merger.plan import check_mergeable as check_mergeable
from msa_lite.merger.translate import mergekit_recipe as mergekit_recipe

__all__ = [
    "DTYPES",
    "Merged",
    "MergedAdapter",
    "OpenMerge",
    "check_mergeable",
    "merge",
    "merge_adapters",
    "mergekit_recipe",
    "open_merge",
]
