"""Adapters on targets: names found, orientations told, what does not fit refused, what is missing warned of."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from msa_lite.errors import FormatError, MismatchError, UsageError
from msa_lite.io.weights.adapter import _KEYS, _PREFIX, load_adapter, unwrapped
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.counts import named_progress, parse_count
from msa_lite.io.weights.hub import fetch, find_branch
from msa_lite.io.weights.matching import find_name, match_names
from msa_lite.io.weights.patterns import Patterns
from msa_lite.io.weights.vocabulary import has_token_role
from msa_lite.merger import merge
from msa_lite.merger.checks.memory import parse_size
from tests.support.merges import edit_adapter

Make = Callable[..., Path]
Q = "model.layers.0.self_attn.q_proj"
UNTIED = {"tie_word_embeddings": False}
PREFIX = "base_model.model."
A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"


def test_an_adapter_for_another_architecture_lists_its_modules(make_checkpoint: Make, make_adapter: Make) -> None:
    with pytest.raises(MismatchError, match=rf"{Q}\.weight: the target has no such tensor") as caught:
        match_names(load_adapter(make_adapter("llama")), load_checkpoint(make_checkpoint("gpt2")).tensors)
    assert str(caught.value).count("the target has no such tensor") == 10
    assert "… and 4 more" in str(caught.value)


def test_an_adapter_for_another_size_lists_its_modules_with_both_shapes(
    make_checkpoint: Make, make_adapter: Make
) -> None:
    target = load_checkpoint(make_checkpoint("llama", hidden_size=64)).tensors
    with pytest.raises(MismatchError, match=rf"{Q}: the delta is \(32, 32\), the target's tensor is \(64, 64\)"):
        match_names(load_adapter(make_adapter("llama")), target)


@pytest.mark.parametrize("saved", [True, False])
def test_square_weights_follow_the_others_whatever_the_config_says(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, saved: bool
) -> None:
    # PEFT decides layer by layer and saves the value of the last one, which may be a plain linear layer.
    for kind, transposed in (("gpt2", True), ("llama", False)):
        adapter = load_adapter(edit_adapter(make_adapter(kind), tmp_path / kind, fan_in_fan_out=saved))
        matched = match_names(adapter, load_checkpoint(make_checkpoint(kind)).tensors).modules
        assert {factors.transposed for factors in matched.values()} == {transposed}


def test_square_weights_alone_follow_the_config(make_checkpoint: Make, make_adapter: Make, tmp_path: Path) -> None:
    tensors = load_checkpoint(make_checkpoint("llama")).tensors
    folder = make_adapter("llama", target_modules=["q_proj"])
    for saved in (True, False):
        adapter = load_adapter(edit_adapter(folder, tmp_path / str(saved), fan_in_fan_out=saved))
        assert {factors.transposed for factors in match_names(adapter, tensors).modules.values()} == {saved}


def test_square_weights_follow_the_targets_biases_beside_a_head_of_another_kind(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    tensors = load_checkpoint(make_checkpoint("gpt2", **UNTIED)).tensors
    for targets in (["attn.c_proj"], ["attn.c_proj", "lm_head"], ["c_attn", "attn.c_proj", "lm_head"]):
        made = make_adapter("gpt2", model=UNTIED, target_modules=targets)
        for saved in (True, False):
            adapter = load_adapter(edit_adapter(made, tmp_path / f"{len(targets)}-{saved}", fan_in_fan_out=saved))
            matched = match_names(adapter, tensors).modules
            assert {name: low.transposed for name, low in matched.items()} == {n: n[:2] == "tr" for n in matched}
            assert sum("c_proj" in name for name in matched) == 2


def test_square_weights_among_both_orientations_are_refused(make_checkpoint: Make, make_adapter: Make) -> None:
    tensors = load_checkpoint(make_checkpoint("llama")).tensors
    up = "model.layers.0.mlp.up_proj.weight"
    mixed = tensors | {up: replace(tensors[up], shape=tensors[up].shape[::-1])}
    with pytest.raises(MismatchError, match=rf"{Q}: square, among both"):
        match_names(load_adapter(make_adapter("llama")), mixed)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("_orig_mod.module.model.norm.weight", "model.norm.weight"),
        ("model.layers.0._checkpoint_wrapped_module._fsdp_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("transformer.h.0.ln_1.weight", "h.0.ln_1.weight"),
        ("model.language_model.norm.weight", "language_model.model.norm.weight"),
        ("language_model.model.norm.weight", "model.language_model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.visual.blocks.0.weight", "visual.blocks.0.weight"),
        ("lm_head.weight", "language_model.lm_head.weight"),
        ("_orig_mod.gpt_neox.layers.0.mlp.weight", "layers.0.mlp.weight"),
    ],
)
def test_known_renames_are_followed(name: str, target: str) -> None:
    assert find_name(name, {target, "other.weight"}) == target


def test_a_part_that_is_called_as_a_wrapper_is_found_by_its_own_name() -> None:
    both = {"model.module.norm.weight", "model.norm.weight"}
    assert {find_name(name, both) for name in both} == both
    assert find_name("_orig_mod.model.module.norm.weight", {"model.norm.weight"}) == "model.norm.weight"


@pytest.mark.parametrize("target", ["model.layers.0.norm.weight", "other.norm.weight", "norm.weight.weight", "norm"])
def test_other_names_are_not_guessed(target: str) -> None:
    assert find_name("model.norm.weight", {target}) is None


@pytest.mark.parametrize("part", ["vision_tower", "encoder", "thinker", "model.vision_tower"])
def test_a_part_that_the_target_does_not_have_is_refused(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, part: str
) -> None:
    def move(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace(PREFIX, f"{PREFIX}{part}.")] = tensors.pop(name)

    adapter = load_adapter(edit_adapter(make_adapter("llama"), tmp_path / "a", move))
    with pytest.raises(MismatchError, match=rf"  {part}\.{Q}\.weight: the target has no such tensor"):
        match_names(adapter, load_checkpoint(make_checkpoint("llama")).tensors)


def test_two_names_for_one_tensor_are_refused(make_checkpoint: Make, make_adapter: Make, tmp_path: Path) -> None:
    def twice(tensors: dict[str, np.ndarray]) -> None:
        for key in (A, B):
            tensors[key.replace(PREFIX, f"{PREFIX}_orig_mod.")] = tensors[key]

    adapter = load_adapter(edit_adapter(make_adapter("llama"), tmp_path / "a", twice))
    with pytest.raises(MismatchError, match=rf"{Q}\.weight: the target's {Q}\.weight, as is .*{Q}\.weight"):
        match_names(adapter, load_checkpoint(make_checkpoint("llama")).tensors)


@pytest.mark.parametrize(
    ("key", "array", "says"),
    [
        ("model.norm.weight", np.ones(7, np.float32), r"model\.norm\.weight: \(7,\) in the adapter, \(32,\) in the t"),
        ("model.nowhere.bias", np.ones(7, np.float32), r"model\.nowhere\.bias: the target has no such tensor"),
        ("lm_head.base_layer.weight", np.ones((9, 9), np.float32), r"lm_head\.weight: \(9, 9\) in the adapter"),
    ],
)
def test_a_value_that_does_not_fit_the_target_is_refused(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, key: str, array: np.ndarray, says: str
) -> None:
    folder = edit_adapter(make_adapter("llama"), tmp_path / "a", lambda t: t.update({PREFIX + key: array}))
    with pytest.raises(MismatchError, match=says):
        match_names(load_adapter(folder), load_checkpoint(make_checkpoint("llama", **UNTIED)).tensors)


@pytest.mark.parametrize("tokens", [[5, 300], [-1, 5]])
def test_token_rows_outside_the_vocabulary_are_refused(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, tokens: list[int]
) -> None:
    folder = make_adapter("llama", trainable_token_indices=[5, 2])
    adapter = load_adapter(edit_adapter(folder, tmp_path / "a", trainable_token_indices=tokens))
    with pytest.raises(MismatchError, match=r"embed_tokens\.weight: rows of .* for tokens"):
        match_names(adapter, load_checkpoint(make_checkpoint("llama")).tensors)


def test_dora_on_weights_stored_as_in_out_is_refused(make_checkpoint: Make, make_adapter: Make) -> None:
    adapter = load_adapter(make_adapter("gpt2", use_dora=True))
    with pytest.raises(MismatchError, match=r"transformer\.h\.0\.attn\.c_attn: DoRA on a weight stored as \(in, out\)"):
        match_names(adapter, load_checkpoint(make_checkpoint("gpt2")).tensors)


EACH = [f"model.layers.{n}.{m}_proj" for n in (0, 1) for m in ("self_attn.q", "self_attn.k", "mlp.up", "mlp.down")]


@pytest.mark.parametrize(
    ("config", "dropped", "missing"),
    [
        (
            {"modules_to_save": ["norm", "lm_head", "score"]},
            "",
            ["modules_to_save: the file holds no tensors of lm_head"],
        ),
        ({"target_modules": ["q_proj", "v_proj"]}, "v_proj", ["target_modules: the file holds no tensors of v_proj"]),
        ({"target_modules": EACH}, "0.mlp", [f"target_modules: the file holds no tensors of {EACH[2]}, {EACH[3]}"]),
        (
            {"target_modules": ["q_proj", "c_attn", "gate_proj"]},
            "layers.1",
            [
                f"half an adapter? The file holds no factors of model.layers.#.{module} in 1 of 2 layers: 1"
                for module in ("mlp.gate_proj", "self_attn.q_proj")
            ],
        ),
        ({"target_modules": "all-linear"}, "v_proj", []),
        ({"target_modules": EACH, "exclude_modules": ["down_proj"]}, "down_proj", []),
        ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 0}, "up_proj", []),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, "layers.1", []),
        ({"target_modules": EACH[:4]}, "layers.1", []),
        ({"target_modules": r".*\.0\.self_attn\.q_proj"}, "layers.1", []),
    ],
)
def test_modules_that_the_config_names_and_the_file_lacks_are_told(
    make_checkpoint: Make,
    make_adapter: Make,
    tmp_path: Path,
    adapter_warnings: list[str],
    config: dict[str, Any],
    dropped: str,
    missing: list[str],
) -> None:
    def drop(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if dropped and dropped in name]:
            del tensors[name]

    folder = edit_adapter(make_adapter("llama", modules_to_save=["norm"]), tmp_path / "a", drop, **config)
    match_names(load_adapter(folder), load_checkpoint(make_checkpoint("llama")).tensors)
    assert adapter_warnings == [f"{folder}: {line}" for line in missing]


def test_an_adapter_without_factors_is_refused(make_checkpoint: Make, make_adapter: Make, tmp_path: Path) -> None:
    folder = edit_adapter(make_adapter("llama"), tmp_path / "a", lambda tensors: tensors.clear())
    with pytest.raises(MismatchError, match=r"no LoRA factors at all.*ZeRO-3"):
        match_names(load_adapter(folder), load_checkpoint(make_checkpoint("llama")).tensors)


# Patterns of adapters: as Python reads them, in a time that no pattern can blow up; and other texts of strangers.


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """What backtracks takes years; a busy machine never takes this long for the rest."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("still busy"))
    signal.alarm(120)
    yield
    signal.alarm(0)


