"""Names of models and data: numbers of tokens and steps, revisions, and addresses of the Hub's pages."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.cli import main
from msa_lite.errors import MsaError, RecipeError, UsageError
from msa_lite.evals.benchmarks.dataset import split_revision
from msa_lite.io.files.addresses import AddressError, holds_secret, model_name, split_configuration
from msa_lite.io.files.reading import read_yaml
from msa_lite.io.weights.counts import TrainingProgress, format_count, named_progress, parse_count
from msa_lite.io.weights.hub import find_branch, is_number, is_remote, split_name
from msa_lite.recipe import load_recipe
from msa_lite.settings import DataSource

# As of OLMo 2 7B: 4,194,304 tokens a step, and three runs of stage 2 that count from its start.
BRANCHES = [
    "main",
    "stage1-step150-tokens1B",
    "stage1-step200-tokens1B",
    "stage1-step12000-tokens51B",
    "stage1-step920000-tokens3859B",
    "stage1-step928646-tokens3896B",
    "stage2-ingredient1-step1000-tokens5B",
    "stage2-ingredient2-step1000-tokens5B",
    "stage2-ingredient3-step11931-tokens51B",
    "stage2-ingredient3-step12100-tokens52B",
]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        (3.9e12, 3_900_000_000_000),
        ("3859B", 3_859_000_000_000),
        ("1.5T", 1_500_000_000_000),
        ("500k", 500_000),
        (" 20m ", 20_000_000),
        ("2.0", 2),
        ("3.9e12", 3_900_000_000_000),
    ],
)
def test_counts_are_read_from_numbers_and_texts(text: object, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "1.5", "-3", -3, "3859 B x", "1,000", "1.0001k", True, None, float("nan")])
def test_what_is_no_whole_number_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"a whole number is wanted, or a text such as 3859B"):
        parse_count(text)


@given(st.integers(0, 10**16))
@settings(max_examples=50)
def test_a_count_reads_back_as_it_was_written(count: int) -> None:
    assert parse_count(format_count(count)) == count


def test_counts_are_written_as_names_of_checkpoints_have_them() -> None:
    counts = [3_859_000_000_000, 1_500_000_000_000, 4_000_000_000_000, 20_000_000, 500_000, 928_646, 0]
    assert [format_count(count) for count in counts] == ["3859B", "1500B", "4T", "20M", "500k", "928646", "0"]


@pytest.mark.parametrize(
    ("name", "progress"),
    [
        ("allenai/OLMo-2-1124-7B@tokens=3859B", TrainingProgress(tokens=3_859_000_000_000)),
        ("allenai/OLMo-2-1124-7B@step=928646", TrainingProgress(step=928_646)),
        ("allenai/OLMo-2-1124-7B@stage1-step928646-tokens3896B", TrainingProgress(3_896_000_000_000, 928_646)),
        ("allenai/OLMo-2-1124-7B@stage2-ingredient1-step1000-tokens5B", TrainingProgress(5_000_000_000, 1000, stage=2)),
        ("runs/olmo_stage1-step150-tokens2.5b/", TrainingProgress(2_500_000_000, 150)),
        ("runs/step-0040", TrainingProgress(step=40)),
        ("runs/tokens20M/final", TrainingProgress()),  # of a folder, its own name counts
        ("runs/tokens20M@main", TrainingProgress()),  # of a repository with a revision, the revision
        ("runs/footstep12-tokens7x", TrainingProgress()),
        ("runs/tokens2.5", TrainingProgress()),  # no whole number
    ],
)
def test_names_say_how_far_training_had_come(name: str, progress: TrainingProgress) -> None:
    assert named_progress(name) == progress


def test_the_branch_with_the_number_is_found() -> None:
    assert find_branch(BRANCHES, "tokens=3859B") == "stage1-step920000-tokens3859B"
    assert find_branch(BRANCHES, "tokens=3859000000000") == "stage1-step920000-tokens3859B"
    assert find_branch(BRANCHES, "tokens=51B") == "stage1-step12000-tokens51B"  # stage 2 counts from its own start
    assert find_branch(BRANCHES, "step=928646") == "stage1-step928646-tokens3896B"
    assert find_branch(["step1000", "step2000"], "step=2k") == "step2000"


@pytest.mark.parametrize(
    ("revision", "says"),
    [
        ("tokens=1B", "several branches have this number; .*: stage1-step150-tokens1B, stage1-step200-tokens1B$"),
        ("tokens=5B", "several .*: stage2-ingredient1-step1000-tokens5B, stage2-ingredient2-step1000-tokens5B$"),
        ("tokens=52B", "only stage2-ingredient3-step12100-tokens52B .* from the start of its stage"),
        ("tokens=3860B", "nearest are stage1-step920000-tokens3859B and stage1-step928646-tokens3896B$"),
        ("tokens=5T", "nearest is stage1-step928646-tokens3896B$"),
        ("step=1", "nearest is stage1-step150-tokens1B$"),
        ("tokens=many", "a whole number is wanted"),
    ],
)
def test_a_number_that_no_branch_or_several_have_is_told_with_names(revision: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        find_branch(BRANCHES, revision)


@given(st.sets(st.integers(0, 5000), min_size=1), st.integers(0, 5000))
@settings(max_examples=50)
def test_a_branch_is_found_exactly_where_its_number_is_there(numbers: set[int], wanted: int) -> None:
    branches = [f"stage1-step{number * 7}-tokens{number}B" for number in numbers]
    if wanted in numbers:
        assert find_branch(branches, f"tokens={wanted}B") == f"stage1-step{wanted * 7}-tokens{wanted}B"
        return
    with pytest.raises(ValueError, match="no branch has this number") as caught:
        find_branch(branches, f"tokens={wanted}B")
    below, above = [n for n in numbers if n < wanted], [n for n in numbers if n > wanted]
    named = [int(n) for n in re.findall(r"tokens(\d+)B", str(caught.value))]
    assert named == [*([max(below)] if below else []), *([min(above)] if above else [])]


def test_only_numbers_are_looked_up() -> None:
    assert [is_number(text) for text in ("tokens=1B", "step=3", "main", "tokens", "step3", "", "stage=1")] == [
        *[True] * 2,
        *[False] * 5,
    ]


HUB, DATA = "https://huggingface.co/org/name", "https://huggingface.co/datasets/org/name"


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (HUB, "org/name"),
        (f"{HUB}/", "org/name"),
        ("HTTP://www.HuggingFace.co/org/name?library=transformers#usage", "org/name"),
        ("huggingface.co/org/name", "org/name"),
        ("hf.co/org/name", "org/name"),
        ("hf://org/name@v1", "org/name@v1"),
        ("git@hf.co:org/name.git", "org/name"),
        ("https://huggingface.co/gpt2/tree/main", "gpt2"),
        (f"{HUB}/tree/main/", "org/name"),
        (f"{HUB}/tree/stage1-step150", "org/name@stage1-step150"),
        (f"{HUB}/tree/refs%2Fpr%2F1", "org/name@refs/pr/1"),
        (f"{HUB}/commit/0123abcd", "org/name@0123abcd"),
        (f"{HUB}/blob/main/config.json", "org/name"),
        (f"{HUB}/resolve/v1/model-00001-of-00002.safetensors?download=true", "org/name@v1"),
        ("https://hub.example:8080/org/name/tree/v1", "org/name@v1"),
        ("org/name@v1", "org/name@v1"),
        ("./folder", "./folder"),
    ],
)
def test_the_address_of_a_model_is_taken_as_its_repository(
    address: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example:8080")
    assert model_name(address) == model_name(name) == name
    recipe = load_recipe({"target": address, "prior": address, "forget": {"data": {"path": DATA}}, "output": "out"})
    assert (recipe.target, recipe.prior, recipe.forget.data.path) == (name, name, "org/name")
    if name.startswith("org/"):
        assert is_remote(address)
        assert split_name(address) == split_name(name)


SECRETS = [
    "https://me:S3cret@huggingface.co/org/name", "https://S3cret@huggingface.co/org/name", "s3://KEY:S3cret@bucket/x",
    "s3://KEY:ab/S3cret@bucket/x", "git+https://me:S3cret@github.com/a/b", "me:S3cret@huggingface.co/org/name",
    f"{HUB}?token=S3cret", "https://host/x.jsonl?a=b&X-Amz-Signature=S3cret", f"{HUB}#access_token=S3cret",
    "org/name@hf_S3cretAbCdEfGhIjKlMnOpQr", f"{HUB}?%74oken=S3cret", f"{HUB}?a[token]=S3cret", "hf.co/a/b?key=S3cret",
    "https:/me:S3cret@host/x", f"{HUB}?bearer=S3cret", "out/x.jsonl?X-Amz-Signature=S3cret",
]  # fmt: skip


@pytest.mark.parametrize(
    "address",
    [
        "org/name@v1", "org/name:config@v1", "x.csv:config@v1.example", "C:\\me@work\\x.csv", "C:/me@work/x.csv",
        "/data/me@host.example/x", "runs/10:30@v1", "git@hf.co:org/name", "ssh://git@hf.co/org/name", f"{HUB}@v1",
        "file:///data/x", "http://localhost:11434/v1", "http://[::1]:8000/v1", f"{HUB}?download=true",
        f"{HUB}?max_tokens=20&tokenizer=x", "hf://datasets/org/name@refs%2Fpr%2F1/x.jsonl", "year=2024/x.parquet",
        "Contact:jane@example.org", "mailto:jane@example.org", "hf_model_of_a_long_name_for_llama", "https://h/@me/x:y@z",
    ],
)  # fmt: skip
def test_ordinary_addresses_hold_no_secret(address: str) -> None:
    assert not holds_secret(address)


@pytest.mark.parametrize("address", SECRETS)
def test_addresses_with_a_secret_are_refused_and_not_repeated(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {"target": "T", "prior": "P", "forget": {"data": {"path": "x.jsonl"}}, "output": "out"}
    file, broken = tmp_path / "c.yaml", tmp_path / "broken.yaml"
    file.write_text(f"base_model: '{address}'\n'{address}': 1\n")
    broken.write_text(f"'{address}': 1\n'{address}': 2\n")
    tries: list[Callable[[], object]] = [
        lambda: model_name(address),
        lambda: DataSource(address),
        lambda: read_yaml(file),
        lambda: read_yaml(broken),
        lambda: load_recipe(base, [f"target={address}"]),
        *(partial(load_recipe, base | {key: address}) for key in ("target", "forget", "output", "seed", "no_key")),
        partial(load_recipe, base | {"earlier": [address]}),
        partial(load_recipe, base | {"evaluate": {"judge": {"base_url": address}}}),
    ]
    for attempt in tries:
        with pytest.raises(MsaError) as caught:
            attempt()
        assert "S3cret" not in "".join(traceback.format_exception(caught.value))
    for words in (["run", address], ["merge", f"--target={address}"], ["plan", "r.yaml", f"target={address}", "-v"]):
        monkeypatch.setattr("sys.argv", ["msa-lite", *words])
        with pytest.raises(SystemExit, match="2"):
            main()
    assert "S3cret" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("address", "path", "others"),
    [
        (f"{DATA}/", "org/name", {}),
        ("hf.co/datasets/org/name", "org/name", {}),
        (f"{DATA}/tree/v2", "org/name", {"revision": "v2"}),
        (f"{DATA}/viewer/forget10/train?row=5", "org/name", {"name": "forget10", "split": "train"}),
        ("https://huggingface.co/datasets/squad/viewer", "squad", {}),
        (f"{DATA}/blob/main/data/x.jsonl", "hf://datasets/org/name/data/x.jsonl", {}),
        ("hf://datasets/org/name@v2/x.csv", "hf://datasets/org/name/x.csv", {"revision": "v2"}),
    ],
)
def test_the_address_of_a_data_set_is_taken_as_what_it_shows(address: str, path: str, others: dict[str, str]) -> None:
    source = DataSource(*split_configuration(address)[:1])
    assert source == DataSource(path, **others)  # type: ignore[arg-type]
    data = load_recipe(
        {"target": "T", "prior": "P", "forget": {"data": {"path": address}}, "output": "out"}
    ).forget.data
    assert (data.path, data.name, data.split, data.revision) == (path, source.name, source.split, source.revision)
    if "/x." not in path:
        assert split_revision(address) == (path, others.get("revision"))


@pytest.mark.parametrize(
    ("address", "kind", "says"),
    [
        (DATA, "model", "is a data set"),
        (HUB, "dataset", "huggingface.co/datasets/"),
        (f"{HUB}/tree/main/checkpoint-500", "model", "hf download org/name --include 'checkpoint-500/*'"),
        (f"{HUB}/blob/v1/model-Q4_K_M.gguf", "model", "--revision v1 --include 'model-Q4_K_M.gguf'"),
        (f"{DATA}/tree/main/data", "dataset", "--repo-type dataset --include 'data/*'"),
        (f"{HUB}/discussions/3", "model", "give org/name"),
        ("https://huggingface.co/spaces/org/name", "model", "names no model"),
        ("https://huggingface.co/", "model", "names no model"),
        ("hf.co/org/name:Q4_K_M", "model", "names no model"),
        ("https://example.org/a/b.jsonl", "dataset", "download it"),
        ("s3://bucket/model", "model", "download it"),
        ("file:///data/model", "model", "/data/model"),
    ],
)
def test_other_addresses_are_refused_with_the_reason_and_without_a_network(address: str, kind: str, says: str) -> None:
    with pytest.raises(AddressError, match=re.escape(says)) as caught:
        model_name(address) if kind == "model" else DataSource(address)
    assert "secret" not in str(caught.value)
    recipe = {"target": "T", "prior": "P", "forget": {"data": {"path": "x.jsonl"}}, "output": "out"}
    recipe |= {"target": address} if kind == "model" else {"forget": {"data": {"path": address}}}
    with pytest.raises(RecipeError, match=re.escape(says)):
        load_recipe(recipe)


def test_an_address_and_a_key_do_not_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="name is other"):
        DataSource(f"{DATA}/viewer/forget10", name="other")
    assert split_configuration(f"{DATA}/tree/main") == (f"{DATA}/tree/main", None)
    assert split_configuration("folder:forget10") == ("folder", "forget10")
