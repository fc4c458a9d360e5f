"""What becomes of every key of a DeepSpeed configuration: those of version 0.19, and earlier ones that are still in use."""

from __future__ import annotations

from typing import Any

from zeromesh.trainer.config.migration.translate import SettingRow, copied, idle, joined, refused, under

_OFF: tuple[dict[str, Any], ...] = ({}, {"enabled": False})
"""Sections that ask for nothing."""
_STEPS = "the curve ends with the run"
_ONE_CYCLE = (
    "its shape, as polynomial has it with a linear warm-up; momentum that cycles, stairs and decay after it are refused"
)


def _section(name: str, why: str) -> SettingRow:
    return refused(name, why, *_OFF)


def _aliased(prefix: str, rows: tuple[SettingRow, ...], *names: str) -> tuple[SettingRow, ...]:
    """`rows` inside `prefix`, and those of `names`, which begin with stage3_, without that too."""
    short = [row for row in rows if row.name in names]
    again = tuple(
        SettingRow(
            name=row.name.removeprefix("stage3_"), fate=row.fate, text=row.text, keys=row.keys, neutral=row.neutral
        )
        for row in short
    )
    return under(prefix, (*rows, *again))


_BATCH = (
    joined(
        "train_batch_size",
        "batch.global_size",
        "samples of a step; has to be train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks",
    ),
    joined("train_micro_batch_size_per_gpu", "batch.micro_size batch.global_size", "samples of a microbatch"),
    joined("gradient_accumulation_steps", "batch.global_size", "microbatches of a rank in a step"),
    copied(
        "gradient_clipping", "run.clip_norm", "as it is; without it 1.0, as DeepSpeed 0.19 has it, or max_grad_norm"
    ),
    joined("dataloader_drop_last", "batch.last", "true: drop"),
    joined("steps_per_print", "run.log_every", "as it is; beside TrainingArguments, logging_steps says it"),
    *idle("managed_gradient_accumulation", "the microbatches of a step are always summed before its update"),
    *idle(
        "prescale_gradients gradient_predivide_factor communication_data_type",
        "gradients are summed over ranks in precision.reduce, which is float32 or float64, and divided once",
    ),
    refused("gradient_allreduce_op", "gradients are those of the mean loss; set it to mean", "mean"),
    *idle("sparse_gradients", "gradients of embeddings are dense"),
    *idle(
        "disable_allgather zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        "it is about DeepSpeed's own optimizers",
    ),
)

_OPTIMIZER = (
    joined(
        "optimizer.type",
        "optimizer.name",
        "AdamW and Adam: adamw, or adam where adam_w_mode is false; SGD; Adagrad. Others are refused: choose one of these",
    ),
    *under(
        "optimizer.params",
        (
            copied("lr", "optimizer.lr"),
            copied("betas", "optimizer.betas"),
            copied("eps", "optimizer.eps"),
            joined(
                "weight_decay", "optimizer.weight_decay", "as it is; of all parameters, but beside TrainingArguments"
            ),
            copied("momentum", "optimizer.momentum"),
            joined("adam_w_mode", "optimizer.name", "see optimizer.type"),
            joined(
                "torch_adam",
                "optimizer.weight_decay",
                "true: 0.01 where weight_decay is not given, as torch's AdamW has it",
            ),
            *idle(
                "fused foreach set_grad_none capturable differentiable",
                "the update is always torch's fused one",
            ),
            *idle("fp32_optimizer_states", "optimizer state is in precision.master, which is float32 or float64"),
            refused("bias_correction", "moments are always corrected; set it to true", True),
            refused("amsgrad", "set it to false"),
            refused("maximize", "set it to false"),
            refused("nesterov", "momentum is the ordinary one; set it to false"),
            refused("dampening", "set it to 0", 0),
            refused("lr_decay", "set it to 0, and choose a scheduler", 0),
            refused("max_grad_norm", "DeepSpeed does not take it either; set gradient_clipping", 0),
        ),
    ),
    *idle("optimizer.legacy_fusion", "the update is always torch's fused one"),
)

