"""A small but real model history made on the spot: fictional people, a tokenizer, a prior, a target, an ideal."""

from msa_lite.demo.history import HistorySettings, make_history
from msa_lite.demo.people import make_groups

__all__ = ["HistorySettings", "make_groups", "make_history"]
