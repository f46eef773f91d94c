"""Test the paper's claims, and msa-lite's defaults, on a real language model (SmolLM2-135M-Instruct) and TOFU:

    python examples/real_model/run.py                                # small, on a CPU
    python examples/real_model/run.py --size full --seeds 0 1 2      # forget05 and forget10; for a GPU
    python examples/real_model/run.py --seeds 0 --attacks            # and does it stay forgotten?

Makes the model, the histories of target and ideal, every run and all tables (RESULTS.md). A second call does only what
is missing. Seeds may run side by side, each by a call of its own. Needs `pip install -e '.[train,qlora,smollm2]'`.

On a two-core CPU of 2026, small: seed 0 about 10 hours on one core, each other seed about 5 (seed 0 runs what is tried
once, too), with 4.5 GB of memory for each call and 15 GB of disk for each seed. full: a GPU, and 60 GB of disk for each
seed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from experiments import ATTACKED, EXPERIMENTS, SIZES, Experiment, Size
from history import STAGES, Models, train, write_data, write_recipe
from plan import State, fix_plan, now, revision
from recipe_files import HINDSIGHT_FOLDER, hindsight_recipe, recipe_of, run_folder, tofu_folder
from results import write_results

import msa_lite
from msa_lite.data import DataSource
from msa_lite.demo.smollm2 import make_smollm2
from msa_lite.errors import Faults, MismatchError, MsaError, OutputError, StageError
from msa_lite.io.console.libraries import silence_libraries
from msa_lite.io.console.progress import Progress, duration
from msa_lite.io.finished.seal import load_manifest, locked
from msa_lite.io.models.devices import free_ram

HERE = Path(__file__).parent
SMOLLM2 = "SmolLM2-135M-Instruct"
FULL = ("full-forget05", "full-forget10")
GIGABYTES = {"small": 15, "full": 60}  # of disk, for one seed, at most
MEMORY = 4.5  # GB of a call of the small size on a CPU, as measured


@dataclass(frozen=True)
class Seed:
    """One seed of a size, on the way to its results."""

    number: int
    size: Size
    models: Models
    tofu: str
    """The data of TOFU."""
    compute: str
    """The precision of matrix products: bf16 where the device has it."""
    state: State
    progress: Progress
    attacks: bool = False
    """True to attack the models of `ATTACKED` as well."""

    def run_all(self, experiments: Sequence[Experiment], keep_models: bool) -> None:
        """Make the models, and run experiments on them, msa-lora first: all others use its scores or its vectors.

        Raise StageError if msa-lora failed.
        """
        first = EXPERIMENTS[:1]
        say(f"seed {self.number}: models")
        began = time.monotonic()
        last = STAGES[max(STAGES.index(one.target) for one in (*first, *experiments))]  # priors come before targets
        train(self.models, self.size, self.compute, self.number, last, self.progress)
        self.state.note_models(self.models, time.monotonic() - began)
        self.references()
        self.run(first, keep_models)
        if error := self.state.error_of(first[0].name):
            raise StageError(f"seed {self.number}: {first[0].name} failed, on which all others rest: {error}")
        self.hindsight()
        self.run(experiments, keep_models)

    def run(self, experiments: Sequence[Experiment], keep_models: bool) -> None:
        """Run all experiments that are not done. One that fails is noted, failed attacks are told; the next goes on."""
        for number, experiment in enumerate(experiments, 1):
            recipe = recipe_of(experiment, self.models, self.number, self.compute)
            file = write_recipe(self.models.folder / "recipes" / f"{experiment.name}.yaml", recipe)
            if self.state.is_done(experiment.name, file):
                self.attack_again(experiment, file, keep_models)
                continue
            left = duration(self.state.left(experiments[number - 1 :], self.size.minutes))
            place = f"seed {self.number}, {number} of {len(experiments)}"
            say(f"{place}: {experiment.name} ({experiment.what}); about {left} left")
            folder = run_folder(self.models, experiment)
            with self.state.timed(experiment.name, file, command_of(experiment, file), folder):
                self._run(experiment, file)
            with self.attack_told(experiment):
                self.attack(experiment)
            if not keep_models:
                drop_weights(folder)
            with alone(self.models.folder.parent):
                write_results(self.models.folder.parent, self.models.folder.parent)

    def _run(self, experiment: Experiment, file: Path) -> None:
        folder = run_folder(self.models, experiment)
        if experiment.method == "msa":
            share(run_folder(self.models, EXPERIMENTS[0]), folder, experiment)
            msa_lite.run(str(file), progress=self.progress, accept=True)
        else:
            msa_lite.run_baseline(experiment.method, str(file), progress=self.progress)
        if experiment.on_tofu:
            self.score_on_tofu(experiment.name, folder / "model")

    def attack(self, experiment: Experiment) -> None:
        """Attack the model of a finished run by all attacks, on its forget rows; what was made stays."""
        folder = run_folder(self.models, experiment)
        if not self.attacks or experiment.name not in ATTACKED or not any(folder.glob("model/*.safetensors")):
            return
        first = run_folder(self.models, EXPERIMENTS[0])
        if folder.parent == first.parent and folder != first:  # baselines lie in its folder, and find them there
            for place in first.glob("attacks/*/*/"):
                if place.name in ("target", "ideal") and not (own := folder / place.relative_to(first)).exists():
                    shutil.copytree(place, own)
        msa_lite.attack(folder, progress=self.progress)

    def attack_again(self, experiment: Experiment, file: Path, keep_models: bool) -> None:
        """Attack the model of an experiment that was run before, whose weights are made anew."""
        folder = run_folder(self.models, experiment)
        if self.attacks and experiment.name in ATTACKED and not (folder / "attacks/report.json").exists():
            say(f"seed {self.number}: attacks on {experiment.name}")
            with self.attack_told(experiment):
                self._run(experiment, file)
                self.attack(experiment)
            if not keep_models:
                drop_weights(folder)

    @contextmanager
    def attack_told(self, experiment: Experiment) -> Iterator[None]:
        """Print a line where attacks fail with an MsaError, and go on."""
        try:
            yield
        except MsaError as error:
            say(f"seed {self.number}: attacks on {experiment.name} failed: {' '.join(str(error).split())}")

    def score_on_tofu(self, name: str, model: Path | str) -> None:
        """Score a model on TOFU's own metrics, the ideal first."""
        ideal = tofu_folder(self.models, "ideal")
        out = tofu_folder(self.models, name)
        if (out / "report.json").is_file():
            return
        msa_lite.evaluate(
            str(model),
            out,
            msa_lite.PublishedBenchmark("tofu", self.size.forget, self.tofu),
            limit=self.size.limit,
            prompt="chat",  # in which the models have learnt
            ideal=None if name == "ideal" else str(ideal),
            progress=self.progress,
        )

    def references(self) -> None:
        """Score ideal and target on TOFU's own metrics, and the grid of points on the test rows."""
        self.score_on_tofu("ideal", self.models.ideal("tofu"))
        self.score_on_tofu("target", self.models.target("tofu"))

    def hindsight(self) -> None:
        """Score a grid of α and β on the test rows, by the vectors of msa-lora."""
        first = run_folder(self.models, EXPERIMENTS[0])
        recipe = hindsight_recipe(self.models, self.number, self.compute)
        file = write_recipe(self.models.folder / "recipes" / "hindsight.yaml", recipe)
        if self.state.is_done(HINDSIGHT_FOLDER, file):
            return
        say(f"seed {self.number}: the grid of α and β on test rows")
        folder = self.models.folder / HINDSIGHT_FOLDER
        with self.state.timed(HINDSIGHT_FOLDER, file, f"msa-lite run {file.name} --until sweep", folder):
            if not folder.exists():
                copy_run(first, folder, ["vectors"])
            msa_lite.sweep(str(file), progress=self.progress)
        drop_weights(folder)