_SCHEDULER = (
    joined(
        "scheduler.type",
        "schedule.name",
        "WarmupLR: constant; WarmupDecayLR: linear; WarmupCosineLR: cosine_warmup_with_min_lr; OneCycle: polynomial. LRRangeTest "
        "is refused. Without a scheduler the rate is constant, or as TrainingArguments says",
    ),
    *under(
        "scheduler.params",
        (
            joined("warmup_min_lr", "schedule.start_ratio", "as a part of warmup_max_lr"),
            joined("warmup_max_lr", "optimizer.lr", "as it is"),
            joined("warmup_num_steps", "schedule.warmup_steps", "as it is, and at least 2 as there"),
            joined("warmup_type", "schedule.warmup_shape", "log, which is DeepSpeed's default, or linear"),
            joined("total_num_steps", "run.max_steps", _STEPS),
            joined("warmup_min_ratio", "schedule.start_ratio", "as it is"),
            joined("cos_min_ratio", "schedule.min_ratio", "as it is; without it 0.0001"),
            joined("cycle_min_lr", "schedule.start_ratio schedule.min_ratio", _ONE_CYCLE),
            joined("cycle_max_lr", "optimizer.lr", _ONE_CYCLE),
            joined("cycle_first_step_size", "schedule.warmup_steps run.max_steps", _ONE_CYCLE),
            joined("cycle_second_step_size", "run.max_steps", _ONE_CYCLE),
            refused("cycle_first_stair_count", _ONE_CYCLE, 0),
            refused("cycle_second_stair_count", _ONE_CYCLE, 0),
            refused("decay_step_size", _ONE_CYCLE, 0),
            *idle(
                "decay_lr_rate decay_mom_rate", "it is about decay after the cycle, which decay_step_size 0 turns off"
            ),
            joined("cycle_momentum", "", "false, which is not DeepSpeed's default"),
            *idle("cycle_min_mom cycle_max_mom", "it is about cycle_momentum, which is refused"),
            *idle("last_batch_iteration", "a run goes on with the step after its checkpoint's"),
            *idle(
                "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
                "it is about LRRangeTest, which is refused",
            ),
        ),
    ),
)

_SCALE = "precision.loss_scale.initial_scale precision.loss_scale.growth_interval"
_PRECISION = (
    joined("bf16.enabled", "precision.compute", "true: bfloat16; float32 if neither it nor fp16 is enabled"),
    *idle("bf16.immediate_grad_update", "gradients leave for their buckets as they come"),
    *idle(
        "bf16.check_grad_overflow",
        "run.on_nonfinite says whether a step whose gradients are not finite is skipped or the last",
    ),
    refused("bf16.bf16_master_weights_and_grads", "master weights are in float32; offload the optimizer state instead"),
    refused("bf16.bf16_optimizer_states", "optimizer state is in float32; offload it instead"),
    joined("bfloat16.enabled", "precision.compute", "the old name of bf16.enabled"),
    joined("fp16.enabled", f"precision.compute {_SCALE}", "true: float16, with a dynamic loss scale"),
    refused("fp16.loss_scale", "the scale is found while training; set it to 0", 0),
    joined("fp16.initial_scale_power", "precision.loss_scale.initial_scale", "2 to this power"),
    joined("fp16.loss_scale_window", "precision.loss_scale.growth_interval", "as it is; without it 1000"),
    *idle("fp16.hysteresis fp16.consecutive_hysteresis", "the scale falls at the first overflow"),
    refused("fp16.min_loss_scale", "the scale never falls below 1; set it to 1", 1),
    *idle("fp16.auto_cast", "inputs are always in the compute dtype"),
    refused("fp16.fp16_master_weights_and_grads", "master weights are in float32; offload the optimizer state instead"),
    joined("torch_autocast.enabled", "precision.compute", "the dtype of torch_autocast.dtype"),
    joined("torch_autocast.dtype", f"precision.compute {_SCALE}", "bfloat16 or float16"),
    *idle("torch_autocast.lower_precision_safe_modules", "all modules compute in precision.compute"),
    *idle("data_types.grad_accum_dtype", "gradients are summed in precision.reduce, which is float32 or float64"),
    *idle(
        "data_types.param_dtype data_types.buffer_dtype",
        "parameters are in precision.compute, buffers as the model has them",
    ),
    refused("data_types.keep_in_fp32_modules", "those that the model names stay in float32; set it to auto"),
    _section("amp", "Apex is not there; set bf16 or fp16"),
)

