"""Names of zeromesh's keys in transformers, TRL, axolotl, LLaMA-Factory and others, for hints and the migration page.

DeepSpeed's settings are translated, and have a table of their own. A star marks the arguments of transformers' and TRL's trainers.
"""

from collections.abc import Mapping
from typing import Any

from zeromesh.trainer.config.deepspeed_table import TABLE

_TABLE = """
model.source: model_name_or_path base_model pretrained_model_name_or_path model_name model_id pretrained
model.trust_remote_code: *trust_remote_code
model.head: class auto_class model_class task_type
model.lora: peft_config lora_config use_peft use_lora adapter finetuning_type
model.lora.rank: r lora_r lora_rank
model.lora.alpha: lora_alpha
model.lora.dropout: lora_dropout
model.lora.targets: target_modules lora_target lora_target_modules lora_target_linear
model.attention: attn_implementation flash_attention flash_attn use_flash_attention_2 sdp_attention
model.activation_checkpointing: gradient_checkpointing disable_gradient_checkpointing
model.compile: torch_compile
data.train: datasets dataset dataset_name dataset_path dataset_dir train_file train_data train_files
data.eval: eval_dataset test_datasets validation_file eval_file val_data valid_data
data.eval_fraction: val_set_size val_size test_size
data.sequence_length: *max_length max_seq_length max_seq_len sequence_len seq_len seq_length block_size cutoff_len context_length
data.packing: sample_packing pack_sequences neat_packing
data.chat_template: template
data.loss_on: train_on_inputs train_on_prompt completion_only_loss assistant_only_loss
data.workers: *dataloader_num_workers preprocessing_num_workers num_workers
data.seed: *data_seed
batch.micro_size: *per_device_train_batch_size micro_batch_size
batch.eval_micro_size: *per_device_eval_batch_size eval_batch_size
batch.global_size: batch_size train_batch_size
batch.global_size (accumulation is derived from it): gradient_accumulation_steps accumulate_grad_batches
optimizer.name: optim optimizer_type
optimizer.lr: *learning_rate
optimizer.betas: adam_beta1 adam_beta2
optimizer.eps: *adam_epsilon
optimizer.weight_decay: *weight_decay
schedule.name: *lr_scheduler_type lr_scheduler
schedule.warmup_steps: *warmup_steps
run.max_steps: *max_steps steps total_steps num_steps num_training_steps max_train_steps train_steps max_iters iterations
run.epochs: *num_train_epochs num_epochs max_epochs
run.clip_norm: grad_clip *max_grad_norm gradient_clip_val
run.seed: *seed
run.log_first_step: *logging_first_step
run.eval_at_start: *eval_on_start
run.log_every: logging_steps log_every_n_steps
run.eval_every: eval_steps evals_per_epoch eval_strategy evaluation_strategy val_check_interval
run.load_best: *load_best_model_at_end
run.metric: metric_for_best_model
checkpoint.every_steps: save_steps saves_per_epoch save_strategy
checkpoint.keep_last: *save_total_limit
checkpoint.resume: resume_from_checkpoint auto_resume_from_checkpoints
precision.compute: dtype torch_dtype bf16 fp16 mixed_precision
zero.stage: zero_stage zero_optimization fsdp fsdp_config
offload.optimizer: offload_optimizer device
offload.parameters: offload_param cpu_offload
parallel.shard: world_size dp
parallel.tensor: tp tensor_parallel_size
parallel.pipeline: pp pipeline_parallel_size
tracking.backends: *report_to
tracking.project: *project
hub.push: push_to_hub
hub.repository: hub_model_id
no key, as weights are not quantized here (zero.stage 3 and offload.parameters make room): load_in_4bit load_in_8bit \
quantization_bit quantization_config bnb_4bit_compute_dtype bnb_4bit_quant_type
trainer.fit(): train
trainer.save(path): save_model save_pretrained
the argument processing_class: tokenizer
"""
NO_KEY = "no key"
"""The prefix of explanations for settings without a key here."""
_ROWS = [(key, names.split()) for key, _, names in (line.partition(": ") for line in _TABLE.strip().splitlines())]
NAMES: Mapping[str, tuple[str, ...]] = {
    key: others
    for key, names in _ROWS
    if (others := tuple(name.lstrip("*") for name in names if f"*{key.rpartition('.')[2]}" != name))
}
"""Foreign names by their equivalent here, if they differ: a key, or an instruction."""
ARGUMENTS = {key: name[1:] for key, names in _ROWS for name in names if name.startswith("*")}
# `run_name` is no hint, as `run.run_name` is meant to be `run.name`.
ARGUMENTS |= {"schedule.warmup_ratio": ARGUMENTS["schedule.warmup_steps"], "tracking.name": "run_name"}
EVERY = {"run.log_every": "logging", "run.eval_every": "eval", "checkpoint.every_steps": "save"}
"""The names of keys among the arguments of transformers' and TRL's trainers; those of `EVERY` are numbers of steps."""
_MARKS = {
    "axolotl": {"base_model"},
    "LLaMA-Factory": {"model_name_or_path", "template", "finetuning_type", "cutoff_len"},
    "transformers or TRL": {"model_name_or_path", "per_device_train_batch_size", "learning_rate", "num_train_epochs"},
}
"""Typical keys of other trainers' files; two of them, or the only one, identify the trainer."""


OF_DEEPSPEED = {row.name.rpartition(".")[2].lower(): row.keys[0] for row in TABLE if row.keys}
BY_NAME = {name: key for key, names in NAMES.items() for name in names}
"""The zeromesh key of each foreign name in lower case."""


def foreign_problems(data: Mapping[str, Any]) -> list[str]:
    """Return the equivalent of each key of another trainer's configuration; an empty list for any other mapping."""
    trainer = next((name for name, marks in _MARKS.items() if len(marks & data.keys()) >= min(2, len(marks))), None)
    if trainer is None:
        return []
    named = [f"{key}: here {BY_NAME[key.lower()]}" for key in data if key.lower() in BY_NAME]
    rest = ", ".join(key for key in data if key.lower() not in BY_NAME)
    says = f"this is a configuration of {trainer}, whose keys have other names here; docs/configuration.md lists all"
    return [says, *named, *([f"without a name here that is known: {rest}"] if rest else [])]


def training_arguments(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the transformers arguments that correspond to `keys`; null keys are left out."""
    found = {name: keys[key] for key, name in ARGUMENTS.items() if keys.get(key) is not None}
    for name, every in ((name, keys[key]) for key, name in EVERY.items() if key in keys):
        found[f"{name}_strategy"] = "epoch" if every == "epoch" else "steps" if every else "no"
        found |= {f"{name}_steps": every} if every and every != "epoch" else {}
    return found | dict(zip(("adam_beta1", "adam_beta2"), keys.get("optimizer.betas", ()), strict=False))
