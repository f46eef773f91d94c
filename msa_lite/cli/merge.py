"""Fold vectors into a target, or print the merge as a recipe for mergekit."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from msa_lite.cli.completion import complete_recipe
from msa_lite.cli.help import Command, takes_json, takes_overrides

logger = logging.getLogger(__name__)

# Options that only a merged model takes, with their idle values. An adapter is fp32, and made module by module.
_OF_MODELS: dict[str, tuple[Any, ...]] = {
    "dtype": (None, "same"),
    "rounding": (None, "nearest"),
    "seed": (None,),
    "exact": (False,),
    "untie": (False,),
    "threads": (None,),
}
INPUTS = ("--target", "--forget", "--alpha", "--retain", "--beta", "--prior")
_GROUPS = {
    "Models and vectors": [*INPUTS, "--filter", "--filter-strength", "--mergekit", "--with"],
    "Result": ["--out", "--dtype", "--rounding", "--seed", "--exact", "--untie", "--as", "--max-rank"],
    "Memory and threads": ["--max-memory", "--threads"],
}
_DTYPES = click.Choice(["same", "bfloat16", "float16", "float32"])
_REPEATED = ("forget", "alpha", "retain", "beta")  # once for each request


_PRIOR = "The model that was tuned. Needed for checkpoints, modules_to_save, biases and DoRA."


def strength_options(command: Any) -> Any:
    """Add the options for target, vectors and strengths, shared with `msa-lite mergekit`."""
    options = [
        click.option("--target", metavar="MODEL", help="The finished model: a folder or repo[@revision]."),
        click.option(
            "--forget",
            metavar="VECTOR",
            multiple=True,
            help="Vector to subtract: a PEFT adapter, or a full checkpoint.",
        ),
        click.option("--alpha", multiple=True, type=float, help="Strength of a forget vector, ≥ 0.  [default: 1.0]"),
        click.option(
            "--retain", metavar="VECTOR", multiple=True, help="Vector to add: a PEFT adapter, or a full checkpoint."
        ),
        click.option("--beta", multiple=True, type=float, help="Strength of a retain vector, ≥ 0."),
        click.option("--prior", metavar="MODEL", help=_PRIOR),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def read_strengths(options: dict[str, Any]) -> dict[str, Any]:
    """Return the library's arguments from the options. Raise UsageError where one option needs another."""
    from msa_lite.errors import UsageError

    arguments = dict(options)
    if arguments["target"] is None:
        raise UsageError("--target is needed: a folder or repo[@revision]")
    forgets, alphas, retains, betas = (arguments[name] for name in _REPEATED)
    if not alphas and not forgets:
        raise UsageError("--forget is needed, unless --alpha is 0")
    if any(betas) and not retains:
        raise UsageError(f"--beta is {next(filter(None, betas)):g}, but there is no --retain")
    if retains and not betas:
        raise UsageError("--retain is given, but no --beta; say how strongly it counts, e.g. --beta 1.0")
    return {**arguments, "forget": forgets, "alpha": alphas or 1.0, "retain": retains, "beta": betas or None}