def share(first: Path, folder: Path, experiment: Experiment) -> None:
    """Give a new run what another run has that is the same in both, as a copy of its folder would.

    These are the scores of target and ideal and, where the experiment says so, the vectors. The run checks by their
    manifests whether they are its own, and makes them again if not.
    """
    if folder.exists() or not first.exists() or first == folder:
        return
    same = experiment.target == EXPERIMENTS[0].target
    names = ["evaluation/target", "evaluation/ideal", "evaluation/target_validation", "evaluation/ideal_validation"]
    names += ["evaluation/prior", "evaluation/prior_validation"] if experiment.prior == EXPERIMENTS[0].prior else []
    source = folder.parent / experiment.vectors_of if experiment.vectors_of else first
    copy_run(source, folder, (names if same else []) + (["vectors"] if experiment.vectors_of else []))


def copy_run(source: Path, folder: Path, names: Sequence[str]) -> None:
    """Copy parts of a run's folder into a new one."""
    partial = folder.with_name(f"{folder.name}.copy")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shutil.copy(source / "recipe.yaml", partial)
    for name in names:
        if (source / name).is_dir():
            shutil.copytree(source / name, partial / name)
    partial.rename(folder)


def drop_weights(folder: Path) -> None:
    """Remove the merged model and checkpoints in fp32 from a finished run; scores and adapters stay."""
    for file in [*folder.glob("model/*.safetensors"), *folder.glob("vectors/**/model*.safetensors")]:
        file.unlink()


def command_of(experiment: Experiment, file: Path) -> str:
    """Return the command that repeats an experiment."""
    if experiment.method == "msa":
        return f"msa-lite {file.name} --accept"
    return f"msa-lite baseline {experiment.method} {file.name}"


def alone(out: Path) -> AbstractContextManager[object]:
    """Wait until no other call, of another seed, writes the files that all seeds share."""
    from filelock import FileLock

    out.mkdir(parents=True, exist_ok=True)
    return FileLock(out / ".lock")


def say(text: str) -> None:
    """Print a line on how far the work has come."""
    print(f"{now()} {text}", file=sys.stderr, flush=True)


def best_compute() -> str:
    """Return bf16 where the device computes in it, else auto."""
    from msa_lite.errors import UsageError
    from msa_lite.io.models.heads import choose_precision

    try:
        return choose_precision("bf16")
    except UsageError:
        return "auto"