def by_python(patterns: list[str], name: str) -> int | None:
    """The number of the first pattern that fits, as PEFT looks for it."""
    return next((n for n, p in enumerate(patterns) if re.match(rf"(.*\.)?({p})$", name)), None)


pieces = st.sampled_from(
    [
        *("a", "b", "0", "1", ".", "|", "_", "-", r"\.", r"\d", r"\w", "[ab]", "[^.]", "^", "$", r"\b"),
        *(
            ".*",
            "a*",
            "a+?",
            "0{1,2}",
            "a{,3}",
            "(a|b)",
            "(?:ab)?",
            "(a|b?){2}",
            "(?:a*|_){,9}",
            r"[^\d\s]",
            r"[\W_]+",
            r"\B",
        ),
        *("é", "(", ")", r"\Z"),
    ]
)
expressions = st.lists(pieces, max_size=5).map("".join)
modules = st.text("ab01._-é", max_size=8)


@settings(max_examples=200)
@given(st.lists(expressions, max_size=4, unique=True), st.lists(modules, max_size=4))
def test_the_first_pattern_that_fits_is_the_one_that_python_finds(patterns: list[str], names: list[str]) -> None:
    found = Patterns({pattern: number for number, pattern in enumerate(patterns)})
    if found.faults:  # of one or the other engine
        return
    for name in names:
        assert found.first([name], None) == by_python(patterns, name)