@click.command(cls=Command, groups=_GROUPS)
@strength_options
@click.option("--filter", "moments", type=click.Path(), help="Filter the forget vector by these moments.")
@click.option("--filter-strength", type=float, help="Strength λ of the filter, > 0.")
@click.option("--mergekit", "recipe", type=click.Path(path_type=Path), help="Take all of the above from this recipe.")
@click.option("--with", "engine", type=click.Choice(["mergekit"]), help="Let mergekit do it: TIES, DARE, SLERP, ….")
@click.option("--out", required=True, type=click.Path(), help="Folder to write.")
@click.option("--dtype", type=_DTYPES, help="The stored dtype; same: the target's.  [default: same]")
@click.option(
    "--rounding",
    type=click.Choice(["nearest", "stochastic"]),
    help="To the stored dtype; stochastic: unbiased, seeded.  [default: nearest]",
)
@click.option("--seed", type=int, help="Seed of stochastic rounding.  [default: 0]")
@click.option("--exact", is_flag=True, help="float64 arithmetic: every weight is the correctly rounded one.")
@click.option("--untie", is_flag=True, help="Give a head that is tied to the embedding a matrix of its own.")
@click.option(
    "--as",
    "form",
    type=click.Choice(["model", "adapter"]),
    default="model",
    show_default=True,
    help="adapter: one adapter on the target.",
)
@click.option(
    "--max-rank",
    type=int,
    help="With --as adapter: truncate each module's update to at most this rank; full checkpoints need it.",
)
@click.option("--max-memory", default="512MB", show_default=True, help="Bound on memory, Python itself included.")
@click.option("--threads", type=int, help="Worker threads.  [default: one a core]")
@takes_json
def merge_command(
    recipe: Path | None,
    engine: str | None,
    out: str,
    dtype: str | None,
    form: str,
    max_rank: int | None,
    as_json: bool,
    **options: Any,
) -> None:
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
    from msa_lite.cli.output import print_json, progress_bars
    from msa_lite.merger import merge, merge_adapters

    filtering = options.pop("moments"), options.pop("filter_strength")
    names = ("target", "forget", "alpha", "retain", "beta", "prior")
    arguments = {name: options.pop(name) for name in names}
    _check_form(form, max_rank, {**options, "dtype": dtype})
    if recipe is not None:
        _check_alone({**arguments, "dtype": dtype})
    if engine:
        others = {**options, "as": form, "max-rank": max_rank}
        others |= {"filter": filtering[0], "filter-strength": filtering[1]}
        result: Any = _by_mergekit(recipe, arguments, dtype or "same", out, others)
        return print_json(result) if as_json else _print(result)
    if recipe is not None:
        arguments, dtype = read_mergekit(recipe)
        if form == "adapter" and dtype != "same":
            logger.warning("%s: its dtype (%s) is ignored: an adapter is always fp32", recipe, dtype)
    else:
        arguments = read_strengths(arguments)
    logging.getLogger("msa_lite.merger").setLevel(logging.INFO)  # bytes to read and write, memory
    with progress_bars() as progress:
        if filtering != (None, None):
            arguments["forget"] = _filtered(arguments, *filtering, Path(out), form, progress)
        if form == "adapter":
            bounds = {"max_rank": max_rank, "max_memory": options["max_memory"]}
            result = merge_adapters(out=out, **arguments, **bounds, progress=progress)
        else:
            settings = {name: value for name, value in {**options, "dtype": dtype}.items() if value is not None}
            result = merge(out=out, **arguments, **settings, progress=progress)
    return print_json(result) if as_json else _print(result)


def _check_alone(options: dict[str, Any]) -> None:
    """Raise UsageError for options that stand in a recipe of mergekit's, too."""
    from msa_lite.errors import UsageError

    clash = [f"--{name}" for name, value in options.items() if value not in (None, ())]
    if clash:
        raise UsageError(f"--mergekit already says {', '.join(clash)}; leave them out")


def _check_form(form: str, max_rank: int | None, options: dict[str, Any]) -> None:
    """Raise UsageError for options that the form of the result does not take."""
    from msa_lite.errors import UsageError

    if form == "adapter":
        check_adapter_options(options)
    elif max_rank is not None:
        raise UsageError("--max-rank needs --as adapter")


def _print(result: Any) -> None:
    first, *others = result.describe().splitlines()
    click.echo("\n  ".join([f"{result.folder}: {first}", *others]))


def _by_mergekit(recipe: Path | None, arguments: dict[str, Any], dtype: str, out: str, others: dict[str, Any]) -> Any:
    """Run a recipe, or the one that the options come to, with mergekit. Raise UsageError for options that it lacks."""
    from msa_lite.cli.output import progress_bars
    from msa_lite.errors import UsageError
    from msa_lite.merger import mergekit_recipe
    from msa_lite.merger.with_mergekit import merge_with_mergekit

    seed = others.pop("seed") or 0
    idle = (None, False, (), "nearest", "model", "512MB")
    if refused := [f"--{name.replace('_', '-')}" for name, value in others.items() if value not in idle]:
        raise UsageError(f"mergekit has nothing like {', '.join(refused)}; leave it out, or leave out --with mergekit")
    with TemporaryDirectory() as folder, progress_bars() as progress:
        if recipe is None:
            recipe = Path(folder) / "mergekit.yml"
            recipe.write_text(mergekit_recipe(**read_strengths(arguments), dtype=dtype), encoding="utf-8")
        return merge_with_mergekit(recipe, out, seed, progress=progress)


