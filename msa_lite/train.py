"""Fitting vectors: fine-tune a prior on rows and keep what changed, with the Hugging Face Trainer underneath.

Three modes. `lora`: a PEFT adapter in fp32 on a frozen prior. `qlora`: the same on a prior held in 4-bit NF4. `full`:
all weights, fp32 masters, saved as an fp32 checkpoint so that the difference to the prior is not rounded. Where the
device has it, arithmetic runs in bf16 autocast. Training is saved after every epoch, and a rerun goes on from there
with the same result.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from msa_lite.data import Example, make_collator
from msa_lite.errors import StageError, UsageError
from msa_lite.io.adapter import ADAPTER_CONFIG
from msa_lite.io.hub import Source, fetch
from msa_lite.io.manifest import digest, discarded, is_finished, stage_folder, write_json
from msa_lite.io.progress import Progress, silent

logger = logging.getLogger(__name__)

_CPU_TOKENS = 4096  # tokens of a micro-batch on a CPU, where running out of memory cannot be caught
_SAVES = "checkpoints"
_SAVED_WHOLE = "complete"


@dataclass(frozen=True)
class FitSettings:
    """How a prior is tuned. Defaults follow the paper's TOFU runs (App. "Obtaining Forget and Retain Vectors").

    batch_size: rows of one optimiser step; micro_batch_size: rows of one forward pass, a divisor of it, or "auto".
    warmup_epochs: length of the linear warm-up; afterwards the rate falls linearly to 0. Gradients are clipped to
    norm 1; the optimiser is AdamW. lora_targets: "all-linear" or names of modules.
    """

    mode: Literal["lora", "qlora", "full"] = "lora"
    lora_rank: int = 32
    lora_alpha: float = 64
    lora_dropout: float = 0.0
    lora_targets: str | tuple[str, ...] = "all-linear"
    epochs: int = 5
    learning_rate: float = 2e-4
    weight_decay: float = 0.01
    warmup_epochs: float = 1.0
    batch_size: int = 32
    micro_batch_size: int | Literal["auto"] = "auto"
    seed: int = 0


def fit_vector(
    prior: str | Source,
    examples: Sequence[Example],
    out: str | Path,
    *,
    tokenizer: Any,
    settings: FitSettings = FitSettings(),
    label: str = "vector",
    extra_files: dict[str, str] | None = None,
    progress: Progress = silent,
) -> Path:
    """Tune the prior on the examples and write the vector's folder: a PEFT adapter, or an fp32 checkpoint in full mode.

    Also writes train_log.jsonl (one line a step: step, epoch, loss, grad_norm, learning_rate), the files of
    `extra_files` (name → text) and a manifest. A folder made from the same inputs is left as it is; a run that was
    stopped goes on after its last full epoch.

    Raises UsageError for qlora without bitsandbytes, StageError when the loss is no longer finite (nothing is kept).
    """
    source = prior if isinstance(prior, Source) else fetch(str(prior))
    out = Path(out)
    inputs = {
        "prior": source.identity(),
        "examples": digest([[e.ids, e.labels] for e in examples]),
        "settings": {k: v for k, v in asdict(settings).items() if settings.mode != "full" or not k.startswith("lora_")},
    }
    if is_finished(out, inputs):
        logger.info("%s: already made from the same inputs", out)
        return out
    check_mode(settings.mode)
    facts: dict[str, Any] = {"sources": {"prior": source.pinned()}, "rows": len(examples)}
    with stage_folder(out, "vector", inputs, facts, resumable=True) as partial:
        facts["micro_batch_size"] = _fit(source, examples, partial, tokenizer, settings, label, progress)
        for name, text in (extra_files or {}).items():
            (partial / name).write_text(text)
    return out


def check_mode(mode: str) -> None:
    """Raise UsageError when the mode needs a package that is not installed."""
    if mode == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError("vector.mode qlora needs bitsandbytes: pip install 'msa-lite[qlora]'")


def _fit(
    source: Source,
    examples: Sequence[Example],
    partial: Path,
    tokenizer: Any,
    settings: FitSettings,
    label: str,
    progress: Progress,
) -> int:
    """Train, falling back to smaller micro-batches when the device runs out of memory; the size that fitted."""
    from accelerate.utils import find_executable_batch_size

    sizes = _micro_batches(examples, settings, partial)

    def attempt(micro: int) -> int:
        saves = partial / _SAVES
        if saves.exists() and not (saves / f"micro-{micro}").exists():
            shutil.rmtree(saves)  # left by a larger micro-batch that did not fit
        saves.mkdir(exist_ok=True)
        (saves / f"micro-{micro}").touch()
        model = _load_model(source.folder, settings)
        _train(model, examples, partial, tokenizer, settings, micro, label, progress)
        _save(model, source, partial, tokenizer, settings)
        return micro

    run = find_executable_batch_size(
        attempt, starting_batch_size=next(sizes), reduce_batch_size_fn=lambda: next(sizes, 0)
    )
    try:
        fitted = run()
    except RuntimeError as error:
        if "No executable batch size" not in str(error):
            raise
        raise StageError(
            f"{label}: out of memory, not even one row at a time fits; try vector.mode qlora or a smaller "
            "vector.max_length"
        ) from error
    shutil.rmtree(partial / _SAVES)
    return int(fitted)


def _micro_batches(examples: Sequence[Example], settings: FitSettings, partial: Path) -> Iterator[int]:
    """Sizes to try, largest first: all divisors of batch_size, from where an earlier attempt had got to."""
    import torch

    if settings.micro_batch_size != "auto":
        if settings.batch_size % settings.micro_batch_size:
            raise UsageError(
                f"micro_batch_size {settings.micro_batch_size} does not divide batch_size {settings.batch_size}"
            )
        return iter([settings.micro_batch_size])
    limit = settings.batch_size
    if not torch.cuda.is_available():
        limit = max(1, _CPU_TOKENS // max(len(e.ids) for e in examples))
    for tried in (partial / _SAVES).glob("micro-*"):
        limit = min(limit, int(tried.name.removeprefix("micro-")))
    return (size for size in range(settings.batch_size, 0, -1) if settings.batch_size % size == 0 and size <= limit)


def _has_bf16() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def _load_model(folder: Path, settings: FitSettings) -> Any:
    """The prior, ready to train in the mode of `settings`; seeds the random numbers that initialise adapters."""
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(settings.seed)
    cuda = torch.cuda.is_available()
    kwargs: dict[str, Any] = {"dtype": torch.float32}
    if settings.mode == "lora" and _has_bf16():
        kwargs["dtype"] = "auto"  # frozen weights lose nothing in the dtype they are stored in
    if settings.mode == "qlora":
        from transformers import BitsAndBytesConfig

        compute = torch.bfloat16 if _has_bf16() else torch.float32
        kwargs |= {
            "dtype": compute,
            "device_map": {"": 0 if cuda else "cpu"},
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=compute,
            ),
        }
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    model.config.use_cache = False
    if settings.mode == "full":
        return model
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if settings.mode == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=cuda)
    targets = settings.lora_targets
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise discarded(UsageError(f"vector.lora.targets: {error}")) from error


def _train(
    model: Any,
    examples: Sequence[Example],
    partial: Path,
    tokenizer: Any,
    settings: FitSettings,
    micro: int,
    label: str,
    progress: Progress,
) -> None:
    import torch
    from transformers import PrinterCallback, Trainer, TrainingArguments

    cuda = torch.cuda.is_available()
    # transformers renamed the option; the older name is what versions for Python 3.10 know.
    names = ("activation_checkpointing", "gradient_checkpointing")
    checkpointing = next(name for name in names if name in TrainingArguments.__dataclass_fields__)
    steps_per_epoch = math.ceil(len(examples) / settings.batch_size)
    arguments = TrainingArguments(
        output_dir=str(partial / _SAVES),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=settings.batch_size // micro,
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=math.floor(settings.warmup_epochs * steps_per_epoch),
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        seed=settings.seed,
        bf16=_has_bf16(),
        **{checkpointing: cuda},
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="epoch",
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=cuda,
        label_names=["labels"],
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs are for `accelerate launch`, not for DataParallel
    resume = _last_save(partial / _SAVES)
    log = partial / "train_log.jsonl"
    done = json.loads((resume / "trainer_state.json").read_text())["global_step"] if resume else 0
    _cut_log(log, done)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": e.ids, "labels": e.labels} for e in examples],
        data_collator=make_collator(pad),
        callbacks=[_make_callback(log, label, progress)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)


def _make_callback(log: Path, label: str, progress: Progress) -> Any:
    """Trainer callback: the log file, the progress, the check for a broken loss, the mark on finished saves."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" not in logs:
                return
            keys = ("loss", "grad_norm", "learning_rate")
            line = {"step": state.global_step, "epoch": state.epoch} | {k: logs[k] for k in keys if k in logs}
            if not all(math.isfinite(float(line[k])) for k in ("loss", "grad_norm") if k in line):
                raise discarded(
                    StageError(
                        f"{label}: the loss is {line['loss']} (gradient norm {line.get('grad_norm')}) at step "
                        f"{state.global_step}; nothing was kept. Try a lower vector.learning_rate"
                    )
                )
            with open(log, "a") as stream:
                stream.write(json.dumps(line) + "\n")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            progress(label, state.global_step, state.max_steps)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / _SAVED_WHOLE).touch()

    return Watch()


