"""The table of benchmarks, what TOFU asks, and deviations of published code, each only where it is asked for."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from msa_lite.catalogue import BENCHMARKS, OWN, published
from msa_lite.data import Prompter, Row, Template
from msa_lite.errors import DataError, UsageError
from msa_lite.evals.benchmarks.aggregates import COMMON, known_presets, known_switches, resolve_compat, switches_of
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Record, find_benchmark
from msa_lite.evals.benchmarks.tofu import TOFU
from msa_lite.evals.engine.models import Runner
from msa_lite.evals.scores.records import run_items
from msa_lite.evals.scores.suite import load_benchmark
from tests.support.benchmark_data import TABLES, TofuRow, make_prompter, make_tofu, row, shortened, write_tofu
from tests.support.models import tiny_tokenizer
from tests.support.plain import plain_answer, plain_scores, wide_model
from tests.support.records import differences
from tests.tools.arrows import PACKAGE, sources


def without(*names: str) -> dict[str, list[TofuRow]]:
    return {name: rows for name, rows in TABLES.items() if name not in names}


def test_every_fault_of_a_data_set_is_told_at_once(tmp_path: Path) -> None:
    tables: dict[str, Sequence[Mapping[str, Any]]] = dict(without("retain_perturbed", "world_facts_perturbed"))
    tables["forget01_perturbed"] = [{"question": "Who?", "answer": "I."}]
    with pytest.raises(DataError) as told:
        TOFU.load(make_prompter(), BenchmarkSettings(write_tofu(tmp_path, tables), "forget01"))  # type: ignore[arg-type]
    text = str(told.value)
    assert "no configuration 'retain_perturbed'" in text
    assert "no configuration 'world_facts_perturbed'" in text
    assert "configuration 'forget01_perturbed': no column 'perturbed_answer', 'paraphrased_answer'" in text
    assert "there are " in text
    assert "real_authors" in text.partition("there are ")[2]


def test_only_the_holdout_may_be_absent(tmp_path: Path) -> None:
    whole, rest = make_tofu(tmp_path / "a"), make_tofu(tmp_path / "b", without("holdout01"))
    assert list(whole.sets) == ["forget", "retain", "real_authors", "world_facts", "holdout"]
    assert list(rest.sets) == ["forget", "retain", "real_authors", "world_facts"]
    assert [part.with_z for part in whole.sets.values()] == [True, False, False, False, True]
    assert not any(part.with_z for part in rest.sets.values())
    assert whole.sets["holdout"].decoding is None
    assert all(item.prompt is None for item in whole.sets["holdout"].items)


def test_a_limit_takes_a_sample_by_the_seed(tmp_path: Path) -> None:
    def numbers(**options: Any) -> list[list[int]]:
        return [[item.index for item in part.items] for part in make_tofu(tmp_path, **options).sets.values()]

    two = numbers(limit=2)
    assert [len(found) for found in two] == [2] * 5
    assert all(found == sorted(found) for found in two)
    assert numbers(limit=2) == two
    assert numbers(limit=2, seed=1) != two
    assert numbers(limit=100) == [list(range(len(rows))) for rows in TABLES.values()]


@pytest.mark.parametrize("chat", [False, True])
def test_texts_and_prompts_are_those_of_the_prompter(chat: bool, tmp_path: Path) -> None:
    prompter = make_prompter(chat)
    item = TOFU.load(prompter, BenchmarkSettings(write_tofu(tmp_path), "forget01")).sets["forget"].items[1]
    asked = TABLES["forget01_perturbed"][1]
    assert item.prompt == prompter.prompt(Row(0, asked["question"]))
    assert {name: len(texts) for name, texts in item.texts.items()} == {"answer": 1, "paraphrased": 1, "perturbed": 3}
    answers = {"answer": [asked["answer"]], "paraphrased": [asked["paraphrased_answer"]]}
    for name, said in (answers | {"perturbed": asked["perturbed_answer"]}).items():
        assert item.texts[name] == tuple(prompter.example(Row(1, asked["question"], text)) for text in said)
    assert item.fields == {key: asked[key] for key in ("question", "answer", "perturbed_answer")}


def odd_records(folder: Path, *rows: TofuRow) -> tuple[Benchmark, list[Record]]:
    """The records of a model for rows in the place of the forget set's."""
    tofu = make_tofu(folder, TABLES | {"forget01_perturbed": [*rows, row(9, 3)]})
    return tofu, run_items(Runner(wide_model("llama")), tofu, "forget")