@settings(max_examples=100)
@given(st.lists(st.text("abc.-", min_size=1, max_size=5), max_size=6, unique=True), modules)
def test_names_are_patterns_with_their_dots_escaped_or_not(names: list[str], module: str) -> None:
    for make in (re.escape, str):
        patterns = list(dict.fromkeys(map(make, names)))
        assert Patterns({p: n for n, p in enumerate(patterns)}).first([module], None) == by_python(patterns, module)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (r"(a)\1", "groupref"),
        ("(?=a)b", "assert"),
        ("(?i:a)", "subpattern"),
        ("a**", "multiple repeat"),
        ("(" * 3000, "3000 characters"),
        ("(" * 200 + ")" * 200, "200 opening brackets"),
    ],
)
def test_patterns_that_cannot_be_followed_are_refused(pattern: str, says: str) -> None:
    (fault,) = Patterns({pattern: 1, "fine": 2}).faults
    assert re.search(says, fault)


@pytest.mark.parametrize(
    "pattern",
    ["(x+x+)+y", "(x*)*y", "(x|x)*y", "(.*.*.*)*y", "(?:(?:x?){30}){30}y", "([x_]*)*y", "(((x{,900}){900})*)*y"],
)
def test_patterns_that_blow_up_are_matched_at_once(pattern: str) -> None:
    assert Patterns({pattern: 1}).faults == []
    assert Patterns({pattern: 1}).first(["x" * 900], None) is None
    assert Patterns({pattern: 1}).first(["x" * 900 + "y"], None) == 1


