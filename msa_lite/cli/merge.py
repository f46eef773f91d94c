"""Fold vectors into a target, or print the merge as a recipe for mergekit."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from msa_lite.cli.arguments import complete_recipe, given_options, takes_json, takes_overrides
from msa_lite.cli.output import print_data, print_json, progress_bars, show
from msa_lite.errors import UsageError

logger = logging.getLogger(__name__)

_INPUTS = ("target", "forget", "alpha", "retain", "beta", "prior")
_DTYPES = click.Choice(["same", "bfloat16", "float16", "float32"])


def takes_strengths(command: Any) -> Any:
    """Add the options for target, vectors and strengths, shared with `msa-lite mergekit`."""
    subtract = "Vector to subtract: a PEFT adapter, or a full checkpoint."
    prior = "The model that was tuned. Needed for checkpoints, modules_to_save, biases and DoRA."
    options = [
        click.option("--target", metavar="MODEL", help="The finished model: a folder or repo[@revision]."),
        click.option("--forget", metavar="VECTOR", multiple=True, help=subtract),
        click.option("--alpha", multiple=True, type=float, help="Strength of a forget vector, ≥ 0.  [default: 1.0]"),
        click.option("--retain", metavar="VECTOR", multiple=True, help=subtract.replace("subtract", "add")),
        click.option("--beta", multiple=True, type=float, help="Strength of a retain vector, ≥ 0."),
        click.option("--prior", metavar="MODEL", help=prior),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return the library's arguments from the options. Raise UsageError where one option needs another."""
    if options["target"] is None:
        raise UsageError("--target is needed: a folder or repo[@revision]")
    if not options["alpha"] and not options["forget"]:
        raise UsageError("--forget is needed, unless --alpha is 0")
    if any(options["beta"]) and not options["retain"]:
        raise UsageError(f"--beta is {next(filter(None, options['beta'])):g}, but there is no --retain")
    if options["retain"] and not options["beta"]:
        raise UsageError("--retain is given, but no --beta; say how strongly it counts, e.g. --beta 1.0")
    return {**options, "alpha": options["alpha"] or 1.0, "beta": options["beta"] or None}