def test_empty_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    tofu, (empty, bare, usual) = odd_records(
        tmp_path,
        row(0, 3) | {"answer": " "},
        row(1, 3) | {"answer": "", "paraphrased_answer": "", "perturbed_answer": ["", "It is here.", " "]},
    )
    assert empty["probability"] is empty["extraction_strength"] is empty["rouge_l"] is None
    assert empty["truth_ratio"] is not None  # of the paraphrased answer
    assert bare["truth_ratio"] is None
    assert len(bare["scores"]["perturbed"]) == 1
    assert None not in (usual["probability"], usual["truth_ratio"], usual["rouge_l"])
    others: dict[str, list[Record]] = {name: [] for name in tofu.sets}
    found = tofu.metrics(others | {"forget": [empty, bare, usual]}, None)
    counted = {name: (found[name].n, found[name].skipped) for name in ("probability_f", "rouge_l_f", "truth_ratio_f")}
    assert counted == {"probability_f": (1, 2), "rouge_l_f": (1, 2), "truth_ratio_f": (2, 1)}
    assert found["min_k"].note == "one of the two sides has no items"
    assert found["model_utility"].value is None


def test_items_beyond_the_window_are_skipped_with_the_reason(tmp_path: Path) -> None:
    long = row(0, 1) | {"question": "Where? " * 300}
    wide = row(1, 1) | {"perturbed_answer": ["Here. " * 200]}
    _, (first, second, _) = odd_records(tmp_path, long, wide)
    assert (first["probability"], first["generated"], first["rouge_l"]) == (None, None, None)
    assert "longer than the 512 tokens" in first["skipped"]
    # One wrong answer is too long: the item's texts are left out together, but there is room to generate.
    assert (second["probability"], second["truth_ratio"]) == (None, None)
    assert second["generated"] is not None
    assert "longer than the 512 tokens" in second["skipped"]


# The table of benchmarks, and deviations of published code: each changes what it says, where it is asked for.


def loaded(folder: Path, compat: Iterable[str] = (), prompter: Prompter | None = None) -> Benchmark:
    """The small TOFU with some switches on."""
    settings = BenchmarkSettings(write_tofu(folder), "forget01", compat=frozenset(compat))
    tofu = load_benchmark("tofu", prompter or make_prompter(), settings)
    assert isinstance(tofu, Benchmark)
    return shortened(tofu)


def run(tofu: Benchmark) -> list[Record]:
    return run_items(Runner(wide_model("llama")), tofu, "forget")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Benchmark, list[Record]]:
    tofu = loaded(tmp_path_factory.mktemp("plain"))
    return tofu, run(tofu)


@pytest.mark.parametrize(
    ("switch", "values"),
    [
        ("es_floor", {"extraction_strength"}),
        ("arithmetic_truth_ratio", {"truth_ratio"}),
        ("drop_last_token", set()),  # TOFU's answers end in an end token, which is left out in any case
        ("mask_eq_pad", set()),  # a padding token of its own stands in no prompt
        ("no_stemmer", set()),  # of MUSE alone
    ],
)
def test_a_switch_changes_what_it_says_and_nothing_else(
    switch: str, values: set[str], plain: tuple[Benchmark, list[Record]], tmp_path: Path
) -> None:
    switched = loaded(tmp_path, [switch])
    assert differences(plain[1], run(switched)) == values
    assert (plain[0].describe()["compat"], switched.describe()["compat"]) == ([], [switch])


def test_ends_of_turn_are_hidden_on_request_where_they_are_the_padding(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat=True)  # each turn of whose prompts ends in its end token
    tokenizer.pad_token = None
    prompter = Prompter.build(tokenizer, "default", Template())
    plain, switched = (loaded(tmp_path / str(n), names, prompter) for n, names in enumerate(([], ["mask_eq_pad"])))
    end = tokenizer.eos_token_id
    model = wide_model("llama")
    padded = copy.deepcopy(tokenizer)
    padded.pad_token = "<pad>"
    for tofu, hidden in ((plain, None), (switched, end)):
        for item, record in zip(tofu.sets["forget"].items, run(tofu), strict=True):
            wanted = plain_scores(model, item.texts["answer"][0], hidden).log_probs
            assert record["scores"]["answer"][0]["loss"] == pytest.approx(-wanted.mean(), abs=1e-5, rel=1e-5)
            assert record["generated"] == plain_answer(model, padded, item.prompt or [], 6, hidden)
    assert {"probability", "truth_ratio"} <= differences(run(plain), run(switched))


