"""The fixture `drawing` of all tests, by its type."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

Drawing = Callable[[], AbstractContextManager[None]]
"""Draws pictures and pages inside `with drawing():`, as runs do outside of tests."""
