"""What becomes of every field of transformers' `TrainingArguments` and `Seq2SeqTrainingArguments`."""

from __future__ import annotations

from typing import Any

from zeromesh.trainer.config.migration.translate import SettingRow, converted, copied, idle, joined, refused

_METRICS = "it is about how `compute_metrics` is called; compute what you need from predictions and labels there"
_TRACKIO = "there is no key for where Trackio's Spaces are; leave it out, and set up Trackio by its own means"
_GENERATE = "evaluation does not generate; call Trainer.generate, in a callback for instance"


def _metric(name: Any) -> Any:
    return "loss" if name is None else str(name).removeprefix("eval_")


SECTIONS: dict[str, tuple[SettingRow, ...]] = {
    "Length and batch": (
        joined("output_dir", "run.output_dir run.name", "the run's directory: its parent and its last part"),
        joined(
            "per_device_train_batch_size",
            "batch.micro_size batch.global_size",
            "the microbatch; the global batch is this x gradient_accumulation_steps x data ranks",
        ),
        joined("gradient_accumulation_steps", "batch.global_size", "see per_device_train_batch_size"),
        joined("num_train_epochs", "run.epochs", "unless max_steps is set"),
        joined("max_steps", "run.max_steps run.epochs", "if above 0"),
        copied("per_device_eval_batch_size", "batch.eval_micro_size"),
        joined(
            "average_tokens_across_devices",
            "batch.average",
            "true: the mean over the targets of the global batch. false: refused, but on one rank where it is the same, and "
            "without accumulation, where each rank's mean counts alike (samples)",
        ),
        refused("auto_find_batch_size", "set per_device_train_batch_size; what fits is told before training"),
    ),
    "Learning rate": (
        copied("learning_rate", "optimizer.lr"),
        joined(
            "lr_scheduler_type",
            "schedule.name schedule.min_ratio schedule.decay_steps",
            "the curve of the same name; reduce_lr_on_plateau and greedy are refused: they need the metric of an evaluation",
        ),
        joined(
            "lr_scheduler_kwargs",
            "schedule.num_cycles schedule.min_ratio schedule.power schedule.decay_steps schedule.decay_shape "
            "schedule.warmup_shape schedule.start_ratio schedule.timescale",
            "num_cycles, power, timescale as they are; min_lr, min_lr_rate, min_lr_ratio and lr_end: min_ratio; num_decay_steps: "
            "decay_steps; decay_type: decay_shape; warmup_type: warmup_shape; warmup_lr_rate: start_ratio",
        ),
        joined(
            "warmup_steps",
            "schedule.warmup_steps schedule.warmup_ratio",
            "steps, or below 1 a part of the run's steps; nothing for constant, which does not warm up in transformers either",
        ),
    ),
    "Optimizer": (
        joined(
            "optim",
            "optimizer.name optimizer.momentum optimizer.eps",
            "adamw_torch, adamw_torch_fused, adamw_torch_xla and adamw_torch_npu_fused: adamw; sgd; adagrad. Others are refused: "
            "choose one of these",
        ),
        joined(
            "optim_args",
            "optimizer.momentum optimizer.eps",
            "momentum of sgd, eps of adagrad; adamw has none. Others are refused",
        ),
        joined(
            "weight_decay",
            "optimizer.weight_decay optimizer.exempt",
            "of all parameters but biases and normalisations, as transformers has it",
        ),
        joined("adam_beta1", "optimizer.betas", "the first of the two"),
        joined("adam_beta2", "optimizer.betas", "the second of the two"),
        joined("adam_epsilon", "optimizer.eps", "for adamw"),
        refused("optim_target_modules", "GaLore and APOLLO are not there; leave it out, and set optim to adamw_torch"),
        copied("max_grad_norm", "run.clip_norm", "as it is; 0 is off here too"),
        copied("label_smoothing_factor", "run.label_smoothing"),
        refused("neftune_noise_alpha", "no noise is added to embeddings; leave it out"),
    ),
    "Precision": (
        joined(
            "bf16",
            "precision.compute",
            "bfloat16, with master weights and optimizer state in float32; float32 if neither bf16 nor fp16 is true",
        ),
        joined("fp16", "precision.compute", "float16, with a dynamic loss scale as in torch's GradScaler"),
        joined(
            "bf16_full_eval",
            "precision.compute",
            "nothing more with bf16; refused without it",
        ),
        joined(
            "fp16_full_eval",
            "precision.compute",
            "nothing more with fp16; refused without it",
        ),
        *idle("tf32", "transformers sets torch's switch when the arguments are made"),
    ),
    "Memory and speed": (
        joined("activation_checkpointing", "model.activation_checkpointing", "true: block"),
        joined(
            "activation_checkpointing_kwargs",
            "offload.activations",
            "offload: host. use_reentrant and preserve_rng_state have no effect (recomputation is never reentrant, and draws the "
            "same numbers); every_n_layers above 1 and others are refused",
        ),
        joined("gradient_checkpointing", "model.activation_checkpointing", "the old name of activation_checkpointing"),
        joined(
            "gradient_checkpointing_kwargs", "offload.activations", "the old name of activation_checkpointing_kwargs"
        ),
        joined("torch_compile", "model.compile", "each block's forward is compiled"),
        joined("torch_compile_backend", "model.compile", "inductor alone; others are refused"),
        joined("torch_compile_mode", "model.compile", "default alone; others are refused"),
        *idle(
            "use_liger_kernel liger_kernel_config",
            "kernels are the model's own; cross entropy is computed in chunks where that is exact (model.loss)",
        ),
        *idle("use_cache", "forward is called without a cache in training"),
        *idle("torch_empty_cache_steps", "the allocator's cache is not emptied while training"),
    ),
    "Logs": (
        joined(
            "logging_strategy",
            "run.log_every",
            "steps; no: 0; epoch",
        ),
        joined(
            "logging_steps",
            "run.log_every",
            "steps, or below 1 a part of the run, whose length must be known then",
        ),
        copied("logging_first_step", "run.log_first_step"),
        *idle("log_on_each_node", "the first rank alone writes"),
        *idle("logging_nan_inf_filter", "a loss is never hidden; what is not finite is said, and the step is skipped"),
        *idle("include_num_input_tokens_seen", "tokens are always counted, and logged"),
        *idle("log_level log_level_replica disable_tqdm", "the console is zeromesh's own"),
        joined(
            "report_to",
            "tracking.backends tracking.mode",
            "the trackers that accelerate knows; others are refused. wandb is online, or as WANDB_MODE says",
        ),
        copied("run_name", "tracking.name"),
        joined("project", "tracking.project", "as it is, or what WANDB_PROJECT says"),
        refused("trackio_space_id", _TRACKIO),
        refused("trackio_bucket_id", _TRACKIO),
        refused("trackio_static_space_id", _TRACKIO),
    ),
    "Evaluation": (
        joined(
            "eval_strategy",
            "run.eval_every run.eval_at_end",
            "steps; epoch; no: 0, and not after the last step either",
        ),
        joined(
            "eval_steps",
            "run.eval_every",
            "steps, or below 1 a part of the run, whose length must be known then",
        ),
        refused("eval_delay", "set it to 0; the first evaluation comes after eval_steps or an epoch", 0),
        copied("eval_on_start", "run.eval_at_start"),
        *idle(
            "prediction_loss_only",
            "predictions are kept for compute_metrics alone, and where there is none, not at all",
        ),
        refused("eval_do_concat_batches", _METRICS, True),
        *idle("eval_use_gather_object", "what the model returns is gathered whatever it is made of"),
        *idle("eval_accumulation_steps", "predictions leave the device after each microbatch"),
        refused("include_for_metrics", _METRICS, []),
        refused("batch_eval_metrics", _METRICS),
        refused("label_names", "labels are the fields that the model's forward calls so; leave it out", ["labels"]),
    ),
    "Checkpoints": (
        joined(
            "save_strategy",
            "checkpoint.every_steps checkpoint.keep_best checkpoint.keep_last",
            "no: 0; steps; epoch; best: after each evaluation, of which the best and the newest are kept",
        ),
        joined(
            "save_steps",
            "checkpoint.every_steps",
            "steps, or below 1 a part of the run, whose length must be known then",
        ),
        converted(
            "save_total_limit",
            "checkpoint.keep_last",
            "the newest that are kept, and the best beside them; None: all",
            lambda limit: limit or 0,
        ),
        *idle("save_only_model", "a checkpoint has all states; its directory is a model that transformers loads"),
        refused(
            "save_on_each_node",
            "a checkpoint is written once, to a directory that all hosts see; give such an output_dir",
        ),
        joined(
            "enable_jit_checkpoint",
            "checkpoint.every_steps",
            "where save_strategy is no: so many that only the end writes a checkpoint, or SIGTERM; else nothing, as SIGTERM "
            "always ends a run after the step and its checkpoint",
        ),
        copied("load_best_model_at_end", "run.load_best"),
        converted("metric_for_best_model", "run.metric", "without eval_ before it; None: loss", _metric),
        converted(
            "greater_is_better",
            "run.metric_goal",
            "true: highest; false: lowest; None: auto",
            lambda greater: "auto" if greater is None else "highest" if greater else "lowest",
        ),
        converted(
            "resume_from_checkpoint",
            "checkpoint.resume",
            "a path; true: auto; None: never, so a run does not begin over the checkpoints of another",
            lambda given: "never" if given in (None, False) else "auto" if given is True else str(given),
        ),
        refused("ignore_data_skip", "a run goes on with the sample after the last one, at no cost; leave it out"),
        *idle(
            "restore_callback_states_from_checkpoint",
            "what callbacks keep is in each checkpoint, and given back to them",
        ),
    ),
    "Hub": (
        copied(
            "push_to_hub", "hub.push", "when fit has ended, by save_model and by Trainer.push_to_hub, whatever this is"
        ),
        joined(
            "hub_strategy",
            "",
            "end, which every_save is taken for, and said; with push_to_hub, others are refused: checkpoints are not uploaded",
        ),
        copied("hub_model_id", "hub.repository", "as it is; None: the last part of output_dir"),
        copied("hub_private_repo", "hub.private"),
        copied("hub_revision", "hub.revision"),
        joined("hub_token", "", "it is used to upload, and written nowhere"),
        *idle("hub_always_push", "each upload has ended before the next begins"),
    ),
    "Seeds": (
        copied("seed", "run.seed"),
        copied("data_seed", "data.seed"),
        copied("full_determinism", "run.deterministic"),
    ),
    "Data": (
        joined(
            "dataloader_drop_last",
            "batch.last",
            "true: what fills no global batch is left out (drop); false: it makes a smaller one (partial)",
        ),
        *idle(
            "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
            "dataloader_multiprocessing_context dataloader_in_order",
            "samples are read and collated in the training process",
        ),
        copied("remove_unused_columns", "data.remove_unused"),
        joined("train_sampling_strategy", "data.shuffle", "random: true; sequential: false; others are refused"),
        *idle("length_column_name", "samples are not grouped by length"),
    ),
    "Ranks": (
        joined(
            "parallelism_config",
            "parallel.tensor parallel.shard parallel.replicate batch.global_size",
            "tp_size: tensor, which leaves fewer data ranks; dp_shard_size: shard; dp_replicate_size: replicate. cp_size and "
            "sp_size above 1 are refused",
        ),
        joined(
            "fsdp",
            "zero.stage",
            "true: 3. Without it and deepspeed the stage stays zeromesh's default; what is computed does not depend on it",
        ),
        joined(
            "fsdp_config",
            "zero.stage offload.optimizer offload.parameters model.activation_checkpointing",
            "reshard_after_forward false: stage 2; cpu_offload: host; activation_checkpointing: block. Hybrid sharding and xla are "
            "refused; how modules are wrapped and loaded has no effect",
        ),
        joined("deepspeed", "", "read as DeepSpeed reads it: see from-deepspeed.md"),
        joined(
            "accelerator_config",
            "",
            "split_batches and gradient_accumulation_kwargs are refused; others have no effect",
        ),
        refused(
            "use_cpu",
            "CUDA devices are used where there are some; hide them with CUDA_VISIBLE_DEVICES= to train on CPU",
        ),
        joined("ddp_backend", "parallel.transport", "gloo, nccl; others are refused"),
        joined("ddp_timeout", "parallel.timeout_seconds", "as it is, but 1800 (its default) leaves zeromesh's"),
        *idle("ddp_find_unused_parameters ddp_static_graph", "a parameter without a gradient counts as one with zeros"),
        *idle("ddp_bucket_cap_mb", "buckets are the model's blocks"),
        *idle("ddp_broadcast_buffers", "buffers are each rank's own"),
        *idle("local_rank", "ranks are those of the launcher"),
    ),
    "Other": (
        refused("debug", "leave it out; a gradient that is not finite is named, and no update is made from it", "", []),
        *idle("skip_memory_metrics", "memory is always measured"),
        *idle("do_train do_eval do_predict", "they are for scripts; call fit, evaluate or predict"),
    ),
    "Seq2SeqTrainingArguments": (
        refused("sortish_sampler", "samples are not sorted by length; leave it out"),
        refused("predict_with_generate", _GENERATE),
        *idle(
            "generation_max_length generation_num_beams generation_config",
            "it is about predict_with_generate",
        ),
    ),
}

TABLE = tuple(row for rows in SECTIONS.values() for row in rows)
