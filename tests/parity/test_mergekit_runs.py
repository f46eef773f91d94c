"""Written recipes run by mergekit itself, with the command that stands in them, against msa-lite's own merge.

Weights are compared, and which configuration and tokenizer the result gets. mergekit's entry point is called in this
process, as its import takes longer than all merges here. And `merge --with mergekit`: its results with our checks."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import msa_lite
from msa_lite.errors import FormatError, MismatchError, OutputError, StageError, UsageError
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.merger.formula import named_strengths
from msa_lite.merger.mergekit.recipes import MergeRequest, Reference
from msa_lite.merger.mergekit.runner import merge_with_mergekit
from tests.support.models import load_weights
from tests.unit.test_mergekit import merge_of, write

Make = Callable[..., Path]
ALPHA, BETA = 0.75, 0.5
MORE_THAN_LORA = {"modules_to_save": ["embed_tokens"], "target_modules": ["q_proj", "down_proj"]}


def request_of(target: Path, forget: Path, retain: Path | None = None, prior: Path | None = None) -> MergeRequest:
    refs = [Reference(str(path)) if path else None for path in (target, forget, retain, prior)]
    assert refs[0] is not None
    return merge_of(refs[0], refs[1], ALPHA, refs[2], BETA if retain else 0.0, refs[3], "same")


def run_mergekit(text: str, folder: Path) -> Path:
    """Save a recipe and run the command that it gives in its comments, as mergekit's entry point would be called."""
    from mergekit.scripts.run_yaml import main

    (folder / "CONFIG").write_text(text, encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("#   mergekit-yaml ")]
    words = [word.replace("OUT", str(folder / "OUT")) for word in shlex.split(line)[2:]]
    words[0] = str(folder / "CONFIG")
    done = CliRunner().invoke(main, [*words, "--quiet"], catch_exceptions=False)
    assert done.exit_code == 0
    return folder / "OUT"


def arguments_of(request: MergeRequest) -> dict[str, Any]:
    """What `msa_lite.merge` takes, all but the dtype."""
    vectors = {term.name: str(term.vector) for term in request.terms}
    prior = str(request.prior) if request.prior else None
    return {"target": str(request.target), **vectors, "prior": prior, **named_strengths(request.terms)}


