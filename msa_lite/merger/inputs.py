"""What a merge reads: found, compared by headers before any download, and with what the output was made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.errors import MsaError, OutputError, UsageError
from msa_lite.io.adapter import base_name, is_adapter
from msa_lite.io.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.disk import output_path
from msa_lite.io.hub import Source, check_download_space, fetch, fetch_headers, is_remote, is_remote_adapter
from msa_lite.io.manifest import check_free, check_place, is_finished, partial_folder, recover
from msa_lite.io.reading import local_path, printable
from msa_lite.io.seal import load_manifest
from msa_lite.io.unchanged import check_unchanged
from msa_lite.merger.plan import MergePlan, check_mergeable
from msa_lite.merger.vectors import Vector, checkpoint_vector, load_vector

ModelLike = str | Source | None


@dataclass(frozen=True)
class Inputs:
    """The sources of a merge by name, its strengths, and what its manifest records of both and of its options.

    seen: the manifest that the output folder had when it was looked at.
    """

    out: Path
    sources: dict[str, Source]
    alpha: float
    beta: float
    record: dict[str, Any]
    seen: dict[str, Any] | None

    @property
    def finished(self) -> dict[str, Any] | None:
        """What the output's manifest says that was changed, if it was made from these inputs and is whole."""
        change = (self.seen or {}).get("change")
        return change if isinstance(change, dict) and is_finished(self.out, self.record) else None

    def facts(self) -> dict[str, Any]:
        """What the manifest names besides: the sources as a reader knows them."""
        return {"sources": {name: printable(source.pinned()) for name, source in self.sources.items()}}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise StageError at the end, also in the place of another error, when a source's file has changed by then."""
        marks = {path: mark for source in self.sources.values() for path, mark in source.marks.items()}
        try:
            yield
        except (MsaError, OSError):
            check_unchanged(marks)
            raise
        check_unchanged(marks)

    def check_output(self) -> None:
        """Raise OutputError when somebody else has written the output since it was looked at."""
        if load_manifest(self.out) != self.seen:
            raise OutputError(f"{self.out}: another msa-lite wrote it meanwhile; look at it, then run this again")


def find_inputs(
    out: str | Path,
    kind: str,
    target: str | Source,
    vectors: Mapping[str, tuple[ModelLike, float | None]],
    prior: ModelLike,
    options: Mapping[str, Any],
    replace: bool,
) -> Inputs:
    """Find what is to be merged into `out`, a folder of this kind ("model", "adapter").

    vectors: (vector, strength) under "forget" and "retain"; one of strength 0 is not opened, nor is a prior that no
    vector is left for. options: further settings that decide the result. What has to come from the Hub is compared by
    its headers before any weights are fetched.

    Raises OutputError when `out` or its partial folder is, holds or lies in one of the inputs, or holds something
    that may not be replaced; UsageError for inputs that cannot be found.
    """
    named = {"target": target, "prior": prior, **{name: vector for name, (vector, _) in vectors.items()}}
    empty = [name for name, value in {**named, "out": out}.items() if value == ""]
    if empty:
        raise UsageError(f"{' and '.join(empty)}: an empty name; give a folder or repo[@revision]")
    out = output_path(out)
    check_place(out, kind)
    _check_apart(out, (v.folder if isinstance(v, Source) else local_path(v) for v in named.values() if v))
    recover(out)
    check_free(out, kind)
    strengths = {name: float(strength or 0.0) for name, (_, strength) in vectors.items()}
    chosen = {"target": target}
    chosen |= {name: vector for name, (vector, _) in vectors.items() if vector is not None and strengths[name]}
    if prior is not None and len(chosen) > 1:
        chosen["prior"] = prior
    wanted = {name: value if isinstance(value, Source) else str(value) for name, value in chosen.items()}
    if any(isinstance(value, str) and is_remote(value) for value in wanted.values()):
        plan = peek(wanted, strengths["forget"], strengths["retain"], download=True)
        if plan and not any(vector and vector.needs_prior for vector in (plan.forget, plan.retain)):
            wanted.pop("prior", None)  # plain LoRA on plain LoRA: its weights would be fetched for nothing
    sources = {
        name: value if isinstance(value, Source) else fetch(value, by_content=False) for name, value in wanted.items()
    }
    folder = sources["target"].folder
    if is_adapter(folder) and not (folder / "config.json").is_file():
        raise _adapter_target(sources["target"].name, folder)
    _check_apart(out, (source.folder for source in sources.values()))
    record: dict[str, Any] = {name: source.identity() for name, source in sources.items()}
    record |= {"alpha": strengths["forget"], "beta": strengths["retain"], **options}
    inputs = Inputs(out, sources, strengths["forget"], strengths["retain"], record, load_manifest(out))
    if inputs.seen and not replace and not is_finished(out, record):
        same = inputs.seen.get("inputs") == record
        state = "made from the same inputs, but damaged (`msa-lite verify`)" if same else "made from other inputs"
        what = {"adapter": "an adapter"}.get(kind, f"a {kind}")
        raise OutputError(f"{out}: holds {what} {state}; remove it or choose another folder")
    return inputs