def _filtered(
    arguments: dict[str, Any], moments: str | None, strength: float | None, out: Path, form: str, progress: Any
) -> str:
    """Filter the forget vector into a folder beside the output; return that. Raise UsageError for other requests."""
    from msa_lite.errors import UsageError
    from msa_lite.io.finished.manifest import check_free
    from msa_lite.merger.filtering import filter_vector

    if moments is None or strength is None:
        raise UsageError("--filter needs --filter-strength, and the other way round; λ = 1 is a good start")
    forget: tuple[str, ...] = arguments["forget"] or ()
    if len(forget) != 1:
        raise UsageError(f"--filter filters one forget vector, and {len(forget)} are given")
    place = out.resolve()
    check_free(place, form)
    folder = place.with_name(f"{place.name}-filtered-forget")
    filter_vector(forget[0], moments, strength, arguments["target"], arguments.get("prior"), folder, progress)
    logger.warning("%s: the filtered vector, by which the data can be put back; remove it once you are done", folder)
    return str(folder)


def check_adapter_options(options: dict[str, Any]) -> None:
    """Raise UsageError for options that mean nothing to an adapter."""
    from msa_lite.errors import UsageError

    refused = [f"--{name}" for name, idle in _OF_MODELS.items() if options[name] not in idle]
    if refused:
        raise UsageError(
            "an adapter is always fp32, and made module by module on one thread, without the weights that it is added "
            f"to: leave out {', '.join(refused)} with --as adapter"
        )


def read_mergekit(recipe: Path) -> tuple[dict[str, Any], str]:
    """Return the library's arguments and the output dtype from a mergekit recipe."""
    from msa_lite.merger.mergekit_reader import read_recipe

    request = read_recipe(recipe)
    models = {name: str(model) for name, model in (("target", request.target), ("prior", request.prior)) if model}
    sides = {side: [term for term in request.terms if term.side == side] for side in ("forget", "retain")}
    vectors = {side: [str(term.vector) for term in terms] for side, terms in sides.items()}
    strengths = {side: [abs(term.weight) for term in terms] for side, terms in sides.items()}
    return {**models, **vectors, "alpha": strengths["forget"] or 0.0, "beta": strengths["retain"]}, request.dtype


@click.command(cls=Command, groups={"Models and vectors": INPUTS, "Result": ["--dtype"]})
@click.argument("recipe", required=False, shell_complete=complete_recipe)
@takes_overrides
@strength_options
@click.option("--dtype", type=_DTYPES, default="same", show_default=True, help="The stored dtype; same: the target's.")
@takes_json
def mergekit_command(recipe: str | None, overrides: tuple[str, ...], dtype: str, as_json: bool, **options: Any) -> None:
    """Print a merge as YAML for mergekit.

    Its first lines hold the command that runs it. It is the merge of RECIPE's run, whose vectors are fitted already, or
    that of the options (as for `merge`).

    \b
    msa-lite mergekit runs/mine/recipe.yaml > merge.yml
    msa-lite mergekit --target T --forget F --alpha 1.25 > merge.yml
    """
    from msa_lite.errors import UsageError
    from msa_lite.merger import mergekit_recipe

    if recipe is None:
        if options["target"] is None:
            raise UsageError("give a recipe, or --target with the other options of `merge`")
        return _print_recipe(mergekit_recipe(**read_strengths(options), dtype=dtype), as_json)
    clash = [f"--{name}" for name, value in options.items() if value not in (None, ())]
    if clash or dtype != "same":
        raise UsageError(
            f"the recipe already says {', '.join(clash) or '--dtype'}; leave it out, or leave out the recipe"
        )
    from msa_lite.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    if loaded.prior_reason:
        click.echo(loaded.prior_reason, err=True)
    from msa_lite.pipeline.run.msa import merge_arguments

    return _print_recipe(mergekit_recipe(**merge_arguments(loaded)), as_json)


def _print_recipe(text: str, as_json: bool) -> None:
    """Print a recipe for mergekit; as JSON with the command that runs it, which stands in its comments."""
    from msa_lite.cli.output import print_data, print_json
    from msa_lite.io.files.reading import parse_yaml

    if not as_json:
        print_data(text)
        return
    lines = (line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    command = next(line for line in lines if line.startswith("mergekit-yaml "))
    print_json({"command": command, "text": text, "recipe": parse_yaml(text, "mergekit")})
