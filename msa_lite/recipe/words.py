"""Words of other tools, with what takes their place here: keys of a recipe, and commands.

They are those of PEFT, transformers, TRL, axolotl, LLaMA-Factory, Unsloth, mlx-lm, mergekit and open-unlearning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

KEYS: Mapping[str, str] = {
    "target, the finished model; prior is the one before": (
        "adapter_name_or_path adapter_path checkpoint checkpoint_path finetuned_model lora_model_dir model model_path "
        "peft_model_id"
    ),
    "prior, the model before the fine-tuning; target is the finished one": (
        "base base_model base_model_config base_model_name_or_path model_id model_name model_name_or_path "
        "pretrained_model pretrained_model_name_or_path"
    ),
    "forget.data, the rows to forget; retain.data has rows to keep": (
        "data data_files data_path dataset dataset_dir dataset_name dataset_path datasets forget_data forget_dataset "
        "forget_set forget_split train_data train_dataset train_file training_data"
    ),
    "retain.data": "retain_data retain_dataset retain_set retain_split",
    "evaluate.holdout": (
        "eval_data eval_dataset eval_file holdout holdout_split test_datasets test_file validation_file"
    ),
    "select.validation, the share that chooses": "split_ratio val_set_size val_size validation_size validation_split",
    "evaluate.ideal": "ideal ref_model reference_model retain_logs_path retain_model retain_model_path",
    "evaluate.limit, of rows that are scored; all rows are learnt": (
        "limit max_eval_samples max_samples max_train_samples"
    ),
    "forget.alpha": "alpha",
    "retain.beta": "beta",
    "vector": "hyperparameters sft_config train trainer_args training training_args training_arguments",
    "vector.lora": "lora lora_config lora_parameters peft_config",
    "vector.lora.rank": "lora_dim lora_r lora_rank max_lora_rank r rank",
    "vector.lora.alpha": "lora_alpha vector.alpha",
    "vector.lora.dropout": "dropout lora_dropout",
    "vector.lora.targets": (
        "lora_modules lora_target lora_target_linear lora_target_modules lora_target_parameters target_modules "
        "target_parameters targets"
    ),
    "vector.mode, one of lora, qlora (4 bits) and full": (
        "adapter bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_config fine_tune_type finetuning_type full_finetuning "
        "load_in_4bit load_in_8bit load_in_fp8 mode quantization quantization_bit quantization_config tuner_type "
        "use_lora use_peft"
    ),
    "vector.epochs": "epoch epochs n_epochs num_epochs num_train_epochs train_epochs",
    "vector.epochs, passes over the rows; no steps": (
        "iters max_steps max_train_steps num_steps num_training_steps total_steps train_steps"
    ),
    "vector.learning_rate": "learning_rate lr max_lr peak_lr",
    "vector.warmup_epochs": "num_warmup_steps warmup warmup_epochs warmup_ratio warmup_steps",
    "vector.weight_decay": "wd weight_decay",
    "vector.batch_size, the rows of one step": (
        "batch_size effective_batch_size global_batch_size grad_accumulation_steps gradient_accumulation "
        "gradient_accumulation_steps train_batch_size"
    ),
    "vector.micro_batch_size, the rows of one pass; vector.batch_size has those of a step": (
        "auto_find_batch_size micro_batch_size per_device_batch_size per_device_train_batch_size "
        "per_gpu_train_batch_size"
    ),
    "vector.max_length": (
        "block_size context_length cutoff_len max_length max_seq_len max_seq_length max_sequence_length "
        "model_max_length seq_len seq_length sequence_len sequence_length"
    ),
    "vector.optimizer": "optim optimizer optimizer_type",
    "vector.compute, the precision of a fit": (
        "bf16 bfloat16 float16 fp16 mixed_precision precision pure_bf16 tf32 use_bf16 use_fp16"
    ),
    "merge.dtype, as the result is stored; vector.compute is that of a fit": "dtype out_dtype torch_dtype",
    "merge.as, model or adapter": "export_merged merge_adapter save_merged save_method",
    "prompt, chat or plain; the chat template is the target's own": (
        "chat_template chat_template_jinja chat_template_path prompt_format prompt_style prompt_template template "
        "template_name"
    ),
    "prompt.system": "default_system system system_message system_prompt",
    "columns.text": "dataset_text_field text_column text_field",
    "columns.messages": "field_messages messages_field",
    "columns.question": "field_instruction input_column prompt_column question_column",
    "columns.answer": "answer_column field_output output_column response_column",
    "track, with tensorboard, wandb or trackio; project and account by their own variables": (
        "log_with logger logging_dir mlflow_experiment_name mlflow_tracking_uri project report_to tensorboard trackio "
        "trackio_project_name trackio_space_id use_mlflow use_tensorboard use_wandb wandb wandb_entity wandb_log_model "
        "wandb_mode wandb_name wandb_project wandb_run_name wandb_watch"
    ),
    "output, the folder of the run": (
        "export_dir out out_dir out_path output_dir output_folder output_path run_dir run_name save_dir save_path"
    ),
    "evaluate.max_new_tokens": "generation_max_length max_gen_len max_new_tokens max_tokens",
    "none, answers are the likeliest ones, token by token": "do_sample num_beams temperature top_k top_p",
    "seed": "data_seed manual_seed random_seed random_state seed",
    "publish.repo": "hub_model_id hub_repo hub_repo_id push_to_hub push_to_hub_model_id repo repo_id upload_repo",
    "publish.private": "hub_private_repo private",
    "baseline.methods": "method_args trainer unlearn_method",
    "none, the token is that of `hf auth login`, or HF_TOKEN": (
        "hf_token hf_use_auth_token hub_token token use_auth_token"
    ),
    "none, the rate falls linearly to 0 after the warm-up, and is constant with vector.epochs=auto": (
        "cosine_min_lr_ratio lr_decay lr_schedule lr_scheduler lr_scheduler_kwargs lr_scheduler_type scheduler"
    ),
    "none, gradients are clipped at 1, with AdamW's usual betas": (
        "adam_beta1 adam_beta2 adam_epsilon clip_grad_norm gradient_clipping max_grad_norm optim_args"
    ),
    "none, a fit recomputes and offloads as memory needs it (`msa-lite plan`)": (
        "activation_checkpointing activation_offloading cpu_offload disable_gradient_checkpointing "
        "gpu_memory_utilization gradient_checkpointing gradient_checkpointing_kwargs offload "
        "use_gradient_checkpointing"
    ),
    "none, processes share the work: accelerate launch --num_processes N -m msa_lite RECIPE": (
        "accelerator_config context_parallel_size ddp ddp_backend ddp_find_unused_parameters ddp_timeout deepspeed "
        "fsdp fsdp_config fsdp_version n_gpu num_gpus num_processes tensor_parallel_size"
    ),
    "none, CUDA_VISIBLE_DEVICES chooses the GPU": "cuda device device_map devices gpu gpus local_rank no_cuda use_cpu",
    "none, kernels and packing are chosen by the fit, and change no result": (
        "attn_implementation flash_attention flash_attention_2 flash_attn group_by_length liger_kernel neat_packing "
        "packing pad_to_sequence_len plugins sample_packing sdp_attention torch_compile use_cache "
        "use_flash_attention_2 use_liger_kernel xformers_attention"
    ),
    "none, questions are never learnt; with format: text every token is": (
        "assistant_only_loss completion_only_loss mask_history mask_prompt roles_to_train train_on_eos train_on_inputs "
        "train_on_prompt train_on_responses_only"
    ),
    "none, a vector is a plain LoRA adapter (vector.lora)": (
        "bias init_lora_weights layers_to_transform loftq_config lora_bias lora_fan_in_fan_out lora_modules_to_save "
        "loraplus_lr_ratio modules_to_save neftune_noise_alpha rank_pattern task_type use_dora use_rslora"
    ),
    "none, the tokenizer is the target's own": (
        "eos_token pad_token processor_type special_tokens tokenizer tokenizer_config tokenizer_name "
        "tokenizer_name_or_path tokenizer_source tokenizer_type"
    ),
    "none, the config says what a model is, and code of a model is never run": (
        "model_type trust_remote_code type_of_model"
    ),
    "none, a fit saves each epoch and logs each step, and the same command resumes": (
        "auto_resume_from_checkpoints do_eval do_train early_stopping_patience eval_steps eval_strategy "
        "evals_per_epoch evaluation_strategy load_best_model_at_end logging_first_step logging_steps logging_strategy "
        "overwrite_output_dir plot_loss resume resume_from_checkpoint save_only_model save_safetensors save_steps "
        "save_strategy save_total_limit saves_per_epoch"
    ),
    "none, rows are read at once, and nothing is cached": (
        "cache_dir dataloader_num_workers dataloader_pin_memory dataset_num_proc dataset_prepared_path num_workers "
        "overwrite_cache preprocessing_num_workers remove_unused_columns streaming tokenized_path"
    ),
    "none, a recipe fits vectors of its own; `msa-lite merge --mergekit FILE` takes mergekit's": (
        "density merge_method models parameters slices weight"
    ),
    "none, a training keeps the models of all stages; remove the folders of those that you do not need": "keep",
    "none, the attack quantise measures what rounding brings back: attack.attacks=[quantise]": (
        "merge.forecast select.under"
    ),
    "none, forget rows are compared with evaluate.holdout, or the benchmark's own holdout rows": "probe",
    "none, a judge of kind openai is asked; evaluate.judge.kind: none asks none": "select.judge",
    "none, the rules are extraction and the paper's scores: select.score": (
        "select.maximise select.minimise select.subject_to"
    ),
    "none, name the points in a list, such as forget.alpha=[0.5, 0.75, 1.0]": "select.refine",
}  # fmt: skip
"""Our key, or "none", with more where they differ → the other words, bare or dotted."""

COMMANDS: Mapping[str, str] = {
    "run RECIPE": "delete dpo erase fine-tune finetune fit forget grpo kto remove sft start tune unlearn",
    "run RECIPE --until vectors": "vector vectors",
    "run RECIPE --until sweep": "sweep",
    "run RECIPE --until moments": "moments",
    "train RECIPE, which trains targets and ideals; run unlearns": "pretrain reward rloo",
    "ask RUN, or web RUN for a page": "chat generate infer inference interact predict query talk",
    "web RUN": "app browse gui studio ui webchat webui",
    "evaluate MODEL": "bench benchmark eval lm-eval lm_eval score test",
    "merge": "fuse merge-lora merge-weights merge_lora mergekit-yaml",
    "publish FOLDER REPO": "hub push release share upload",
    "report RUN": "explain results show status summary view",
    "compare": "diff leaderboard",
    "verify": "audit check checksum hash",
    "purge RUN": "clean cleanup gc prune rm",
    "plan RECIPE": "dry-run estimate memory vram",
    "init": "config configure create new setup wizard",
    "recipes list": "examples list ls templates",
    "recipes validate RECIPE": "lint validate",
    "recipes schema": "schema",
    "quickstart": "demo example hello try tutorial",
    "--version": "version",
    "--help": "help man usage",
    "none, runs/NAME/model is a usual folder of a model: vllm serve runs/NAME/model (docs/how-to/serve.md)": (
        "api deploy ollama serve server vllm vllm-serve"
    ),
    "none, runs/NAME/model is the model; publish sends it to the Hub, merge --as adapter makes an adapter": (
        "convert export gguf quantise quantize save"
    ),
    "none, run reads and tokenizes the rows": "prepare preprocess tokenize",
    "none, `hf auth login` does it": "auth login logout",
    "none, docs/reference/metrics.md explains each metric": "metrics",
    "none, examples/judge_agreement holds a judge against a person": "judge",
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
