"""Open the judge: a language model that says which candidate a generated answer agrees with."""

from __future__ import annotations

from pathlib import Path

from msa_lite.errors import UsageError
from msa_lite.evals.judge.base import Judge, LocalJudge, api_key, check_judge, open_cache
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
    key = api_key()
    if not key:
        raise UsageError(
            "a judge of kind 'openai' needs a key in the environment: set OPENAI_API_KEY (to any word for a server of "
            "your own that needs none)"
        )
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise UsageError("OPENAI_API_KEY: no key has a line break, a letter beyond ASCII, or a space at its ends")
    if len(key) >= 8 and key in (settings.address or ""):
        raise UsageError("judge.base_url: it is written to manifests; put no key in it")
    from msa_lite.evals.judge.openai_judge import OpenAIJudge

    return OpenAIJudge(settings, open_cache(cache_folder))
