"""Remove what still holds the data of a run: vectors, records of rows, models that know it, caches.

The unlearned model, the report and the removal record stay. A removal that was killed is ended by the same call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.data import DataSource
from msa_lite.errors import FormatError, MsaError, StageError, join_faults
from msa_lite.evals.records import read_records
from msa_lite.io.files import write_json
from msa_lite.io.lock import locked
from msa_lite.io.reading import local_path, printable, read_object
from msa_lite.io.search import holds_any, needles
from msa_lite.pipeline.folder import PURGED_FILE
from msa_lite.pipeline.holdings import (
    REPORTS,
    Holding,
    Remark,
    Survey,
    remove_cache,
    remove_empty,
    run_folders,
    survey_run,
)
from msa_lite.pipeline.reopen import RunFolder, open_run
from msa_lite.recipe import Data, Recipe