def check_space(out: Path, size: str, seeds: int) -> None:
    """Raise OutputError, before any work, if the disk is too small."""
    place = next(folder for folder in (out, *out.resolve().parents) if folder.exists())
    free, needed = shutil.disk_usage(place).free / 1e9, GIGABYTES[size] * seeds
    held = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e9 if out.exists() else 0
    if free + held < needed:
        raise OutputError(
            f"{out}: {needed} GB are needed for {seeds} seed{'s' * (seeds > 1)}, {free:.0f} GB of disk are free; "
            "choose another --out"
        )


def check_memory(size: str) -> None:
    """Raise MismatchError, before any work, if the memory is too small, or a GPU is needed and there is none."""
    import torch

    if torch.cuda.is_available():
        return
    if size == "full":
        raise MismatchError("--size full: needs a GPU, and this machine has none; try --size small")
    if (free := free_ram() / 1e9) < MEMORY:
        raise MismatchError(
            f"--size {size}: {MEMORY} GB of memory are needed, {free:.1f} GB are free on this machine; end other "
            "programs, or run seeds one after the other"
        )


def describe_base(base: str) -> str:
    """Return the pretrained model's name, and where its weights come from, if its manifest says so."""
    origin = (load_manifest(Path(base)) or {}).get("origin")
    return Path(base).name + (f" ({origin})" if origin else "")


def run_size(name: str, arguments: argparse.Namespace, progress: Progress) -> Path:
    """Run all seeds of one size. Return the folder of the results."""
    out = arguments.out / name
    size, compute = SIZES[name], best_compute()
    text = DataSource(arguments.text, "text", split=arguments.split)
    base = arguments.model or str(out.parent / SMOLLM2)
    seeds = {number: Models(out / f"seed-{number}", base) for number in arguments.seeds}
    with alone(out):
        for number, models in seeds.items():  # before minutes of work on the model, since data may be bad
            write_data(models, size, arguments.data, text, number)
        if not arguments.model:
            make_smollm2(Path(base), progress)
        fix_plan(out, name, size, arguments.seeds, EXPERIMENTS, describe_base(base))
    for number, models in seeds.items():
        with locked(models.folder):
            state = State(models.folder / "state.json", revision(HERE))
            seed = Seed(number, size, models, arguments.data, compute, state, progress, arguments.attacks)
            seed.run_all(chosen(arguments.only, number), arguments.keep_models)
    return out


def chosen(only: Sequence[str], seed: int) -> list[Experiment]:
    """Return the experiments of a seed: those with one of these names or groups, else all that it is to have."""
    return [e for e in EXPERIMENTS if (e.name in only or e.group in only if only else seed == 0 or not e.once)]


def parse() -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=["small", "full"], default="small",
        help="small: forget 2 of 12 authors; full: forget05, then forget10, of all of TOFU (default: small)"
    )  # fmt: skip
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED",
        help="each has its own models, and its own draw of rows (default: 0 1 2)"
    )  # fmt: skip
    add("--out", type=Path, default=Path("runs/real-model"),
        help="folder of models, runs and tables (default: %(default)s)"
    )  # fmt: skip
    add("--data", default="locuslab/TOFU", help="TOFU: a folder, or a Hub id (default: %(default)s)")
    add("--text", default="manu/project_gutenberg",
        help="texts in the public domain: a file, folder or Hub id, with a column text (default: %(default)s)"
    )  # fmt: skip
    add("--split", help="split of --text (default: en for the default text, else train)")
    add("--model", help=f"a pretrained chat model: a folder, or a Hub id (default: {SMOLLM2}, made in --out)")
    add("--only", nargs="+", metavar="NAME", default=[],
        help="names or groups of experiments (default: all; seeds other than 0 leave out what is tried once)"
    )  # fmt: skip
    add("--attacks", action="store_true", help="attack the models of MSA and the baselines, too (default: no)")
    add("--keep-models", action="store_true", help="keep every unlearned model, 0.5 GB each (default: no)")
    arguments = parser.parse_args()
    names = {name for experiment in EXPERIMENTS for name in (experiment.name, experiment.group)}
    if unknown := [name for name in arguments.only if name not in names]:
        parser.error(f"--only: no {', '.join(unknown)}; choose from {', '.join(sorted(names))}")
    if min(arguments.seeds) < 0:
        parser.error("--seeds: 0 or more")
    arguments.seeds = [*dict.fromkeys(arguments.seeds)]
    if arguments.split is None and arguments.text == parser.get_default("text"):
        arguments.split = "en"
    return arguments


def main() -> int:
    """Run everything that is missing; return the exit code."""
    arguments = parse()
    silence_libraries()
    try:
        faults = Faults()
        with faults.gathered():
            check_memory(arguments.size)
        with faults.gathered():
            check_space(arguments.out, arguments.size, len(arguments.seeds))
        faults.check()
        with msa_lite.show_progress() as progress:
            for name in FULL if arguments.size == "full" else ["small"]:
                out = run_size(name, arguments, progress)
                with alone(out):
                    print(write_results(out, out))
    except MsaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
