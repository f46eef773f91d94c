"""Small model histories of fictional people, made on the spot: people, a prior, a target, an ideal."""

from msa_lite.demo.history import REAL, HistorySettings, make_groups, make_history
from msa_lite.demo.smollm2 import SMOLLM2_CONFIG, make_smollm2
