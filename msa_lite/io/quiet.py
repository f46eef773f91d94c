"""Silence the progress bars of the libraries underneath, which would stand between our own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_bars() -> Iterator[None]:
    """Let transformers load and save models without bars; restore its settings afterwards."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    downloads = not are_progress_bars_disabled()  # which transformers' switch moves as well
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the Hub's bars that the environment switches off
            logging.enable_progress_bar()
        if not downloads:
            disable_progress_bars()
