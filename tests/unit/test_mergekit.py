"""Recipes in mergekit's format: what is written reads back, what is read computes the same, the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from msa_lite.errors import UsageError
from msa_lite.merger import Term
from msa_lite.merger.formula import number_terms
from msa_lite.merger.mergekit.reader import read_recipe
from msa_lite.merger.mergekit.recipes import MergeRequest, Reference, write_recipe

T, F, R, P = (Reference(name) for name in ("org/target", "org/forget", "org/retain", "org/prior"))
FORMS = ("org/target", "org/forget", "org/retain", "org/prior")


def read(folder: Path, recipe: dict[str, Any] | str) -> MergeRequest:
    path = folder / "recipe.yml"
    path.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe), encoding="utf-8")
    return read_recipe(path)


def recipe_of(
    base: str | None, weights: dict[str, Any], method: str = "task_arithmetic", **keys: Any
) -> dict[str, Any]:
    """A recipe of models by name, with their weights; a name that is only a base has none."""
    models = [{"model": name, "parameters": {"weight": weight}} for name, weight in weights.items()]
    head = {"merge_method": method} | ({"base_model": base} if base else {})
    return head | {"models": models, "parameters": {"normalize": False}} | keys


def merge_of(
    target: Reference,
    forget: Reference | None,
    alpha: float,
    retain: Reference | None,
    beta: float,
    prior: Reference | None,
    dtype: str = "same",
) -> MergeRequest:
    """A merge of MSA; a vector that is None has no term."""
    terms = (("forget", forget, -alpha), ("retain", retain, beta))
    return MergeRequest(target, tuple(Term(n, v, float(w)) for n, v, w in terms if v is not None), prior, dtype)


def write(
    request: MergeRequest, adapters: tuple[bool, bool], needs_prior: bool = False, stored: str = "float32"
) -> str:
    names = {name for name, is_adapter in zip(("forget", "retain"), adapters, strict=True) if is_adapter}
    return write_recipe(request, stored=stored, adapters=names, needs_prior=needs_prior)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


names = st.one_of(
    st.sampled_from(
        ["org/model", "./a b", "a@b", "x+y", "/p@q+r/s", "a'b", "1e5", "null", "# no", "base", "ü", "- a: b"]
    ),
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12),
)
references = st.builds(Reference, names, st.none() | st.sampled_from(["main", "0123456789", "1e10", "v1+2", "a@b"]))
strengths = st.one_of(st.sampled_from([0.0, 1e-05, 0.3, 1.0, 1e4]), st.floats(1e-6, 100.0))


@given(
    st.lists(references, min_size=4, max_size=4, unique=True),
    st.tuples(strengths, strengths),
    st.tuples(st.booleans(), st.booleans()),
    st.booleans(),
    st.sampled_from(["bfloat16", "float16", "float32"]),
)
@example([T, F, R, P], (1.0, 0.0), (False, False), True, "bfloat16")
@example([T, F, R, P], (0.0, 1.0), (False, False), True, "bfloat16")
@example([T, F, R, P], (1.0, 1.0), (False, False), True, "bfloat16")
@example([T, F, R, P], (2.0, 1.0), (False, True), True, "bfloat16")
@example([T, F, R, P], (0.7, 0.3), (True, True), True, "bfloat16")
def test_what_is_written_reads_back(
    folder: Path,
    models: list[Reference],
    alpha_beta: tuple[float, float],
    adapters: tuple[bool, bool],
    needs_prior: bool,
    dtype: str,
) -> None:
    target, forget, retain, prior = models
    alpha, beta = alpha_beta
    full = (alpha > 0 and not adapters[0]) or (beta > 0 and not adapters[1])
    request = merge_of(
        target,
        forget if alpha else None,
        alpha,
        retain if beta else None,
        beta,
        prior if full or (needs_prior and (alpha or beta)) else None,
        dtype,
    )
    assert read(folder, write(request, adapters, needs_prior)) == request


def test_vectors_of_strength_0_and_priors_that_are_not_needed_are_left_out(folder: Path) -> None:
    request = merge_of(T, F, 1.0, R, 0.0, P, "same")
    text = write(request, (True, True), stored="float16")
    assert read(folder, text) == merge_of(T, F, 1.0, None, 0.0, None, "float16")
    assert "org/retain" not in text
    assert "org/prior" not in text
    untouched = yaml.safe_load(write(merge_of(T, F, 0.0, R, 0.0, P), (False, False)))
    assert untouched["merge_method"] == "linear"
    assert untouched["models"] == [{"model": "org/target", "parameters": {"weight": 1.0}}]


@pytest.mark.parametrize("adapters", [True, False])
def test_a_target_that_is_its_own_prior_is_named_once(folder: Path, adapters: bool) -> None:
    request = merge_of(T, F, 0.5, R, 0.25, T, "float32")
    document = yaml.safe_load(write(request, (adapters, adapters)))
    listed = [entry["model"] for entry in document["models"]]
    both = ["org/target+org/forget", "org/target+org/retain"]
    assert listed == (both if adapters else ["org/target", "org/forget", "org/retain"])
    assert read(folder, document) == merge_of(T, F, 0.5, R, 0.25, None if adapters else T, "float32")


def test_a_recipe_says_how_it_is_run_and_everything_that_matters() -> None:
    text = write(merge_of(T, F, 1e-05, None, 0.0, P, "same"), (True, False), needs_prior=True)
    assert "#   mergekit-yaml CONFIG OUT --lora-merge-cache OUT.lora-cache --lora-merge-dtype float32\n" in text
    assert yaml.safe_load(text) == {
        "merge_method": "task_arithmetic",
        "base_model": "org/target",
        "models": [
            {"model": "org/target", "parameters": {"weight": 1.0}},
            {"model": "org/prior+org/forget", "parameters": {"weight": -1e-05}},
            {"model": "org/prior", "parameters": {"weight": 1e-05}},
        ],
        "parameters": {"normalize": False, "lambda": 1.0},
        "dtype": "float32",
        "out_dtype": "float32",
    }


def test_names_that_mergekit_would_split_are_mappings() -> None:
    request = merge_of(T, Reference("a@b", "v1"), 1.0, Reference("c", "d"), 1.0, None)
    models = yaml.safe_load(write(request, (True, True)))["models"]
    assert models[0]["model"] == {"model": {"path": "org/target"}, "lora": {"path": "a@b", "revision": "v1"}}
    assert models[1]["model"] == "org/target+c@d"


@pytest.mark.parametrize(
    ("request_", "adapters", "says"),
    [
        (merge_of(T, F, 1.0, F, 0.5, None), (True, True), "names a model twice.*forget.*retain.*difference"),
        (merge_of(T, T, 1.0, None, 0.0, P), (False, False), "names a model twice.*target.*forget"),
        (merge_of(T, F, 1.0, None, 0.0, None), (False, False), "prior: missing"),
        (merge_of(T, F, 1.0, None, 0.0, None, "int8"), (True, True), "int8"),
    ],
)
def test_requests_that_no_recipe_can_hold_are_refused(
    request_: MergeRequest, adapters: tuple[bool, bool], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        write(request_, adapters)


ON_TARGET = {"org/target+org/forget": -0.75, "org/target+org/retain": 0.5}
ON_PRIOR = {"org/target": 1.0, "org/prior+org/forget": -0.75, "org/prior+org/retain": 0.5}
FULL = {"org/target": 1.0, "org/forget": -0.75, "org/retain": 0.5}
BOTH, WITHOUT_PRIOR = (merge_of(T, F, 0.75, R, 0.5, prior) for prior in (P, None))
FORGET = merge_of(T, F, 1.0, None, 0.0, P)


@pytest.mark.parametrize(
    ("recipe", "request_"),
    [
        (recipe_of("org/target", ON_TARGET), WITHOUT_PRIOR),
        (recipe_of("org/prior", ON_PRIOR), BOTH),
        (recipe_of("org/prior", FULL), BOTH),
        (recipe_of(None, FULL | {"org/prior": 0.25}, "linear"), BOTH),
        # the default strength, where target and prior both count once
        (recipe_of("org/prior", {"org/target": 1, "org/forget": -1}), FORGET),
        (recipe_of("org/target", {"org/target": 1, "org/forget": -1, "org/prior": 1}, "linear"), FORGET),
        # lambda and normalize are folded into the weights
        (
            recipe_of("org/target", ON_TARGET, parameters={"normalize": False, "lambda": 2}),
            merge_of(T, F, 1.5, R, 1.0, None),
        ),
        (
            recipe_of("org/target", {"org/target": 3.5, "org/target+org/forget": -1.5}, "linear", parameters={}),
            merge_of(T, F, 0.75, None, 0.0, None),
        ),
        # YAML 1.1 reads 1e-5 as a string
        (recipe_of("org/target", {"org/target+org/forget": "-1e-5"}), merge_of(T, F, 1e-5, None, 0.0, None)),
        # what changes nothing
        (recipe_of("org/target", ON_TARGET, parameters={"int8_mask": False}, msa={"x": [1]}), WITHOUT_PRIOR),
        (recipe_of("org/target", ON_TARGET, tokenizer_source="base"), WITHOUT_PRIOR),
        (
            recipe_of("org/prior", {"org/forget": -1, "org/target": 1}, tokenizer_source="org/prior"),
            merge_of(P, F, 1.0, None, 0.0, T),
        ),
        (
            recipe_of("org/target", ON_TARGET, dtype="float32", out_dtype="bfloat16"),
            merge_of(T, F, 0.75, R, 0.5, None, "bfloat16"),
        ),
    ],
)
def test_recipes_of_every_form_are_read(tmp_path: Path, recipe: dict[str, Any], request_: MergeRequest) -> None:
    assert read(tmp_path, recipe) == request_


def test_a_base_listed_without_a_weight_is_no_target(tmp_path: Path) -> None:
    recipe = recipe_of("org/prior", {"org/target": 1.0, "org/forget": -1.0})
    recipe["models"].insert(0, {"model": "org/prior"})
    assert read(tmp_path, recipe) == FORGET


def test_revisions_are_read_in_both_notations(tmp_path: Path) -> None:
    mapping: dict[str, Any] = {"model": {"path": "org/target", "revision": "a1"}, "lora": {"path": "/a@b+c"}}
    recipe = recipe_of("org/target@a1", {}) | {"models": [{"model": mapping, "parameters": {"weight": -1}}]}
    target = Reference("org/target", "a1")
    assert read(tmp_path, recipe) == merge_of(target, Reference("/a@b+c"), 1.0, None, 0.0, None)


VALUES = {"org/target": 0.7, "org/forget": -1.9, "org/retain": 2.3, "org/prior": 0.4, "lora/1": 0.17, "lora/2": -0.57}


def value_of(name: str) -> float:
    """One weight of a model; an adapter counts as its delta."""
    return sum(VALUES[part] for part in name.split("+"))


@given(
    st.sampled_from(["task_arithmetic", "linear"]),
    st.sampled_from(["org/target", "org/prior"]),
    st.dictionaries(
        st.sampled_from([*FORMS, *(f"org/{place}+lora/{n}" for place in ("target", "prior") for n in (1, 2))]),
        st.sampled_from([-1, -0.5, 0, 0.5, 1.0, 1.5]),
        min_size=1,
    ),
    st.sampled_from([0.5, 1.0, 2.0]),
)
@example("linear", "org/target", {"org/target": 1.0, "org/forget": -0.5, "org/prior": 0.5}, 1.0)
@example("task_arithmetic", "org/prior", {"org/target": 0.5, "org/forget": -0.5}, 2.0)
def test_whatever_is_accepted_computes_what_mergekit_computes(
    folder: Path, method: str, base: str, weights: dict[str, float], factor: float
) -> None:
    weights = weights if method == "task_arithmetic" else {base: 1.0, **weights}
    parameters = {"lambda": factor} if method == "task_arithmetic" else {}
    try:
        got = read(folder, recipe_of(base, weights, method, parameters=parameters))
    except UsageError:
        return
    if method == "linear":
        wanted = sum(w * value_of(name) for name, w in weights.items()) / sum(weights.values())
    else:
        wanted = value_of(base) + factor * sum(w * (value_of(n) - value_of(base)) for n, w in weights.items())
    result = value_of(str(got.target))
    for term in got.terms:
        is_adapter = term.vector.path.startswith("lora")
        result += term.weight * (value_of(str(term.vector)) - (0 if is_adapter else value_of(str(got.prior))))
    assert result == pytest.approx(wanted)
    assert got.terms == tuple(number_terms(got.terms))
    assert all((term.weight < 0) == (term.side == "forget") for term in got.terms)
