"""msa-lite merge: fold vectors into a target."""

from __future__ import annotations

import click


@click.command()
@click.option("--target", required=True, help="Finished model: a folder or repo[@revision].")
@click.option("--forget", help="Vector to subtract: a PEFT adapter, or a full checkpoint (then --prior is needed).")
@click.option("--alpha", type=float, default=1.0, show_default=True, help="Strength of the forget vector, ≥ 0.")
@click.option("--retain", help="Vector to add, of either kind.")
@click.option("--beta", type=float, help="Strength of the retain vector, ≥ 0.  [default: 1.0 with --retain, else 0]")
@click.option("--prior", help="The checkpoint that full checkpoints were tuned from.")
@click.option("--out", required=True, type=click.Path(), help="Folder to write; must not exist.")
@click.option("--dtype", default="same", show_default=True, help="same, bfloat16, float16 or float32.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    target: str,
    forget: str | None,
    alpha: float,
    retain: str | None,
    beta: float | None,
    prior: str | None,
    out: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Write target − alpha · forget + beta · retain to DIR, streamed, in the target's own layout.

    Neither torch nor transformers is loaded, and memory does not grow with the model.

    \b
    msa-lite merge --target ./tuned --forget ./vectors/forget --alpha 1.25 --out ./unlearned
    """
    from msa_lite.cli.output import print_json, progress_bars
    from msa_lite.errors import UsageError
    from msa_lite.merger import merge

    if forget is None and alpha > 0:
        raise UsageError("--forget is needed, unless --alpha is 0")
    if beta and retain is None:
        raise UsageError(f"--beta is {beta:g}, but there is no --retain")
    strength = beta if beta is not None else (1.0 if retain else 0.0)
    with progress_bars() as progress:
        merged = merge(
            target,
            out,
            forget=forget,
            alpha=alpha,
            retain=retain,
            beta=strength,
            prior=prior,
            dtype=dtype,
            progress=progress,
        )
    if as_json:
        print_json(merged.as_dict())
        return
    click.echo(
        f"{merged.folder}: {merged.weights_changed} of {merged.weights_touched} weights changed in "
        f"{merged.tensors_touched} tensors; rounding lost {merged.rounding_loss:.2%} of the update"
    )