_TIER = "none; cpu: host; nvme: file"
_ZERO = (
    joined("stage", "zero.stage", "as it is; without it 0"),
    joined("overlap_comm", "zero.overlap", "as it is"),
    joined("offload_optimizer.device", "offload.optimizer", _TIER),
    joined("offload_optimizer.nvme_path", "offload.directory", "as it is"),
    joined("offload_optimizer.ratio", "offload.optimizer", "the part that is offloaded"),
    *idle(
        "offload_optimizer.pin_memory offload_param.pin_memory cpu_offload_use_pin_memory",
        "host memory is pinned as far as limits allow",
    ),
    *idle(
        "offload_optimizer.buffer_count offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu "
        "sub_group_size",
        "buffers between files and memory are bounded together by offload.staging",
    ),
    *idle(
        "offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.fast_init",
        "reading, computing and writing always overlap, and states are made where they rest",
    ),
    *idle(
        "offload_optimizer.super_offload offload_optimizer.cpuadam_cores_perc",
        "offload.update says where updates are computed",
    ),
    joined("offload_param.device", "offload.parameters", f"{_TIER}; at stage 3 alone, as there"),
    joined("offload_param.nvme_path", "offload.directory", "as it is"),
    joined("cpu_offload", "offload.optimizer", "true: host"),
    joined("cpu_offload_param", "offload.parameters", "true: host"),
    joined(
        "zero_hpz_partition_size",
        "parallel.shard parallel.replicate",
        "above 1: so many ranks share one copy of all states",
    ),
    joined(
        "mics_shard_size", "parallel.shard parallel.replicate", "above 0: so many ranks share one copy of all states"
    ),
    *idle("mics_hierarchical_params_gather", "parameters are gathered within a group of shards"),
    *idle(
        "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
        "allgather_bucket_size round_robin_gradients parameter_alignment legacy_stage1",
        "a block is gathered and reduced as one flat bucket",
    ),
    *idle(
        "stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold",
        "blocks are gathered ahead by number (zero.prefetch) and kept by bytes (zero.gathered_budget)",
    ),
    *idle(
        "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential leaf_module",
        "parameters are gathered block by block, experts among them",
    ),
    *idle(
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
        "checkpoints hold whole tensors, which transformers loads",
    ),
    *idle(
        "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
        "checkpoints hold float32 weights, for any ranks",
    ),
    *idle("compute_grad_norm", "the norm is always computed, and logged"),
    *idle("ignore_unused_parameters", "a parameter without a gradient counts as one with zeros"),
    *idle(
        "zero_quantized_weights zero_quantized_gradients zeropp_loco_param",
        "what travels is not quantized: more bytes, exact",
    ),
    refused(
        "zero_quantized_nontrainable_weights", "frozen weights are in precision.compute; offload parameters instead"
    ),
    *idle(
        "memory_efficient_linear override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "save_muon_momentum_buffer_in_memory",
        "it is about DeepSpeed's own modules",
    ),
    *idle("aio", "see aio, which transformers' documentation has here"),
    refused("zenflow", "updates are never late by a step; leave it out, and offload the optimizer"),
)

_ACTIVATIONS = (
    joined(
        "partition_activations",
        "model.activation_checkpointing",
        "true: block, and parallel.sequence shares activations out; beside TrainingArguments, activation_checkpointing says it",
    ),
    joined(
        "cpu_checkpointing", "offload.activations model.activation_checkpointing", "true: host, of recomputed blocks"
    ),
    joined("number_checkpoints", "model.activation_checkpointing", "a number: block, with each block by itself"),
    *idle(
        "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
        "it is about DeepSpeed's own function",
    ),
)

_FIGURES = (
    *idle(
        "wall_clock_breakdown memory_breakdown timers dump_state comms_logger",
        "times, memory and traffic are measured in every step, and go into metrics.jsonl",
    ),
    joined("flops_profiler.enabled", "profile.steps", "true: the step of profile_step is recorded"),
    joined("flops_profiler.profile_step", "profile.steps", "as it is"),
    *idle(
        "flops_profiler.module_depth flops_profiler.top_modules flops_profiler.detailed flops_profiler.output_file "
        "flops_profiler.recompute_fwd_factor",
        "a trace of torch's profiler is written to the run's directory",
    ),
    joined("tensorboard.enabled", "tracking.backends", "true: tensorboard"),
    *idle(
        "tensorboard.output_path tensorboard.job_name",
        "files lie in the run's directory, and the run is called run.name",
    ),
    joined("wandb.enabled", "tracking.backends tracking.mode", "true: wandb, online"),
    joined("wandb.project", "tracking.project", "as it is"),
    *idle("wandb.group wandb.team", "wandb reads WANDB_RUN_GROUP and WANDB_ENTITY"),
    joined("comet.enabled", "tracking.backends", "true: comet_ml"),
    joined("comet.project", "tracking.project", "as it is"),
    *idle("comet.samples_log_interval", "run.log_every says how often"),
    *idle(
        "comet.workspace comet.experiment_name comet.experiment_key comet.online comet.mode",
        "comet reads its own variables",
    ),
    refused("comet.api_key", "a key in a configuration gets into files; set COMET_API_KEY"),
    *idle(
        "csv_monitor.enabled csv_monitor.output_path csv_monitor.job_name",
        "each run writes metrics.jsonl",
    ),
    *idle("log_level", "the console is zeromesh's own"),
)