def _last_save(saves: Path) -> Path | None:
    """The newest save that was written to its end; a kill may have left a half one."""
    whole = [path.parent for path in saves.glob(f"checkpoint-*/{_SAVED_WHOLE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _cut_log(log: Path, steps: int) -> None:
    """Drop the lines of steps that will be trained again."""
    if log.exists():
        lines = [line for line in log.read_text().splitlines() if line.endswith("}")]
        log.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= steps))


def _save(model: Any, source: Source, partial: Path, tokenizer: Any, settings: FitSettings) -> None:
    """Write the trained weights. Raises StageError when one of them is not finite."""
    import torch

    broken = [name for name, p in model.named_parameters() if p.requires_grad and not torch.isfinite(p).all()]
    if broken:
        raise discarded(StageError(f"{broken[0]}: not finite after training; try a lower vector.learning_rate"))
    model.config.use_cache = True
    model.save_pretrained(partial)
    if settings.mode == "full":
        tokenizer.save_pretrained(partial)
        return
    (partial / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    config = json.loads((partial / ADAPTER_CONFIG).read_text())
    config["base_model_name_or_path"] = source.name.partition("@")[0]
    config["revision"] = None if source.revision.startswith("sha256:") else source.revision
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()  # PEFT writes a set, in an order that changes from run to run
    write_json(partial / ADAPTER_CONFIG, dict(sorted(config.items())))