def merge_here(request: MergeRequest, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    options = {"dtype": request.dtype, **options}
    return load_weights(msa_lite.merge(**arguments_of(request), out=out, **options).folder)


def assert_same_companions(out: Path, target: Path) -> None:
    """The result has the target's tokenizer, chat template and configuration, not the prior's."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (target / name).read_bytes(), name
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (target, out))
    assert theirs["max_position_embeddings"] == ours["max_position_embeddings"] == 512


def assert_same_bits(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> int:
    """Equal bfloat16 weights, but for ties: where the result lies within fp32's rounding of the middle between two.

    exact: the result before it is rounded. Returns how many weights are such ties and differ.
    """
    assert ours.keys() == theirs.keys()
    differing = 0
    for name, value in theirs.items():
        middle = (ours[name].double() + value.double()) / 2
        tie = (exact[name].double() - middle).abs() <= 3 * 2.0**-23 * exact[name].abs().clamp(min=0.1).double()
        differs = ours[name].view(torch.int16) != value.view(torch.int16)
        assert not (differs & ~tie).any(), name
        differing += int(differs.sum())
    return differing


def assert_near(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], roundings: float) -> None:
    """Within so many fp32 roundings at the size of the larger of the weight and 0.1."""
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        unit = value.abs().clamp(min=0.1).double() * 2.0**-23
        assert ((ours[name].double() - value.double()).abs() <= roundings * unit).all(), name


@pytest.mark.parametrize("has_retain", [True, False])
def test_adapters_on_the_target_give_the_same_weights(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, has_retain: bool
) -> None:
    target = make_checkpoint("llama", dtype="bfloat16", chat=True, max_position_embeddings=512)
    forget, retain = make_adapter("llama", 1, use_rslora=True), make_adapter("llama", 2, r=3)
    request = request_of(target, forget, retain if has_retain else None)
    out = run_mergekit(write(request, (True, True), stored="bfloat16"), tmp_path)
    theirs, ours, before = load_weights(out), merge_here(request, tmp_path / "ours"), load_weights(target)
    assert {value.dtype for value in theirs.values()} == {torch.bfloat16}
    assert (
        assert_same_bits(ours, theirs, merge_here(request, tmp_path / "exact", dtype="float32", exact=True)) <= 2
    )  # of 25,120
    assert any(not torch.equal(value, before[name]) for name, value in theirs.items())
    assert_same_companions(out, target)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_full_checkpoints_give_the_same_weights(make_checkpoint: Make, tmp_path: Path, dtype: str) -> None:
    target = make_checkpoint("qwen2", 0, "bfloat16", chat=True, max_position_embeddings=512)
    prior, forget, retain = (make_checkpoint("qwen2", seed, "bfloat16") for seed in (1, 2, 3))
    request = replace(request_of(target, forget, retain, prior), dtype=dtype)
    out = run_mergekit(write(request, (False, False), stored="bfloat16"), tmp_path)
    theirs, ours = load_weights(out), merge_here(request, tmp_path / "ours")
    assert {str(value.dtype) for value in theirs.values()} == {f"torch.{dtype}"}
    if dtype == "bfloat16":
        assert [name for name, value in theirs.items() if not torch.equal(value, ours[name])] == []
    assert_near(theirs, ours, roundings=2)
    assert_same_companions(out, target)


def merge_with_peft(prior: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The prior with an adapter merged by PEFT, in fp64."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(prior, dtype=torch.float64)
    return dict(PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict())


def test_adapters_with_whole_modules_are_applied_to_the_prior(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    target = make_checkpoint("qwen2", 0, chat=True, max_position_embeddings=512)
    prior, forget = make_checkpoint("qwen2", 1), make_adapter("qwen2", 1, **MORE_THAN_LORA)
    retain = make_adapter("qwen2", 2, use_dora=True)
    request = request_of(target, forget, retain, prior)
    out = run_mergekit(write(request, (True, True), needs_prior=True), tmp_path)
    tuned, kept, old = merge_with_peft(prior, forget), merge_with_peft(prior, retain), load_weights(prior)
    wanted = {
        name: w.double() - ALPHA * (tuned[name] - old[name].double()) + BETA * (kept[name] - old[name].double())
        for name, w in load_weights(target).items()
    }
    assert_near(load_weights(out), wanted, roundings=3)
    assert_near(merge_here(request, tmp_path / "ours"), wanted, roundings=3)
    before = load_weights(target)
    assert (load_weights(out)["model.embed_tokens.weight"] - before["model.embed_tokens.weight"]).abs().max() > 1e-3
    assert_same_companions(out, target)


# `merge --with mergekit`: mergekit's own results, with our checks before and after.


@pytest.fixture
def models(make_checkpoint: Make) -> dict[str, str]:
    return {name: str(make_checkpoint("llama", seed)) for seed, name in enumerate(("target", "forget", "retain"))}


def write_document(folder: Path, method: str, models: dict[str, str], /, **changes: Any) -> Path:
    weights = {"forget": -1.0, "retain": 0.5}
    listed = [{"model": models[n], "parameters": {"weight": w, "density": 0.5}} for n, w in weights.items()]
    document = {"merge_method": method, "base_model": models["target"], "models": listed, "dtype": "float32"}
    if method == "slerp":
        document |= {"models": [{"model": models["forget"]}, {"model": models["target"]}], "parameters": {"t": 0.3}}
    path = folder / f"{method}.yml"
    path.write_text(yaml.safe_dump(document | changes))
    return path


def refused(recipe: Path, out: Path) -> str:
    with pytest.raises(UsageError) as error:
        merge_with_mergekit(recipe, out)
    return str(error.value)


@pytest.mark.parametrize("method", ["ties", "dare_ties", "dare_linear", "slerp"])
def test_methods_of_mergekit_give_its_own_bits_and_a_manifest_as_all_merges(
    method: str, models: dict[str, str], tmp_path: Path
) -> None:
    from mergekit.scripts.run_yaml import main

    recipe = write_document(tmp_path, method, models)
    result = merge_with_mergekit(recipe, tmp_path / "out", seed=7)
    done = CliRunner().invoke(
        main, [str(recipe), str(tmp_path / "theirs"), "--quiet", "--random-seed", "7"], catch_exceptions=False
    )
    assert done.exit_code == 0
    ours, theirs, before = (
        load_weights(Path(folder)) for folder in (tmp_path / "out", tmp_path / "theirs", models["target"])
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    changed = sum(int((ours[name] != before[name]).sum()) for name in before)
    assert result.weights_changed == changed > 1000
    manifest = load_manifest(tmp_path / "out")
    assert manifest is not None
    assert verify_folder(tmp_path / "out") == []
    assert (manifest["kind"], manifest["inputs"]["with"], manifest["inputs"]["seed"]) == ("model", "mergekit", 7)
    assert manifest["change"]["method"] == method
    made = (tmp_path / "out/manifest.json").stat().st_mtime_ns
    assert merge_with_mergekit(recipe, tmp_path / "out", seed=7) == result
    assert (tmp_path / "out/manifest.json").stat().st_mtime_ns == made


def narrow(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, folder / "model.safetensors", {"format": "pt"})


def drop(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def quantise(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [(narrow, MismatchError, "up_proj"), (drop, MismatchError, "up_proj"), (quantise, FormatError, "codes")],
)
def test_what_mergekit_would_pass_over_is_refused_before_it_runs(
    spoil: Callable[[Path], None], error: type[Exception], says: str, models: dict[str, str], tmp_path: Path
) -> None:
    spoiled = shutil.copytree(models["forget"], tmp_path / "spoiled")
    spoil(spoiled)
    recipe = write_document(tmp_path, "ties", models | {"forget": str(spoiled)})
    with pytest.raises(error, match=says):
        merge_with_mergekit(recipe, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"spoiled", "ties.yml"}


def test_nothing_stays_of_a_merge_that_fails_or_is_not_finite(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mergekit.merge

    recipe = write_document(tmp_path, "ties", models)

    def fail(config: Any, out: str, options: Any) -> None:
        (Path(out) / "model.safetensors").write_bytes(b"half of it")
        raise RuntimeError("out of patience")

    with monkeypatch.context() as patch:
        patch.setattr(mergekit.merge, "run_merge", fail)
        with pytest.raises(StageError, match="out of patience"):
            merge_with_mergekit(recipe, tmp_path / "out")
    large = write_document(tmp_path, "task_arithmetic", models, out_dtype="float16", parameters={"lambda": 1e9})
    with pytest.raises(MismatchError, match="NaN or infinities"):
        merge_with_mergekit(large, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"ties.yml", "task_arithmetic.yml"}


def test_a_recipe_that_mergekit_refuses_and_a_missing_mergekit_are_told(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    (tmp_path / "odd.yml").write_text("merge_method: ties\nmodels: 7\n")
    with pytest.raises(UsageError, match="mergekit refuses this recipe"):
        merge_with_mergekit(tmp_path / "odd.yml", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "mergekit", None)
    with pytest.raises(UsageError, match=r"mergekit is not installed: pip install .*\[mergekit\]"):
        merge_with_mergekit(write_document(tmp_path, "ties", models), tmp_path / "out")


BESIDE = ("LICENSE", "NOTICE.txt", "preprocessor_config.json", "additional_chat_templates/tool_use.jinja")


@pytest.fixture
def target(models: dict[str, str], make_checkpoint: Make, tmp_path: Path) -> Path:
    """A copy of the target with a tokenizer, files beside its weights, and one that stays behind."""
    target = shutil.copytree(make_checkpoint("llama", 0, chat=True), tmp_path / "inputs/target")
    for name in (*BESIDE, "pytorch_model.bin"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("{}")
    models["target"] = str(target)
    return target


def test_the_targets_files_go_along_but_no_second_tokenizer(
    models: dict[str, str], target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "msa_lite.notices"):
        merge_with_mergekit(write_document(tmp_path, "ties", models), tmp_path / "out")
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert {name for name in names if not (tmp_path / "out" / name).is_file()} == {"pytorch_model.bin"}
    assert "not copied: pytorch_model.bin" in caplog.text
    assert verify_folder(tmp_path / "out") == []
    other = write_document(
        tmp_path, "ties", models, chat_template="{{ messages }} by somebody else, in a longer template"
    )
    merge_with_mergekit(other, tmp_path / "retold")
    assert "somebody else" in (tmp_path / "retold/chat_template.jinja").read_text()
    assert (tmp_path / "retold/LICENSE").is_file()
    assert not (tmp_path / "retold/additional_chat_templates").exists()


@pytest.mark.parametrize(("model", "name"), [("target", "LICENSE"), ("forget", "tokenizer_config.json")])
def test_a_link_to_a_file_elsewhere_is_not_followed(
    model: str, name: str, models: dict[str, str], target: Path, tmp_path: Path
) -> None:
    models["forget"] = str(shutil.copytree(target, tmp_path / "inputs/forget"))
    link = Path(models[model]) / name
    (tmp_path / "secret").write_bytes(link.read_bytes())
    link.unlink()
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(FormatError, match=f"{name}: a link to"):
        merge_with_mergekit(write_document(tmp_path, "ties", models), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_model_under_an_adapter_is_an_input_too(
    models: dict[str, str], make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    """It decides what a method that is not linear makes of the adapter: it is recorded, and compared."""
    prior = shutil.copytree(make_checkpoint("llama", 3), tmp_path / "prior")
    on_prior = {"model": f"{prior}+{make_adapter('llama', 1)}", "parameters": {"weight": -1.0, "density": 0.5}}
    retain = {"model": models["retain"], "parameters": {"weight": 0.5, "density": 0.5}}
    recipe = write_document(tmp_path, "ties", models, models=[on_prior, retain])
    merge_with_mergekit(recipe, tmp_path / "out")
    manifest = load_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest["sources"]["prior"] == str(prior)
    assert [(term["name"], term["weight"]) for term in manifest["terms"]] == [("forget", -1.0), ("retain", 0.5)]
    tensors = load_file(prior / "model.safetensors")
    moved = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(moved, prior / "model.safetensors", {"format": "pt"})
    with pytest.raises(OutputError, match="made from other inputs"):
        merge_with_mergekit(recipe, tmp_path / "out")
    narrow(prior)
    with pytest.raises(MismatchError, match=r"up_proj.* in the prior"):
        merge_with_mergekit(recipe, tmp_path / "again")


def test_models_without_a_role_are_refused_and_weights_of_any_form_have_a_sign(
    models: dict[str, str], make_adapter: Make, tmp_path: Path
) -> None:
    from msa_lite.merger.mergekit.runner import find_roles, parse_recipe

    target, forget, retain = models.values()
    listed = [{"model": forget, "parameters": {"weight": -1.0}}]
    idle = [*listed, {"model": retain, "parameters": {"weight": 0.0}}]
    alone = {"modules": {"default": {"slices": [{"sources": [{"model": target, "layer_range": [0, 2]}]}]}}}
    adapted = f"{target}+{make_adapter('llama', 1)}"
    for changes, says in (
        ({"models": idle}, "has weight 0"),
        ({"models": listed, "base_model": adapted}, "has an adapter"),
        ({"models": listed, "tokenizer_source": retain}, "neither the base, nor merged"),
        ({"models": None, "base_model": None, **alone}, "nothing would change"),
    ):
        assert says in refused(write_document(tmp_path, "ties", models, **changes), tmp_path / "out"), says
    gradient, filters = [-1.0, -0.5], [{"filter": "mlp", "value": -1.0}, {"value": "-5e-1"}]
    for weight, wanted in ((gradient, -0.75), (filters, -0.75), ("-1e-1", -0.1)):
        recipe = write_document(tmp_path, "ties", models, models=[{"model": forget, "parameters": {"weight": weight}}])
        [term] = find_roles(recipe, parse_recipe(recipe)[1]).terms
        assert (term.side, term.weight) == ("forget", pytest.approx(wanted, rel=1e-12))
    pieces = [{"model": name, "layer_range": [0, 2]} for name in (target, forget)]
    recipe = write_document(
        tmp_path, "ties", models, models=None, slices=[{"sources": pieces, "parameters": {"weight": -2}}]
    )
    assert [term.weight for term in find_roles(recipe, parse_recipe(recipe)[1]).terms] == [-2.0]


@pytest.mark.parametrize(
    "option",
    ["--rounding stochastic", "--as adapter", "--max-memory 1GB",
     "--filter-strength 1", "--filter moments"],
)  # fmt: skip
def test_options_that_mergekit_cannot_honour_are_refused_by_name(option: str, tmp_path: Path) -> None:
    from msa_lite.cli.merge import merge_command

    words = ["--mergekit", str(tmp_path / "none.yml"), "--with", "mergekit", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(merge_command, [*words, *option.split()])
    assert isinstance(done.exception, UsageError)
    assert f"mergekit has nothing like {option.split()[0]};" in str(done.exception)


def test_rows_that_mergekit_cuts_to_a_tokenizer_are_told(
    models: dict[str, str], target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = merge_with_mergekit(write_document(tmp_path, "ties", models, tokenizer_source="base"), tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (target, result.folder))
    name = "model.embed_tokens.weight"
    assert len(after[name]) < len(before[name])
    assert f"{name} {tuple(before[name].shape)} → {tuple(after[name].shape)}" in caplog.text