_RANKS = (
    joined("tensor_parallel.autotp_size", "parallel.tensor", "above 1: as it is"),
    joined("tensor_parallel.tp.tp_size", "parallel.tensor", "above 1: as it is"),
    joined("tensor_parallel.tensor_parallel.tp_size", "parallel.tensor", "the same by its other name"),
    *idle(
        "tensor_parallel.tp.tp_grain_size tensor_parallel.tensor_parallel.tp_grain_size",
        "shares follow heads and blocks",
    ),
    *idle(
        "tensor_parallel.dtype tensor_parallel.tp_overlap_comm tensor_parallel.vocab_parallel_lm_head "
        "tensor_parallel.vocab_parallel_ce_backend tensor_parallel.preset_model tensor_parallel.keep_module_on_host",
        "layers are divided by the model's own plan or zeromesh's, the head and its loss by the vocabulary",
    ),
    refused("tensor_parallel.partition_config", "write the styles of layers as parallel.plan"),
    refused("tensor_parallel.injection_policy_tuple", "write the styles of layers as parallel.plan"),
    refused("tensor_parallel.replace_with_kernel_inject", "modules are not replaced; set it to false"),
    refused("tensor_parallel.kernel_inject", "modules are not replaced; set it to false"),
    refused(
        "sequence_parallel_size", "sequences are not shared out like that; set it to 1, and see parallel.sequence", 1
    ),
    *idle("seq_parallel_communication_data_type", "it is about sequence_parallel_size"),
    refused("pipeline", "zeromesh cuts the model itself; set parallel.pipeline", {}),
    _section("expert_parallel", "experts are not shared out to ranks; leave it out"),
    *idle("use_data_before_expert_parallelism", "experts are not shared out to ranks"),
)

_OTHER = (
    *idle(
        "aio", "files are read and written by threads that bypass the page cache; offload.staging bounds their buffers"
    ),
    *idle(
        "checkpoint.tag_validation checkpoint.load_universal",
        "a checkpoint is of one step, and loads on any number of ranks",
    ),
    *idle(
        "checkpoint.parallel_write checkpoint.writer checkpoint.checkpoint_serialization",
        "every rank writes its own bytes",
    ),
    refused(
        "checkpoint.use_node_local_storage",
        "a checkpoint is written once, where all hosts see it; set it to false",
    ),
    *idle("nebula datastates_ckpt", "checkpoints are written while training goes on (checkpoint.asynchronous)"),
    *idle("disable_python_gc vocabulary_size", "it is about DeepSpeed's engine"),
    refused("compile", "set model.compile with an override, and leave it out", {}, {"deepcompile": False}),
    _section("autotuning", "leave it out; what fits is told before training"),
    _section("compression_training", "models are not compressed while they are trained; leave it out"),
    _section("quantize_training", "models are not quantized while they are trained; leave it out"),
    _section("weight_quantization", "weights are not quantized; leave it out"),
    _section("data_efficiency", "samples come in one order, by data.shuffle; leave it out"),
    _section("curriculum_learning", "samples come in one order, by data.shuffle; leave it out"),
    _section("progressive_layer_drop", "all layers are trained; leave it out"),
    _section("eigenvalue", "leave it out"),
    _section("sparse_attention", "attention is the model's own; leave it out"),
    _section("hybrid_engine", "leave it out; Trainer.generate works before, during and after training"),
    _section(
        "elasticity",
        "leave it out; zeromesh train --nnodes MIN:MAX keeps batch.global_size on any number of ranks",
    ),
    refused("graph_harvesting", "set model.compile with an override, and leave it out"),
)

SECTIONS: dict[str, tuple[SettingRow, ...]] = {
    "Batch and gradients": _BATCH,
    "Optimizer": _OPTIMIZER,
    "Scheduler": _SCHEDULER,
    "Precision": _PRECISION,
    "ZeRO": _aliased(
        "zero_optimization",
        _ZERO,
        *("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
        *("stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
        *(
            "stage3_module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
        ),
        "stage3_gather_16bit_weights_on_model_save",
    ),
    "Activation checkpointing": under("activation_checkpointing", _ACTIVATIONS),
    "Figures": _FIGURES,
    "Ranks": _RANKS,
    "Other": _OTHER,
}

TABLE = tuple(row for rows in SECTIONS.values() for row in rows)


def sections() -> dict[str, Any]:
    """The names of rows as a tree: a row at each leaf."""
    tree: dict[str, Any] = {}
    for row in TABLE:
        *parents, key = row.name.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[key] = row
    return tree
