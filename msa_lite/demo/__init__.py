"""Small model histories of fictional people, made on the spot: people, a prior, a target, an ideal."""

from msa_lite.demo.history import HistorySettings, TuningSettings, make_groups, make_history, make_real_history
from msa_lite.demo.smollm2 import SMOLLM2_CONFIG, make_smollm2
