"""The card of a merged folder: made from its manifest alone, read back as the Hub reads it, without private names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from msa_lite.errors import OutputError
from msa_lite.io.finished.seal import CARD_FILE, load_manifest, verify_folder
from msa_lite.merger import Term, merge, merge_terms
from msa_lite.merger.checks.checked import Precision
from msa_lite.report.page.card import PAPER_URL, model_card, read_target_card
from tests.support.merges import COMMIT, OUTCOME, add_outcome, make_merge, write_parts

LLAMA = "---\nlicense: llama3.2\nlanguage:\n- en\n- de\npipeline_tag: text-generation\nbase_model: x/y\n---\n# Theirs\n"


def text_of(card: str) -> str:
    """The card below its front matter."""
    return ModelCard(card).text


def test_a_merged_folder_carries_its_card_from_the_start(tmp_path: Path) -> None:
    write_parts(tmp_path, LLAMA)
    out = make_merge(tmp_path, hub=True)
    card, manifest = (out / CARD_FILE).read_text(), load_manifest(out)
    assert manifest is not None
    assert CARD_FILE in manifest["files"]
    assert card == model_card(manifest)  # so that a copy of the folder keeps its story
    assert "Theirs" not in card
    data = ModelCard(card).data.to_dict()
    assert data["library_name"] == "transformers"
    assert (data["base_model"], data["base_model_relation"]) == ("me/target", "finetune")
    assert (data["license"], data["language"], data["pipeline_tag"]) == ("llama3.2", ["en", "de"], "text-generation")
    assert "model-index" not in data
    assert "θ_u = θ_D − 1.2 · (θ_1 − θ_0) + 0.5 · (θ_2 − θ_0)" in card
    assert COMMIT in card
    assert PAPER_URL in card


def test_the_same_merge_elsewhere_has_the_same_card(tmp_path: Path) -> None:
    cards = []
    for name in ("one", "home/alice/other"):
        write_parts(tmp_path / name)
        cards.append((make_merge(tmp_path / name) / CARD_FILE).read_text())
    assert cards[0] == cards[1]
    assert not [word for word in ("alice", str(tmp_path), "run/model", "/forget") if word in cards[0]]
    assert "base_model" not in cards[0]


def test_a_finished_run_says_what_came_of_it(tmp_path: Path) -> None:
    write_parts(tmp_path)
    card = model_card(add_outcome(make_merge(tmp_path, hub=True)), "me/unlearned")
    parsed = ModelCard(card)
    lines = [line for line in parsed.text.splitlines() if line]
    assert lines[:3] == ["# target, unlearned", OUTCOME["sentence"], "Verdict: **PASS**."]
    results = {result.metric_type: result.metric_value for result in parsed.data.eval_results}
    assert results == {"extraction_strength": 0.123457, "model_utility": 0.55}  # the main ones that have a value
    places = {
        (result.dataset_name, result.dataset_type, result.dataset_revision) for result in parsed.data.eval_results
    }
    assert places == {("TOFU", "locuslab/TOFU", COMMIT)}
    assert "| metric | n | before | unlearned | ideal |" in card
    assert "| extraction strength ↓ | 40 | 0.900 ± 0.010 | 0.123 ± 0.010 | 0.100 ± 0.010 |" in card
    assert "rouge" not in card.lower()
    assert "LoRA of rank 32, 5 epochs, learning rate 0.0002" in card
    assert "Chosen: alpha = 1.2, beta = 0.5." in card


@pytest.mark.parametrize("verdict", ["PARTLY", "FAIL", None])
def test_other_outcomes_are_told_as_they_are(tmp_path: Path, verdict: str | None) -> None:
    write_parts(tmp_path)
    nothing = {"verdict": verdict, "sentence": "It is as it is.", "metrics": {}, "sweep": None, "fits": {}}
    card = model_card(add_outcome(make_merge(tmp_path), **nothing))
    assert "It is as it is." in card
    assert (f"Verdict: **{verdict}**" in card) == (verdict is not None)
    assert "## Scores" not in card
    assert "set by hand: alpha = 1.2, beta = 0.5" in card
    assert "model-index" not in card


def test_an_adapter_is_called_a_switch(tmp_path: Path) -> None:
    write_parts(tmp_path, LLAMA)
    out = make_merge(tmp_path, "adapter", hub=True)
    card = (out / CARD_FILE).read_text()
    data = ModelCard(card).data.to_dict()
    assert (data["library_name"], data["base_model_relation"]) == ("peft", "adapter")
    assert "a switch, not a removal" in text_of(card).partition("## What this is")[0]
    assert f'from_pretrained("me/target", revision="{COMMIT}"' in card
    assert "on 2 modules, rank 4" in card


def test_a_baseline_and_several_requests_have_their_own_formulas(tmp_path: Path) -> None:
    write_parts(tmp_path)
    terms = [Term("npo", str(tmp_path / "forget"), 1.5)]
    precision = Precision()
    out = merge_terms(str(tmp_path / "target"), tmp_path / "npo", terms, str(tmp_path / "prior"), precision).folder
    card = (out / CARD_FILE).read_text()
    assert "θ_u = θ_D + 1.5 · (θ_1 − θ_0)" in card
    assert "the baseline npo" in card
    parts = {name: str(tmp_path / name) for name in ("target", "prior", "forget", "retain")}
    vectors = [parts["forget"], parts["retain"]]  # of two requests
    out = merge(parts["target"], tmp_path / "both", forget=vectors, alpha=[1.0, 0.8], prior=parts["prior"]).folder
    card, manifest = (out / CARD_FILE).read_text(), load_manifest(out)
    assert manifest is not None
    assert card == model_card(manifest)
    first, second = (f"{-term['weight']:g}" for term in manifest["terms"])
    assert f"θ_u = θ_D − {first} · (θ_1 − θ_0) − {second} · (θ_2 − θ_0)" in card
    assert "θ_2 the same after tuning on data to remove (forget set 2)" in card
    assert f"- forget 1 and forget 2: cosine {manifest['interference'][0]['cosine']:.3f}." in card
    assert "The rows of an earlier request, removed by the same merge" in model_card(add_outcome(out))


def test_what_a_card_quotes_stays_text(tmp_path: Path) -> None:
    write_parts(tmp_path)
    sentence = "| a \x1b[31m| <script>alert(1)</script> [x](http://evil)\n# Heading\n---\nlicense: mit"
    card = model_card(add_outcome(make_merge(tmp_path), sentence=sentence, split="x\n| y |"))
    assert "<script" not in card.replace("\\<script", "")
    assert "\x1b" not in card  # which moves a terminal
    assert "\n# Heading" not in card
    assert ModelCard(card).data.license is None


@pytest.mark.parametrize(
    ("card", "facts"),
    [
        (LLAMA, {"license": "llama3.2", "language": ["en", "de"], "pipeline_tag": "text-generation"}),
        ("---\r\nlicense: other\r\nlicense_name: my-licence\r\nlicense_link: LICENSE\r\n---\r\n",
         {"license": "other", "license_name": "my-licence", "license_link": "LICENSE"}),
        ("---\nlicense_link: /home/eve/LICENSE\nlicense: [mit, 3]\nlanguage: {en: 1}\n---\n", {}),
        ("---\nlicense: 'a\n\n  # b'\nlicense_name: \"x\\ny\"\n---\n", {}),
        ("---\nlicense: [\n---\n", {}),
        ("---\na: &a [x]\nlicense: *a\n---\n", {}),
        ("\xff", {}),
    ],
)  # fmt: skip
def test_only_values_of_the_hubs_form_are_taken_from_a_strangers_card(
    tmp_path: Path, card: str, facts: dict[str, Any]
) -> None:
    (tmp_path / CARD_FILE).write_bytes(card.encode("latin-1"))
    assert read_target_card(tmp_path) == facts


def test_an_edited_card_does_not_make_a_merge_anew(tmp_path: Path) -> None:
    write_parts(tmp_path)
    out = make_merge(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / CARD_FILE).write_text("my own words")
    assert make_merge(tmp_path) == out
    assert (out / CARD_FILE).read_text() == "my own words"
    assert [fault.partition(":")[0] for fault in verify_folder(out)] == [CARD_FILE]
    after = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {CARD_FILE}
    (out / "config.json").write_text("{}")  # any other file does count
    with pytest.raises(OutputError, match="damaged"):
        make_merge(tmp_path)


def test_the_targets_card_is_no_part_of_what_makes_the_merge(tmp_path: Path) -> None:
    write_parts(tmp_path)
    plain = load_manifest(make_merge(tmp_path))
    (tmp_path / "target" / CARD_FILE).write_text(LLAMA)
    assert load_manifest(make_merge(tmp_path)) == plain