def _adapter_target(name: str, folder: Path) -> UsageError:
    """The error for a target that is an adapter, with the merge that makes a whole model of it."""
    base = base_name(folder)
    return UsageError(
        f"{name}: is a LoRA adapter on {base}; a merge needs a whole model as its target. Write one first: msa-lite "
        f"merge --target {base} --retain {name} --beta 1 --alpha 0 --prior {base} --out WHOLE, then --target WHOLE. (A "
        "recipe takes the adapter as its target and does this itself)"
    )


def _check_apart(out: Path, folders: Iterable[Path]) -> None:
    """Raise OutputError when the output, or the partial folder that it is built in, touches one of these folders."""
    for folder in folders:
        for inside in (out.resolve(), partial_folder(out).resolve()):
            place = folder.resolve()
            if folder.is_dir() and (place == inside or place in inside.parents or inside in place.parents):
                raise OutputError(
                    f"{out}: is one of the inputs, lies in one or around one ({folder}); a merge never overwrites what "
                    "it reads"
                )


def peek(wanted: Mapping[str, str | Source], alpha: float, beta: float, download: bool = False) -> MergePlan | None:
    """The plan by headers alone: of what is on the Hub, only adapters and headers are fetched.

    wanted: names or sources under "target", "forget", "retain" and "prior". Raises as `make_plan` does when the parts
    do not fit, and OutputError when there is no room to `download` them; None when the Hub gives no headers, in which
    case fetching will say why.
    """
    heads: dict[str, Checkpoint] = {}
    adapters: dict[str, Path] = {}
    for name, value in wanted.items():
        folder = value.folder if isinstance(value, Source) else local_path(value)
        remote = isinstance(value, str) and is_remote(value)
        if is_remote_adapter(str(value)) if remote else is_adapter(folder):
            adapters[name] = fetch(str(value)).folder if remote else folder
        else:
            head = fetch_headers(str(value)) if remote else load_checkpoint(folder)
            if head is None:
                return None
            heads[name] = head
    if "target" in adapters:
        raise _adapter_target(str(wanted["target"]), adapters["target"])
    check_mergeable(heads["target"])
    vectors: dict[str, Vector | None] = {"forget": None, "retain": None}
    for name in vectors:
        if name in adapters:
            vectors[name] = load_vector(adapters[name], heads["target"], heads.get("prior"))
        elif name in heads:
            vectors[name] = checkpoint_vector(heads[name], heads["target"], heads.get("prior"))
    if download:
        check_download_space(head for head in heads.values() if not head.shards)
    return MergePlan(heads["target"], vectors["forget"], alpha, vectors["retain"], beta)
