"""MUSE-Books and MUSE-News: what is asked, token by token, the metrics by hand, and all of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.data import IGNORE, DataSource, Example, Prompter, load_rows
from msa_lite.errors import DataError, UsageError
from msa_lite.evals.benchmarks.aggregates import NO_IDEAL
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Record, Records
from msa_lite.evals.benchmarks.muse import MUSE
from msa_lite.evals.engine.forward import MAX_TOKENS, TokenScores, completion
from msa_lite.evals.scores.evaluation import evaluate_benchmark
from msa_lite.evals.scores.records import token_record
from msa_lite.io.weights.hub import fetch
from msa_lite.pipeline.prepare.run import _pin_benchmark
from msa_lite.recipe import load_recipe
from msa_lite.report import Metric, load_report
from tests.support.benchmark_data import FOLDS, MUSE_METRICS, NEWS, ROWS, SHOTS, make_prompter, write_data
from tests.support.models import tiny_tokenizer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("books"))


@pytest.fixture(scope="module")
def loaded(data: str) -> Benchmark:
    return MUSE.load(make_prompter(), BenchmarkSettings(data))


def without_bos() -> Any:
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    return tokenizer


# What is asked


def test_a_completion_is_prompt_and_text_as_one_string() -> None:
    tokenizer = tiny_tokenizer()
    z, q, blank = tokenizer.convert_tokens_to_ids(["z", "q", "Ġ"])
    (text,) = completion(tokenizer, 7, "zz", " qz")
    assert text == Example(7, [0, z, z, blank, q, z], [IGNORE, IGNORE, IGNORE, blank, q, z])
    (text,) = completion(without_bos(), 7, "zz", " qz")
    assert text == Example(7, [z, z, blank, q, z], [IGNORE, IGNORE, blank, q, z])


def test_a_text_without_prompt_is_scored_from_its_second_token_on() -> None:
    tokenizer = tiny_tokenizer()
    z, q = tokenizer.convert_tokens_to_ids(["z", "q"])
    assert completion(tokenizer, 0, "", "zq") == (Example(0, [0, z, q], [IGNORE, z, q]),)
    assert completion(without_bos(), 0, "", "zq") == (Example(0, [z, q], [IGNORE, q]),)
    # A single token is predicted from the beginning-of-sequence token, or from nothing.
    assert completion(tokenizer, 0, "", "z") == (Example(0, [0, z], [IGNORE, z]),)
    assert completion(without_bos(), 0, "", "z") == ()
    assert completion(tokenizer, 0, "", "") == completion(tokenizer, 0, "zz", " \n") == ()


def test_labels_are_counted_where_the_prompt_merges_into_the_text() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"a": 0, "b": 1, " ": 2, "c": 3, "b ": 4}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [("b", " ")])))
    assert tokenizer("ab")["input_ids"] == [0, 1]  # no prefix of a, "b ", c, c: the blank went to the prompt's last
    assert completion(tokenizer, 0, "ab", " cc") == (Example(0, [0, 4, 3, 3], [IGNORE, IGNORE, 3, 3]),)
    assert completion(tokenizer, 0, "abb", " c") == (Example(0, [0, 1, 4, 3], [IGNORE, IGNORE, IGNORE, 3]),)


def test_texts_are_cut_behind_their_prompt() -> None:
    long = " " + "z" * 3000
    for tokenizer, count in ((tiny_tokenizer(), 3), (without_bos(), 2)):
        (text,) = completion(tokenizer, 0, "zz", long)
        assert len(text.ids) == count + MAX_TOKENS
        assert sum(label != IGNORE for label in text.labels) == MAX_TOKENS
    assert len(completion(tiny_tokenizer(), 0, "", long)[0].ids) == 1 + MAX_TOKENS
    assert len(completion(without_bos(), 0, "", long)[0].ids) == MAX_TOKENS


def test_sets_and_how_their_answers_are_made(loaded: Benchmark) -> None:
    sizes = {name: len(part.items) for name, part in loaded.sets.items()}
    assert sizes == {
        "verbmem": 2, "knowmem_forget": 2, "knowmem_retain": 1, "privleak_forget": 4, "privleak_holdout": 4,
    }  # fmt: skip
    assert (loaded.name, loaded.split) == ("muse", "books")
    stops = ("\n\n", "\nQuestion", "Question:")
    made = {
        name: part.decoding and (part.decoding.max_new_tokens, part.decoding.stop) for name, part in loaded.sets.items()
    }
    assert made == {
        "verbmem": (128, ()), "knowmem_forget": (32, stops), "knowmem_retain": (32, stops),
        "privleak_forget": None, "privleak_holdout": None,
    }  # fmt: skip
    texts = {name for name, part in loaded.sets.items() if not part.ends}
    assert texts == {"verbmem", "privleak_forget", "privleak_holdout"}
    assert {name for name, part in loaded.sets.items() if part.with_z} == {"privleak_forget", "privleak_holdout"}
    passage = loaded.sets["verbmem"].items[0]
    assert passage.prompt == loaded.tokenizer("There was a cat")["input_ids"]
    assert passage.texts["text"] == completion(loaded.tokenizer, 0, "There was a cat", " that sat over there.")
    assert passage.fields == ROWS["verbmem", "forget"][0]


def test_plain_prompts_show_the_ten_examples_in_order(loaded: Benchmark) -> None:
    shown = [f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in SHOTS]
    item = loaded.sets["knowmem_forget"].items[0]
    assert loaded.tokenizer.decode(item.prompt) == f"<s>{''.join(shown)}Question: {item.fields['question']}\nAnswer:"
    (item,) = loaded.sets["knowmem_retain"].items
    assert loaded.tokenizer.decode(item.prompt) == f"<s>{''.join(shown[::-1])}Question: Where is it?\nAnswer:"
    assert not item.texts


def test_chat_prompts_show_the_ten_examples_as_turns(data: str) -> None:
    muse = MUSE.load(Prompter.for_benchmark(tiny_tokenizer(chat=True)), BenchmarkSettings(data))
    shown = "".join(f"user: {shot['question']}</s>assistant: {shot['answer']}</s>" for shot in SHOTS)
    prompt = muse.tokenizer.decode(muse.sets["knowmem_forget"].items[0].prompt)
    assert prompt.endswith(f"</s>{shown}user: Who sat?</s>assistant: ")
    passage = muse.tokenizer.decode(muse.sets["verbmem"].items[0].prompt)
    assert passage == "<s>There was a cat"  # running text has no turns


def test_everything_that_lacks_is_named_at_once(tmp_path: Path) -> None:
    rows = {key: value for key, value in ROWS.items() if key[0] != "verbmem" and key[1] != "retain_qa_icl"}
    rows |= {("privleak", split): [{"words": "It is"}] for split in ("forget", "holdout")}
    with pytest.raises(DataError) as caught:
        MUSE.load(make_prompter(), BenchmarkSettings(write_data(tmp_path, rows)))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("there are knowmem, privleak")
    assert len(lines) == 4
    assert "no configuration 'verbmem'" in lines[1]
    assert "configuration 'knowmem': no split 'retain_qa_icl'" in lines[2]
    assert "configuration 'privleak': no column 'text'" in lines[3]


def test_cells_that_are_no_text_are_named_in_every_column(tmp_path: Path) -> None:
    rows = {key: [dict.fromkeys(rows[0], float("nan")), *rows[1:]] for key, rows in ROWS.items()}
    with pytest.raises(DataError) as caught:
        MUSE.load(make_prompter(), BenchmarkSettings(write_data(tmp_path, rows)))
    for configuration, split in ROWS:
        place = f"configuration '{configuration}': {configuration}/{split}.jsonl, row 0 (line 1), column "
        assert place in str(caught.value)


# Metrics by hand


def scored(muse: Benchmark, set_name: str, scores: Sequence[TokenScores], drop_last: bool = False) -> list[Record]:
    """Records of a set whose texts have these scores."""
    floor = "es_floor" in muse.compat
    return [
        muse.score(muse, set_name, {"index": i, "prompt": "", "gt": "", "text": "", "generated": None} | {
            "scores": {"text": [token_record(one, drop_last, floor)]}
        })
        for i, one in enumerate(scores)
    ]  # fmt: skip


def answered(muse: Benchmark, set_name: str, pairs: Sequence[tuple[str, str | None]]) -> list[Record]:
    """Records of a set with these references and answers."""
    key = "gt" if set_name == "verbmem" else "answer"
    return [
        muse.score(muse, set_name, {"index": i, key: right, "generated": said}) for i, (right, said) in enumerate(pairs)
    ]


def matches(*values: bool) -> TokenScores:
    return TokenScores(np.zeros(len(values)), np.array(values), None)


def tokens(log_probs: Sequence[float], z: Sequence[float]) -> TokenScores:
    return TokenScores(np.array(log_probs), np.zeros(len(log_probs), bool), np.array(z))


@pytest.fixture
def muse() -> Benchmark:
    return MUSE.over("books", {}, make_prompter())


def find(muse: Benchmark, ideal: Records | None = None, **records: list[Record]) -> dict[str, Metric]:
    empty: dict[str, list[Record]] = {
        name: [] for name in ("verbmem", "knowmem_forget", "knowmem_retain", "privleak_forget", "privleak_holdout")
    }
    return muse.metrics(empty | records, ideal)


def test_memorization_of_passages(muse: Benchmark) -> None:
    # Right from the second of four on: ES 1 − 1/4, EM 3/4. Right but at the end: ES 0, EM 3/4. A third is empty: ES and
    # EM are not defined, and it is counted.
    passages = [matches(False, True, True, True), matches(True, True, True, False)]
    records = scored(muse, "verbmem", passages) + answered(muse, "verbmem", [("", "")])
    found = find(muse, verbmem=records)
    strength, exact = found["extraction_strength"], found["exact_memorization"]
    assert (strength.value, strength.n, strength.skipped) == (pytest.approx((3 / 4 + 0) / 2), 2, 1)
    assert (exact.value, exact.n, exact.skipped) == (pytest.approx(3 / 4), 2, 1)
    assert strength.stderr == pytest.approx(3 / 8)  # deviation (3/4)/√2, over √2
    assert strength.higher_is_better is exact.higher_is_better is False


def test_verbmem_is_rouge_l_f1_of_continuations(muse: Benchmark) -> None:
    # "the cat … on … mat" are 4 of 6 and of 5 words: 2·4/(6 + 5). Stems of "Dogs run." and "a dog runs": 2·2/(2 + 3).
    pairs = [("The cat sat on the mat", "the cat on a mat"), ("Dogs run.", "a dog runs")]
    found = find(muse, verbmem=answered(muse, "verbmem", pairs))["verbmem_f"]
    assert (found.value, found.n, found.higher_is_better) == (pytest.approx((8 / 11 + 4 / 5) / 2), 2, False)
    plain = replace(muse, compat=frozenset({"no_stemmer"}))
    found = find(plain, verbmem=answered(plain, "verbmem", pairs))["verbmem_f"]
    assert found.value == pytest.approx((8 / 11 + 0) / 2)


def test_a_short_reference_has_as_many_tokens_as_are_generated(muse: Benchmark) -> None:
    # "zz zz …" has a beginning token and 3 tokens a word: of 128 tokens, 127 make 42 words and a "z". With 42 words
    # said, all of them right: F1 = 2·42/(43 + 42) of the cut reference, 2·42/(100 + 42) of the whole.
    reference, said = ("zz " * 100).strip(), "zz " * 42
    assert len(muse.tokenizer(reference)["input_ids"]) == 1 + 3 * 100 - 1
    short = replace(muse, compat=frozenset({"short_reference"}))
    values = [answered(kind, "verbmem", [(reference, said)])[0]["rouge_l_f1"] for kind in (muse, short)]
    assert values == pytest.approx([84 / 142, 84 / 85])
    assert answered(short, "knowmem_forget", [(reference, said)])[0]["rouge_l_f1"] == pytest.approx(84 / 142)


def test_knowmem_is_rouge_l_f1_of_answers(muse: Benchmark) -> None:
    # Forget: "Necile" in 3 words, 2·1/(1 + 3), and nothing said, 0. Retain: the same words, 1.
    found = find(
        muse,
        knowmem_forget=answered(muse, "knowmem_forget", [("Necile", "It is Necile"), ("Burzee", "")]),
        knowmem_retain=answered(muse, "knowmem_retain", [("Aunt Em", "aunt em!")]),
    )
    forget, retain = found["knowmem_f"], found["knowmem_r"]
    assert (forget.value, forget.n, forget.higher_is_better) == (pytest.approx((1 / 2 + 0) / 2), 2, False)
    assert (retain.value, retain.n, retain.higher_is_better) == (1.0, 1, True)


def test_items_without_a_score_are_counted(muse: Benchmark) -> None:
    # No answer given to compare with (empty, or without a word), and none made as the prompt was too long or empty.
    pairs = [("", "cat"), ("…", "cat"), ("cat", None), ("cat", "cat")]
    records = answered(muse, "knowmem_retain", pairs)
    records.append(muse.score(muse, "knowmem_retain", {"index": 4, "answer": "cat"}))
    found = find(muse, knowmem_retain=records)["knowmem_r"]
    assert (found.value, found.n, found.skipped) == (1.0, 1, 4)
    found = find(
        muse, verbmem=[muse.score(muse, "verbmem", {"index": 0, "gt": "cat", "scores": {}, "generated": None})]
    )
    assert [found[key].skipped for key in ("extraction_strength", "exact_memorization", "verbmem_f")] == [1, 1, 1]
    assert found["verbmem_f"].value is None
    assert found["verbmem_f"].note


# Five tokens, so ⌊0.4 · 5⌋ = 2 of them count. Min-K: 4.5 and 1 of the forget texts, 7 and 2 of the holdout texts, so
# holdout is above forget in 3 of 4 pairs. Min-K++: 0 and 3 against 1 and 2, above in 2 of 4.
FORGET = [tokens([-1, -2, -3, -4, -5], [0, 0, 0, 0, 0]), tokens([-1, -1, -1, -1, -1], [-3, 4, 4, 4, -3])]
HOLDOUT = [tokens([-2, -2, -6, -8, -2], [-1, -1, 9, 9, 9]), tokens([-1, -3, -1, -1, -1], [-2, -2, 0, 0, 0])]
# The ideal's Min-K: 1 of both forget texts, 1 and 2 of the holdout texts, (½ + ½ + 1 + 1)/4 = 3/4. Its Min-K++: 0
# everywhere, ½.
IDEAL_FORGET = [tokens([-1] * 5, [0] * 5)] * 2
IDEAL_HOLDOUT = [tokens([-1] * 5, [0] * 5), tokens([-2] * 5, [0] * 5)]


def sides(muse: Benchmark, forget: Sequence[TokenScores], holdout: Sequence[TokenScores]) -> dict[str, list[Record]]:
    return {
        "privleak_forget": scored(muse, "privleak_forget", forget),
        "privleak_holdout": scored(muse, "privleak_holdout", holdout),
    }


def test_membership_of_forget_texts_beside_the_ideal(muse: Benchmark) -> None:
    found = find(muse, sides(muse, IDEAL_FORGET, IDEAL_HOLDOUT), **sides(muse, FORGET, HOLDOUT))
    assert (found["min_k"].value, found["min_k"].n) == (pytest.approx(3 / 4), 4)
    assert found["min_k_pp"].value == pytest.approx(1 / 2)
    assert found["min_k_gap"].value == pytest.approx(0)
    assert found["min_k_pp_gap"].value == pytest.approx(0)
    assert found["privleak"].value == pytest.approx(0)
    assert [found[key].higher_is_better for key in ("min_k", "min_k_pp", "min_k_gap", "min_k_pp_gap")] == [False] * 4
    lacking = find(muse, **sides(muse, [*FORGET, tokens([], [])], HOLDOUT))["min_k"]
    assert (lacking.value, lacking.n, lacking.skipped) == (pytest.approx(3 / 4), 4, 1)
    # Told apart every time: 1 − ¾ = ¼ away, PrivLeak (0 − ¼)/¼ = −100 %. The other way round 0: 100·(1 − ¼)/¼ = 300 %.
    for forget, holdout, gap, leak in ((FORGET[1:], HOLDOUT[:1], 1 / 4, -100), (HOLDOUT[:1], FORGET[1:], 3 / 4, 300)):
        found = find(muse, sides(muse, IDEAL_FORGET, IDEAL_HOLDOUT), **sides(muse, forget, holdout))
        assert found["min_k_gap"].value == pytest.approx(gap)
        assert found["privleak"].value == pytest.approx(leak)
        assert (found["privleak"].higher_is_better, found["privleak"].note) == (None, "best at 0")


def test_without_an_ideal_or_its_items_there_is_a_reason_and_no_number(muse: Benchmark) -> None:
    needy = ("min_k_gap", "min_k_pp_gap", "privleak")
    found = find(muse, **sides(muse, FORGET, HOLDOUT))
    assert [(found[key].value, found[key].note) for key in needy] == [(None, NO_IDEAL)] * 3
    assert found["min_k"].value == pytest.approx(3 / 4)
    found = find(muse, sides(muse, [], HOLDOUT), **sides(muse, FORGET, HOLDOUT))
    assert [found[key].value for key in needy] == [None] * 3
    assert {found[key].note for key in needy} == {"one of the ideal's two sides has no items"}
    assert set(found) == MUSE_METRICS
    empty = find(muse, sides(muse, FORGET, HOLDOUT))
    assert [metric.value for metric in empty.values()] == [None] * len(MUSE_METRICS)
    assert all(metric.note for metric in empty.values())


def test_wrong_names_are_wrong_usage(data: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        MUSE.load(make_prompter(), BenchmarkSettings(str(tmp_path / "none")))
    with pytest.raises(UsageError, match=r"muse has no split 'new' \(did you mean 'news'\?\); choose from"):
        MUSE.load(make_prompter(), BenchmarkSettings(data, "new"))


# With a model


def test_all_metrics_are_given_with_an_ideal(make_checkpoint: Any, loaded: Benchmark, tmp_path: Path) -> None:
    model, ideal = (fetch(str(make_checkpoint("llama", seed, max_position_embeddings=4096))) for seed in (0, 1))
    report = evaluate_benchmark(model, loaded, tmp_path / "out", ideal=ideal)
    assert (report.benchmark, report.split, set(report.metrics)) == ("muse", "books", MUSE_METRICS)
    assert None not in report.values().values()
    assert report.metrics["knowmem_f"].skipped == 1
    of_ideal = load_report(tmp_path / "out/ideal").values()
    assert of_ideal["privleak"] == of_ideal["min_k_gap"] == 0.0  # its own ideal


# MUSE-News: its data beside that of MUSE-Books, its forget sets.


@pytest.fixture(scope="module")
def news(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data") / "MUSE-News", NEWS)


def load(data: str, split: str | None = None) -> Benchmark:
    return MUSE.load(make_prompter(), BenchmarkSettings(data, split))


def test_news_is_asked_as_books_and_reports_tell_them_apart(news: str, tmp_path: Path) -> None:
    books = load(write_data(tmp_path / "copy", ROWS))
    asked = load(news)
    assert (books.split, asked.split, load(news, "books").split) == ("books", "news", "books")
    assert load(str(tmp_path / "copy"), "news").split == "news"
    assert asked.describe() == books.describe() | {"split": "news"}


@pytest.mark.parametrize(
    ("evaluate", "home"),
    [
        ({}, "muse-bench/MUSE-Books"),
        ({"split": "books"}, "muse-bench/MUSE-Books"),
        ({"split": "news"}, "muse-bench/MUSE-News"),
        ({"split": "news", "data": "mine/copy"}, "mine/copy"),
    ],
)
def test_a_run_takes_the_data_of_its_split(
    evaluate: dict[str, str], home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msa_lite.pipeline.prepare.run.pinned_data", lambda place: f"{place}@commit")
    rows = {"data": {"path": "rows.jsonl"}}
    recipe = load_recipe(
        {"target": "t", "prior": "p", "forget": rows, "output": "o", "evaluate": {"benchmark": "muse", **evaluate}}
    )
    pinned = _pin_benchmark(recipe).evaluate
    assert pinned
    assert pinned.data == f"{home}@commit"


def forget_rows(data: str, *overrides: str) -> set[str]:
    """The texts that the shipped recipe forgets, read from a folder in the place of the Hub."""
    place = load_recipe("muse/news", overrides).forget.data
    assert place.path == "muse-bench/MUSE-News"
    return {row.text for row in load_rows(DataSource(data, name=place.name, split=place.split, format="text"))}


def test_the_recipes_forget_sets_grow_or_follow_one_another(news: str) -> None:
    first = forget_rows(news)
    grown = [forget_rows(news, f"forget.data.split=forget_{fold}") for fold in FOLDS]
    assert [len(rows) for rows in grown] == [2, 4, 6, 8]
    assert first == grown[0] < grown[1] < grown[2] < grown[3]
    sust = "forget.data.name=sust"
    requests = [first, *(forget_rows(news, sust, f"forget.data.split=forget_{fold}") for fold in FOLDS[1:])]
    assert [len(rows) for rows in requests] == [2, 2, 2, 2]
    assert set.union(*requests) == grown[-1]  # disjoint, since their sizes add up
