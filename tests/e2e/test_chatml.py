"""A model whose chat template ends turns as ChatML does, from its training to its report: where its labels end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from msa_lite.baselines import objective
from msa_lite.data import IGNORE, Example
from msa_lite.evals.benchmarks import tofu
from msa_lite.evals.scores import records
from msa_lite.pipeline.prepare.prompt import find_prompter
from msa_lite.recipe import load_recipe
from msa_lite.train.fit import vector as fit
from tests.e2e.conftest import CallCli
from tests.support.benchmark_data import write_tofu
from tests.support.models import SMOL, chat_tokenizer, save_checkpoint, tiny_model, tiny_tokenizer

END: int = tiny_tokenizer().eos_token_id
Seen = dict[str, list[Example]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """All rows that anything learns from or is scored on, by what does it."""
    rows: Seen = {"fit": [], "baseline": [], "scores": []}
    score = records.score_bundles

    def note(name: str, module: Any) -> None:
        hashed = module.hash_ids

        def hash_ids(examples: Sequence[Example]) -> str:
            rows[name] += examples
            return str(hashed(examples))

        monkeypatch.setattr(module, "hash_ids", hash_ids)

    def score_bundles(runner: Any, bundles: Iterable[Sequence[Example]], **options: Any) -> Any:
        bundles = list(bundles)
        rows["scores"] += (example for bundle in bundles for example in bundle)
        return score(runner, bundles, **options)

    note("fit", fit)
    note("baseline", objective)
    monkeypatch.setattr(records, "score_bundles", score_bundles)
    monkeypatch.setattr(tofu, "MAX_NEW_TOKENS", 4)
    return rows


def assert_ended(rows: Sequence[Example]) -> None:
    """Each row has labels, which end at their first end token; the ends of earlier turns are no labels."""
    assert rows
    for row in rows:
        labels = [label for label in row.labels if label != IGNORE]
        assert labels.index(END) == len(labels) - 1
        assert row.ids[-1] == END
        assert END in row.prompt_ids


def conversation(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    pairs = [(("user", row["question"]), ("assistant", row["answer"])) for row in rows]
    return [{"role": role, "content": text} for pair in pairs for role, text in pair]


def test_no_label_comes_after_an_end_token(quick_fits: None, seen: Seen, call_cli: CallCli, tmp_path: Path) -> None:
    start = save_checkpoint(tmp_path / "start", tiny_model("llama"))
    chat_tokenizer(SMOL).save_pretrained(start)
    data = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("forget", "retain")}
    for name, place in data.items():
        rows = [{"question": f"Where is {name} {i}?", "answer": f"At {i}."} for i in range(8)]
        lines = rows if name == "forget" else [{"messages": conversation(rows[i : i + 2])} for i in range(0, 8, 2)]
        Path(place["path"]).write_text("".join(json.dumps(line) + "\n" for line in lines))

    steps = {"epochs": 1, "learning_rate": 5e-3, "batch_size": 8, "warmup_epochs": 0}
    target = save_checkpoint(tmp_path / "target", tiny_model("llama", seed=1))
    chat_tokenizer(SMOL).save_pretrained(target)
    recipe = {
        "target": str(target),
        "prior": str(start),
        "forget": {"data": data["forget"], "alpha": 1.0},
        "retain": {"data": data["retain"], "beta": 0.5},
        "vector": {"lora": {"rank": 2, "alpha": 4}, **steps},
        "evaluate": {"benchmark": "tofu", "split": "forget01", "data": write_tofu(tmp_path / "tofu"), "limit": 4},
        "select": {"validation": 0.25},
        "verdict": False,
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for command in (["run"], ["baseline", "grad_diff"]):
        for rows in seen.values():
            rows.clear()
        code, _, err = call_cli(*command, str(tmp_path / "recipe.yaml"))
        assert code == 0, err
        assert_ended(seen["scores"])
        assert_ended(seen["fit"] if command == ["run"] else seen["baseline"])
    # What learns has the same labels whatever the scores repeat, so that no vector is fitted anew.
    plain, theirs = (load_recipe(recipe, names) for names in ([], ["evaluate.compat=[open-unlearning]"]))
    tokenizer = chat_tokenizer(SMOL)
    assert find_prompter(theirs, tokenizer) == find_prompter(plain, tokenizer)
