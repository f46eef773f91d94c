"""Words of other tools, with what takes their place here: keys of a recipe, and commands.

They are those of PEFT, transformers, TRL, axolotl, LLaMA-Factory, Unsloth, mlx-lm, mergekit and open-unlearning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

KEYS: Mapping[str, str] = {
    "target, the finished model": "adapter_name_or_path checkpoint lora_model_dir model model_path",
    "prior, the model before the fine-tuning": "base_model base_model_name_or_path model_name model_name_or_path",
    "forget.data; rows to keep: retain.data": "data dataset dataset_dir dataset_name datasets train_dataset "
        "train_file training_data",
    "retain.data": "retain_dataset retain_set retain_split",
    "evaluate.holdout": "eval_data eval_dataset holdout holdout_split test_datasets",
    "select.validation, the share that chooses": "val_set_size val_size validation_split",
    "evaluate.ideal": "ideal ref_model reference_model retain_model",
    "evaluate.limit, of rows that are scored": "limit max_eval_samples max_samples",
    "forget.alpha": "alpha",
    "retain.beta": "beta",
    "vector": "sft_config train training training_args",
    "vector.lora": "lora lora_config lora_parameters peft_config",
    "vector.lora.rank": "lora_r lora_rank r rank",
    "vector.lora.alpha": "lora_alpha vector.alpha",
    "vector.lora.dropout": "dropout lora_dropout",
    "vector.lora.targets": "lora_target lora_target_linear lora_target_modules target_modules targets",
    "vector.mode: lora, qlora (4 bits) or full": "adapter finetuning_type full_finetuning load_in_4bit load_in_8bit "
        "quantization quantization_bit use_peft",
    "vector.epochs": "epoch epochs iters max_steps n_epochs num_epochs num_train_epochs",
    "vector.learning_rate": "learning_rate lr",
    "vector.warmup_epochs": "num_warmup_steps warmup_epochs warmup_ratio warmup_steps",
    "vector.weight_decay": "weight_decay",
    "vector.batch_size, of one step": "batch_size global_batch_size gradient_accumulation_steps train_batch_size",
    "vector.max_length": "cutoff_len max_length max_seq_len max_seq_length model_max_length seq_len sequence_len",
    "vector.optimizer": "optim optimizer",
    "vector.compute": "bf16 fp16 mixed_precision pure_bf16 tf32",
    "merge.dtype; for a fit: vector.compute": "dtype out_dtype torch_dtype",
    "merge.as, model or adapter": "save_method",
    "prompt; the chat template is the target's own": "chat_template chat_template_jinja prompt_template template",
    "prompt.system": "default_system system system_prompt",
    "columns.text": "dataset_text_field",
    "columns.messages": "field_messages",
    "columns.question": "field_instruction",
    "columns.answer": "field_output",
    "output, the folder of the run": "export_dir out_dir output_dir run_name",
    "evaluate.max_new_tokens": "generation_max_length max_new_tokens max_tokens",
    "none, answers are generated greedily": "do_sample num_beams temperature top_k top_p",
    "seed": "data_seed random_seed random_state seed",
    "publish.repo": "hub_model_id push_to_hub push_to_hub_model_id repo repo_id",
    "publish.private": "hub_private_repo private",
    "baseline.methods": "method_args trainer",
    "none, the token is that of `hf auth login`": "hf_token hf_use_auth_token hub_token token",
    "none, gradients are clipped at 1, with AdamW's usual betas": "adam_beta1 adam_beta2 max_grad_norm",
    "none, CUDA_VISIBLE_DEVICES chooses the GPU": "cuda device device_map gpu gpus use_cpu",
    "none, answers alone are learnt": "assistant_only_loss completion_only_loss mask_prompt roles_to_train "
        "train_on_inputs train_on_prompt",
    "none, a vector is plain LoRA (vector.lora)": "bias init_lora_weights lora_modules_to_save modules_to_save "
        "use_dora use_rslora",
    "none, the tokenizer is the target's own": "eos_token pad_token special_tokens tokenizer tokenizer_name "
        "tokenizer_type",
    "none, nothing is cached": "cache_dir dataloader_num_workers dataset_prepared_path preprocessing_num_workers",
    "vector.micro_batch_size, of one pass": "micro_batch_size per_device_train_batch_size",
    "none, a fit chooses kernels and packing": "attn_implementation flash_attention flash_attn group_by_length "
        "packing sample_packing use_liger_kernel",
    "track; the project by the tracker's own variable": "report_to use_wandb wandb_entity wandb_name wandb_project",
    "none, the rate falls linearly, or is constant": "lr_schedule lr_scheduler lr_scheduler_kwargs lr_scheduler_type",
    "none, a fit does so as memory needs it": "cpu_offload gradient_checkpointing gradient_checkpointing_kwargs "
        "use_gradient_checkpointing",
    "none, `accelerate launch -m msa_lite RECIPE`": "deepspeed fsdp fsdp_config num_gpus num_processes "
        "tensor_parallel_size",
    "none, the same command resumes": "overwrite_output_dir resume_from_checkpoint",
    "none, code of a model is never run": "model_type trust_remote_code",
    "none, `merge --mergekit FILE` takes it": "density merge_method models parameters slices weight",
    "none, each epoch is saved, each step logged": "eval_steps eval_strategy evals_per_epoch logging_steps save_steps "
        "save_strategy save_total_limit saves_per_epoch",
}  # fmt: skip
"""Our key, or "none", with more where they differ → the other words, bare or dotted."""

COMMANDS: Mapping[str, str] = {
    "run RECIPE": "delete erase fine-tune finetune forget remove sft tune unlearn",
    "run RECIPE --until vectors": "vector vectors",
    "run RECIPE --until sweep": "sweep",
    "run RECIPE --until moments": "moments",
    "train RECIPE, which trains targets and ideals; run unlearns": "pretrain",
    "ask RUN, or web RUN for a page": "chat generate inference",
    "web RUN": "gui ui webchat webui",
    "evaluate MODEL": "benchmark eval lm-eval score test",
    "merge": "fuse merge-lora mergekit-yaml",
    "publish FOLDER REPO": "push share upload",
    "report RUN": "results show status",
    "compare": "diff",
    "verify": "audit check",
    "purge RUN": "clean rm",
    "plan RECIPE": "dry-run estimate",
    "init": "config new wizard",
    "recipes list": "examples list",
    "recipes validate RECIPE": "validate",
    "quickstart": "demo example tutorial",
    "--version": "version",
    "--help": "help",
    "none, run reads and tokenizes the rows": "preprocess tokenize",
    "none, `hf auth login` does it": "login",
    "none, any server takes the folder: vllm serve runs/NAME/model": "api serve server vllm",
    "none, runs/NAME/model is the model; see also merge --as adapter and publish": "convert export gguf quantize",
    "env": "doctor info",
}  # fmt: skip
"""Our command, or "none", likewise → the other words."""

NOTHING = "none"
_OWN = re.compile(r"[\w.]+")


def key_hint(path: str, exists: Callable[[str], bool] | None = None) -> str:
    """Return what stands for an unknown key, by its dotted path, else by its last name; "" where nothing is known.

    exists: checks for a dotted key in recipes of this kind. None: they are those of a run.
    """
    parent, _, word = path.rpartition(".")
    hint = _find(KEYS, path) or _find(KEYS, word)
    own = _OWN.match(hint)
    if exists is None or own is None or own[0] == NOTHING:
        return _tell(hint)
    last = own[0].rpartition(".")[2]
    beside, of_training = f"{parent}.{last}".lstrip("."), own[0].replace("vector.", "training.")
    place = next(filter(exists, (beside, own[0], of_training)), None)
    return _tell(f"{place}{hint.removeprefix(own[0])}") if place else ""


def command_hint(word: str) -> str:
    """Return what stands for an unknown command; "" where nothing is known."""
    return _tell(_find(COMMANDS, word), "msa-lite ")


def _find(table: Mapping[str, str], word: str) -> str:
    return next((hint for hint, others in table.items() if word in others.split()), "")


def _tell(hint: str, before: str = "") -> str:
    reason = hint.removeprefix(f"{NOTHING}, ")
    return f"; there is none: {reason}" if reason != hint else f"; here: {before}{hint}" if hint else ""