@pytest.mark.parametrize("form", ["model\\.layers\\.{}\\.q_proj", "model.layers.{}.q_proj"])
def test_as_many_patterns_as_modules_are_matched(form: str) -> None:
    patterns = Patterns({form.format(number): number for number in range(20_000)})
    assert [patterns.first([f"model.layers.{n}.q_proj"], None) for n in range(20_000)] == list(range(20_000))


def test_too_many_patterns_for_too_many_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msa_lite.io.weights.patterns._EFFORT", 10**9)  # a tenth, for a tenth of the patterns
    patterns = Patterns({f"[ab]{number}x*x*x*x*z": number for number in range(400)})
    with pytest.raises(FormatError, match="too many patterns for so many modules"):
        patterns.first((f"{number:05}" + "x" * 895 for number in range(100_000)), None)


def test_too_many_ways_to_place_dots_are_refused() -> None:
    patterns = Patterns({"x" * place + "." + "x" * (900 - place): place for place in range(900)})
    with pytest.raises(FormatError, match="too many patterns for so many modules"):
        patterns.first((f"{number:05}" + "x" * 896 for number in range(100_000)), None)


def test_more_expressions_than_anybody_writes_are_refused() -> None:
    assert re.search("more than 1000 regular expressions", "".join(Patterns({f"{n}a*": 1 for n in range(6000)}).faults))


def quietly(call: Callable[[str], Any], *errors: type[Exception]) -> Callable[[str], Any]:
    def run(text: str) -> Any:
        try:
            return call(text)
        except errors:
            return None

    return run


READERS: dict[str, Callable[[str], Any]] = {
    **{f"key {kind}": lambda text, pattern=pattern: re.fullmatch(pattern, text) for kind, pattern in _KEYS.items()},
    "prefix": lambda text: _PREFIX.sub("", text),
    "unwrapped": unwrapped,
    "find_name": lambda text: find_name(text, {"x"}),
    "role": has_token_role,
    "size": quietly(parse_size, UsageError),
    "count": quietly(parse_count, ValueError),
    "progress": named_progress,
    "branch": quietly(lambda text: find_branch([text], f"step={text}"), ValueError),
    "hub": quietly(lambda text: fetch(f"./{text}"), UsageError),
}


UNITS = (" ", "1", "x.", "1.", "@", "9e", "step1", "tokens=1.", "module.", ".lora_A", ".base_layer", "*")


@pytest.mark.parametrize("reader", READERS)
def test_long_texts_are_read_in_a_time_that_grows_with_them(reader: str) -> None:
    frames = (("", ""), ("", "!"), ("1", "!"), ("x.lora_A", "!"), ("step", "!"))
    for unit in UNITS:
        found = [READERS[reader](start + unit * (100_000 // len(unit)) + end) for start, end in frames]
        assert len(found) == len(frames)


@pytest.mark.parametrize(
    "text", ["9" * 310, "1" * 5000, "9" * 25 + "TB", "1" * 100_000 + "GB", "-1", "", "1e9", "0x10", "٣MB"]
)
def test_sizes_that_no_machine_has_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize("every", [False, True])
def test_a_matrix_whose_header_has_its_sides_exchanged_is_no_other_way_of_storing(
    every: bool, make_checkpoint: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    target = shutil.copytree(make_checkpoint("qwen2"), tmp_path / "target")  # its biases tell the usual way
    tensors = load_file(target / "model.safetensors")
    for layer in range(2 if every else 1):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        tensors[name] = tensors[name].reshape(tensors[name].shape[::-1])
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match=r"layers\.0\.mlp\.up_proj\.weight: .* header may be damaged"):
        merge(str(target), tmp_path / "out", forget=str(make_adapter("qwen2")))
    assert not (tmp_path / "out").exists()
