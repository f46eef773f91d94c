"""`merge --with mergekit`: mergekit's own results, with our checks before and after."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

import msa_lite
from msa_lite.errors import FormatError, MismatchError, OutputError, StageError, UsageError
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.merger import mergekit_recipe
from msa_lite.merger.mergekit.runner import merge_with_mergekit
from tests.support.models import load_weights

Make = Callable[..., Path]


@pytest.fixture
def models(make_checkpoint: Make) -> dict[str, str]:
    return {name: str(make_checkpoint("llama", seed)) for seed, name in enumerate(("target", "forget", "retain"))}


def write(folder: Path, method: str, models: dict[str, str], /, **changes: Any) -> Path:
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
    from click.testing import CliRunner
    from mergekit.scripts.run_yaml import main

    recipe = write(tmp_path, method, models)
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


def test_a_merge_that_is_ours_has_our_weights_but_for_the_last_bits(models: dict[str, str], tmp_path: Path) -> None:
    given = {name: models[name] for name in ("target", "forget", "retain")} | {"alpha": 0.5, "beta": 0.25}
    recipe = tmp_path / "ours.yml"
    recipe.write_text(mergekit_recipe(**given, prior=models["target"]))
    merge_with_mergekit(recipe, tmp_path / "theirs")
    msa_lite.merge(**given, prior=models["target"], out=tmp_path / "ours", dtype="float32", exact=True)
    ours, theirs = load_weights(tmp_path / "ours"), load_weights(tmp_path / "theirs")
    worst = max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)
    assert 0 < worst < 1e-7


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
    recipe = write(tmp_path, "ties", models | {"forget": str(spoiled)})
    with pytest.raises(error, match=says):
        merge_with_mergekit(recipe, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"spoiled", "ties.yml"}


def test_nothing_stays_of_a_merge_that_fails_or_is_not_finite(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mergekit.merge

    recipe = write(tmp_path, "ties", models)

    def fail(config: Any, out: str, options: Any) -> None:
        (Path(out) / "model.safetensors").write_bytes(b"half of it")
        raise RuntimeError("out of patience")

    with monkeypatch.context() as patch:
        patch.setattr(mergekit.merge, "run_merge", fail)
        with pytest.raises(StageError, match="out of patience"):
            merge_with_mergekit(recipe, tmp_path / "out")
    large = write(tmp_path, "task_arithmetic", models, out_dtype="float16", parameters={"lambda": 1e9})
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
        merge_with_mergekit(write(tmp_path, "ties", models), tmp_path / "out")


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
        merge_with_mergekit(write(tmp_path, "ties", models), tmp_path / "out")
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert {name for name in names if not (tmp_path / "out" / name).is_file()} == {"pytorch_model.bin"}
    assert "not copied: pytorch_model.bin" in caplog.text
    assert verify_folder(tmp_path / "out") == []
    other = write(tmp_path, "ties", models, chat_template="{{ messages }} by somebody else, in a longer template")
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
        merge_with_mergekit(write(tmp_path, "ties", models), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_model_under_an_adapter_is_an_input_too(
    models: dict[str, str], make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    """It decides what a method that is not linear makes of the adapter: it is recorded, and compared."""
    prior = shutil.copytree(make_checkpoint("llama", 3), tmp_path / "prior")
    on_prior = {"model": f"{prior}+{make_adapter('llama', 1)}", "parameters": {"weight": -1.0, "density": 0.5}}
    retain = {"model": models["retain"], "parameters": {"weight": 0.5, "density": 0.5}}
    recipe = write(tmp_path, "ties", models, models=[on_prior, retain])
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
        assert says in refused(write(tmp_path, "ties", models, **changes), tmp_path / "out"), says
    gradient, filters = [-1.0, -0.5], [{"filter": "mlp", "value": -1.0}, {"value": "-5e-1"}]
    for weight, wanted in ((gradient, -0.75), (filters, -0.75), ("-1e-1", -0.1)):
        recipe = write(tmp_path, "ties", models, models=[{"model": forget, "parameters": {"weight": weight}}])
        [term] = find_roles(recipe, parse_recipe(recipe)[1]).terms
        assert (term.side, term.weight) == ("forget", pytest.approx(wanted, rel=1e-12))
    pieces = [{"model": name, "layer_range": [0, 2]} for name in (target, forget)]
    recipe = write(tmp_path, "ties", models, models=None, slices=[{"sources": pieces, "parameters": {"weight": -2}}])
    assert [term.weight for term in find_roles(recipe, parse_recipe(recipe)[1]).terms] == [-2.0]


@pytest.mark.parametrize(
    "option",
    ["--rounding stochastic", "--as adapter", "--max-memory 1GB",
     "--filter-strength 1", "--filter moments"],
)  # fmt: skip
def test_options_that_mergekit_cannot_honour_are_refused_by_name(option: str, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from msa_lite.cli.merge import merge_command

    words = ["--mergekit", str(tmp_path / "none.yml"), "--with", "mergekit", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(merge_command, [*words, *option.split()])
    assert isinstance(done.exception, UsageError)
    assert f"mergekit has nothing like {option.split()[0]};" in str(done.exception)


def test_rows_that_mergekit_cuts_to_a_tokenizer_are_told(
    models: dict[str, str], target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = merge_with_mergekit(write(tmp_path, "ties", models, tokenizer_source="base"), tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (target, result.folder))
    name = "model.embed_tokens.weight"
    assert len(after[name]) < len(before[name])
    assert f"{name} {tuple(before[name].shape)} → {tuple(after[name].shape)}" in caplog.text
