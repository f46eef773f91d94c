"""Open the judge: a language model that says which candidate a generated answer agrees with."""

from __future__ import annotations

from pathlib import Path

from msa_lite.evals.judge.base import Judge, LocalJudge, check_judge, open_cache
from msa_lite.evals.judge.server import find_server
from msa_lite.io.console.libraries import require
from msa_lite.io.files.reading import local_path
from msa_lite.io.weights.hub import fetch
from msa_lite.settings import JudgeSettings


def open_judge(settings: JudgeSettings, cache_folder: Path | None = None) -> Judge | None:
    """Make the judge of the settings; return None for kind "none".

    Do all checks that need no network and load no model. cache_folder: where to keep replies; None for
    $MSA_LITE_CACHE, or ~/.cache/msa-lite. Raise UsageError for invalid settings, a missing key or a missing `openai`
    package, OutputError when the cache cannot be written, and as `check_source` for a local model in a folder.
    """
    check_judge(settings)
    if settings.kind == "none":
        return None
    if settings.kind == "local":
        from msa_lite.evals.engine.models import check_source

        if local_path(settings.model_name).is_dir():
            check_source(fetch(settings.model_name, by_content=False))
        return LocalJudge(settings, open_cache(cache_folder))
    require("judge")
    server = find_server(settings)
    assert server is not None, "checked"
    server.check_key()
    from msa_lite.evals.judge.openai_judge import OpenAIJudge

    return OpenAIJudge(settings, open_cache(cache_folder), server)