def test_plain_prompts_end_in_a_blank_on_request(tmp_path: Path) -> None:
    plain, switched = loaded(tmp_path / "a"), loaded(tmp_path / "b", ["trailing_blank"])
    for one, other in zip(plain.sets["forget"].items, switched.sets["forget"].items, strict=True):
        texts = [plain.tokenizer.decode(item.prompt) for item in (one, other)]
        assert texts[1] == texts[0] + " "
        # What is said is the same; where it is cut is not.
        whole = [item.texts["answer"][0] for item in (one, other)]
        assert whole[0].ids == whole[1].ids
        assert len(whole[0].prompt_ids) + 1 == len(whole[1].prompt_ids)
    chats = [
        loaded(tmp_path / name, names, make_prompter(chat=True)) for name, names in (("c", []), ("d", known_switches()))
    ]
    assert chats[0].sets["forget"].digest() == chats[1].sets["forget"].digest()


def test_presets_stand_for_the_switches_that_a_benchmark_reads() -> None:
    assert resolve_compat([], "tofu") == frozenset()
    assert resolve_compat(["open-unlearning", "es_floor"], "muse") == frozenset(COMMON) - {"second_end"}
    assert resolve_compat(["open-unlearning"], "tofu") == {"mask_eq_pad", "second_end", "es_floor", "trailing_blank"}
    switches = set(known_switches())
    assert {name for names in known_presets().values() for name in names} == switches  # each belongs to somebody's code
    assert set[str]().union(*map(switches_of, BENCHMARKS)) == switches  # and each changes something
    for benchmark in BENCHMARKS:
        assert resolve_compat(switches_of(benchmark), benchmark) == switches_of(benchmark)


@pytest.mark.parametrize(("name", "benchmark"), [("no_stemmer", "tofu"), ("tofu", "restor"), ("sampling", "muse")])
def test_a_switch_that_changes_nothing_is_refused(name: str, benchmark: str) -> None:
    with pytest.raises(UsageError, match=f"compat: '{name}' changes nothing in {benchmark}"):
        resolve_compat([name], benchmark)


@pytest.mark.parametrize(("wrong", "meant"), [("es_flor", "es_floor"), ("open_unlearning", "open-unlearning")])
def test_an_unknown_name_is_told_with_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"compat: unknown '{wrong}' \\(did you mean '{meant}'"):
        resolve_compat(["muse", wrong], "muse")


# The table of benchmarks, and that nothing outside it and a benchmark's own module knows one by name.


# Where published benchmarks may be named, and why.
ALLOWED = {
    "catalogue.py": "their entries",
    "evals/benchmarks/tofu.py": "its own module",
    "evals/benchmarks/muse.py": "its own module",
    "evals/benchmarks/restor.py": "its own module",
    "evals/judge/base.py": "the prompts of a file that each benchmark needs",
    "evals/judge/prompts.py": "what a judge is asked; manifests hold the hash of all prompts",
    "pipeline/table/rows.py": "the data that their tables read",
    "report/tables/metrics.py": "the papers that define metrics",
}
NAMED = re.compile(r"tofu|muse|restor(?![ei])", re.IGNORECASE)  # but not: restore, restoring


def words(source: str) -> Iterator[str]:
    """Give the names and the strings of a source. Comments and docstrings may say where facts are from."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        values = (getattr(node, field, None) for field in ("id", "attr", "name", "arg", "module", "value"))
        yield from (value for value in values if isinstance(value, str) and id(node) not in texts)


def test_a_benchmark_is_known_to_its_module_and_its_entry_alone() -> None:
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in sources()}
    candidates = {place: text for place, text in texts.items() if NAMED.search(text)}  # parsing all of them takes long
    assert {place for place, text in candidates.items() if any(map(NAMED.search, words(text)))} == ALLOWED.keys()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_an_entry_leads_to_the_value_of_its_name(name: str) -> None:
    kind = find_benchmark(name)
    assert kind.name == name
    assert kind.default_score is None or kind.default_score in BENCHMARKS[name].scores
    assert {*kind.preset} <= {*kind.switches, *kind.reads}


def test_the_users_own_benchmark_is_not_published() -> None:
    assert [OWN, *published()] == [*BENCHMARKS]