@click.command()
@takes_strengths
@click.option("--filter", type=click.Path(), help="Filter the forget vector by these moments.")
@click.option("--filter-strength", type=float, help="Strength λ of the filter, > 0.")
@click.option("--mergekit", "recipe", type=click.Path(path_type=Path), help="Take all of the above from this recipe.")
@click.option("--with", "engine", type=click.Choice(["mergekit"]), help="Let mergekit do it: TIES, DARE, SLERP, ….")
@click.option("--out", required=True, type=click.Path(), help="Folder to write.")
@click.option("--dtype", type=_DTYPES, help="The stored dtype; same: the target's.  [default: same]")
@click.option(
    "--rounding",
    type=click.Choice(["nearest", "stochastic"]),
    help="To the stored dtype; stochastic: unbiased.  [default: nearest]",
)
@click.option(
    "--as",
    "form",
    type=click.Choice(["model", "adapter"]),
    default="model",
    show_default=True,
    help="adapter: one adapter on the target.",
)
@click.option("--max-rank", type=int, help="Of an adapter: the highest rank of a module. Full checkpoints need it.")
@click.option("--max-memory", help="Bound on memory, Python itself included.  [default: 512MB]")
@takes_json
def merge_command(recipe: Path | None, engine: str | None, out: str, form: str, as_json: bool, **options: Any) -> None:
    """Write target − alpha · forget + beta · retain to the folder --out.

    The result has the target's own layout. The merge needs no torch, and memory does not grow with the model. After a
    kill, the same command goes on where it was. For several requests, repeat --forget and --alpha (--retain and
    --beta): the result is one sum with one rounding, whatever their order. How far they interfere is told first.

    \b
    msa-lite merge --target ./tuned --forget ./vectors/forget --alpha 1.25 --out ./unlearned
    msa-lite merge --target T --forget A --alpha 1 --forget B --alpha 0.8 --out ./unlearned
    msa-lite merge --target T --forget F --retain R --beta 0.5 --as adapter --out ./update
    msa-lite merge --target T --forget F --filter runs/mine/moments --filter-strength 1 --out ./unlearned
    msa-lite merge --mergekit recipe.yml --out ./unlearned
    msa-lite merge --mergekit ties.yml --with mergekit --out ./unlearned
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy loads; its own threads would only spin
    from msa_lite.merger import merge, merge_adapters

    inputs = {name: options.pop(name) for name in _INPUTS}
    filtering = {name: options.pop(name) for name in ("filter", "filter_strength")}
    only = {name: options.pop(name) for name in (("dtype", "rounding") if form == "adapter" else ("max_rank",))}
    if misplaced := given_options(only):
        why = "an adapter is always fp32" if form == "adapter" else "only with --as adapter"
        raise UsageError(f"{misplaced}: {why}; leave it out")
    if recipe is not None and (clash := given_options({**inputs, "dtype": options.get("dtype")})):
        raise UsageError(f"--mergekit already says {clash}; leave them out")
    with progress_bars() as progress:
        if engine:
            others = {**options, **filtering, "as": form if form == "adapter" else None}
            result: Any = _by_mergekit(recipe, inputs, out, others, progress)
        else:
            logging.getLogger("msa_lite.merger").setLevel(logging.INFO)  # bytes to write, memory
            arguments = _arguments(inputs) if recipe is None else _read_recipe(recipe, form)
            if given_options(filtering):
                arguments["forget"] = _filtered(arguments, **filtering, out=Path(out), form=form, progress=progress)
            arguments |= {name: value for name, value in options.items() if value is not None}
            result = (merge_adapters if form == "adapter" else merge)(out=out, **arguments, progress=progress)
    show(result, as_json, f"{result.folder}: " + "\n  ".join(result.describe().splitlines()))


def _by_mergekit(recipe: Path | None, inputs: dict[str, Any], out: str, others: dict[str, Any], progress: Any) -> Any:
    """Run a recipe, or the one that the options come to, with mergekit. Raise UsageError for options that it lacks."""
    from msa_lite.merger import mergekit_recipe
    from msa_lite.merger.mergekit.runner import merge_with_mergekit

    dtype = others.pop("dtype", None) or "same"
    if refused := given_options(others):
        raise UsageError(f"mergekit has nothing like {refused}; leave it out, or leave out --with mergekit")
    with TemporaryDirectory() as folder:
        if recipe is None:
            recipe = Path(folder) / "mergekit.yml"
            recipe.write_text(mergekit_recipe(**_arguments(inputs), dtype=dtype), encoding="utf-8")
        return merge_with_mergekit(recipe, out, progress=progress)


def _filtered(
    arguments: dict[str, Any], filter: str | None, filter_strength: float | None, out: Path, form: str, progress: Any
) -> str:
    """Filter the forget vector into a folder beside the output; return that. Raise UsageError for other requests."""
    from msa_lite.io.finished.manifest import check_free
    from msa_lite.merger.filtering import filter_vector
    from msa_lite.recipe.schema import beyond_search

    if filter is None or filter_strength is None:
        raise UsageError("--filter needs --filter-strength, and the other way round; λ = 1 is a good start")
    forget: tuple[str, ...] = arguments["forget"] or ()
    if len(forget) != 1:
        raise UsageError(f"--filter filters one forget vector, and {len(forget)} are given")
    for sentence in beyond_search(filter_strength):
        logger.warning("%s", sentence)
    place = out.resolve()
    check_free(place, form)
    folder = place.with_name(f"{place.name}-filtered-forget")
    filter_vector(forget[0], filter, filter_strength, arguments["target"], arguments.get("prior"), folder, progress)
    logger.warning("%s: the filtered vector, by which the data can be put back; remove it once you are done", folder)
    return str(folder)


def _read_recipe(recipe: Path, form: str) -> dict[str, Any]:
    """Return the library's arguments from a mergekit recipe."""
    from msa_lite.merger.mergekit.reader import read_recipe

    request = read_recipe(recipe)
    arguments: dict[str, Any] = {
        name: str(model) for name, model in (("target", request.target), ("prior", request.prior)) if model
    }
    for side, strength in (("forget", "alpha"), ("retain", "beta")):
        terms = [term for term in request.terms if term.side == side]
        arguments |= {side: [str(term.vector) for term in terms], strength: [abs(term.weight) for term in terms]}
    if form == "adapter":
        if request.dtype != "same":
            logger.warning("%s: its dtype (%s) is ignored: an adapter is always fp32", recipe, request.dtype)
        return {**arguments, "alpha": arguments["alpha"] or 0.0}
    return {**arguments, "alpha": arguments["alpha"] or 0.0, "dtype": request.dtype}


@click.command()
@click.argument("recipe", required=False, shell_complete=complete_recipe)
@takes_overrides
@takes_strengths
@click.option("--dtype", type=_DTYPES, help="The stored dtype; same: the target's.  [default: same]")
@takes_json
def mergekit_command(recipe: str | None, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Print a merge as YAML for mergekit.

    Its first lines hold the command that runs it. It is the merge of RECIPE's run, whose vectors are fitted already, or
    that of the options (as for `merge`).

    \b
    msa-lite mergekit runs/mine/recipe.yaml > merge.yml
    msa-lite mergekit --target T --forget F --alpha 1.25 > merge.yml
    """
    from msa_lite.io.files.reading import parse_yaml
    from msa_lite.merger import mergekit_recipe

    if recipe is None:
        if options["target"] is None:
            raise UsageError("give a recipe, or --target with the other options of `merge`")
        dtype = options.pop("dtype") or "same"
        text = mergekit_recipe(**_arguments(options), dtype=dtype)
    elif clash := given_options(options):
        raise UsageError(f"the recipe already says {clash}; leave it out, or leave out the recipe")
    else:
        from msa_lite.pipeline.run.msa import merge_arguments
        from msa_lite.recipe import load_recipe

        loaded = load_recipe(recipe, overrides)
        if loaded.prior_reason:
            click.echo(loaded.prior_reason, err=True)
        text = mergekit_recipe(**merge_arguments(loaded))
    if as_json:
        command = next(line for line in text.splitlines() if line.startswith("# mergekit-yaml ")).removeprefix("# ")
        print_json({"command": command, "text": text, "recipe": parse_yaml(text, "mergekit")})
    else:
        print_data(text)
