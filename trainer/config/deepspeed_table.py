"""The translation of every key of a DeepSpeed configuration, of version 0.19 and of earlier ones still in use.

The tables of docs/coming-from.md are generated from the same rows.
"""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Fate(StrEnum):
    """The treatment of another trainer's setting."""

    MAPPED = "mapped"
    IDLE = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow:
    """A row of the table, about the setting `name`, dotted if nested. `keys` are the configuration's keys that it sets, together
    with other settings unless `as_it_is`. `text` explains how; or why it has no effect; or why it is refused, and what to do
    instead. `neutral` values are accepted without effect."""

    name: str
    fate: Fate
    text: str
    keys: tuple[str, ...] = ()
    as_it_is: bool = False
    neutral: tuple[Any, ...] = ()


_ROW = re.compile(r"([\w. ]+?)(?: (->|=) ([\w. ]+)|: (read|no effect|refused)(?: unless (.+?))?): (.+)")


def read_table(table: str) -> dict[str, tuple[SettingRow, ...]]:
    """Parse a table into the rows of each section. Its lines, of which indented ones continue the previous one, are:

        ## Title                                    a section of the table begins
        [prefix]                                    the names that follow are inside `prefix`; [] ends that
        name = key: how                             the setting's value is that of the key
        name -> key key: how                        the setting decides the keys together with others
        name: read: how                             the setting is read, and decides no key
        name name: no effect: why                   the settings have no effect
        name name: refused unless JSON or JSON: why and what to do

    A refused setting accepts None, and False unless True is among its values; `off` stands for {} or {"enabled": false}.
    The text `"` repeats the previous row's text.
    """
    found: dict[str, tuple[SettingRow, ...]] = {}
    title = prefix = ""
    for line in re.sub(r"\n {4}", " ", table.strip()).splitlines():
        if line.startswith("## "):
            title, prefix = line[3:], ""
            found[title] = ()
        elif line.startswith("["):
            prefix = f"{line[1:-1]}." if line != "[]" else ""
        elif line:
            line = line.removesuffix('"') + found[title][-1].text if line.endswith(': "') else line
            row = _ROW.fullmatch(line)
            if row is None:
                raise ValueError(f"no row of a table of settings: {line!r}")
            names, arrow, keys, what, values, text = row.groups()
            neutral: list[Any] = []
            if what == "refused":
                off = [{}, {"enabled": False}]
                neutral = off if values == "off" else json.loads(f"[{(values or '').replace(' or ', ',')}]")
                neutral = [None, *([] if any(value is True for value in neutral) else [False]), *neutral]
            found[title] += tuple(
                SettingRow(
                    name=prefix + name,
                    fate=Fate.MAPPED if what in (None, "read") else Fate(what),
                    text=text,
                    keys=tuple((keys or "").split()),
                    as_it_is=arrow == "=",
                    neutral=tuple(neutral),
                )
                for name in names.split()
            )
    return found


SECTIONS = read_table("""
## Batch and gradients
train_batch_size -> batch.global_size: samples of a step; has to be train_micro_batch_size_per_gpu x gradient_accumulation_steps
    x data ranks
train_micro_batch_size_per_gpu -> batch.micro_size batch.global_size: samples of a microbatch
gradient_accumulation_steps -> batch.global_size: microbatches of a rank in a step
gradient_clipping = run.clip_norm: as it is; without it 1.0, as DeepSpeed 0.19 has it
dataloader_drop_last -> batch.last: true: drop
steps_per_print -> run.log_every: as it is
managed_gradient_accumulation: no effect: the microbatches of a step are always summed before its update
prescale_gradients gradient_predivide_factor communication_data_type: no effect: gradients are summed over ranks in
    precision.reduce, which is float32, float64, or bfloat16 on the way to sums in float32, and divided once
gradient_allreduce_op: refused unless "mean": gradients are those of the mean loss; set it to mean
sparse_gradients: no effect: gradients of embeddings are dense
disable_allgather zero_allow_untested_optimizer zero_force_ds_cpu_optimizer: no effect: it is about DeepSpeed's own optimizers

## Optimizer
optimizer.type -> optimizer.name: AdamW and Adam: adamw, or adam where adam_w_mode is false; SGD; Adagrad. Others are refused:
    choose one of these
[optimizer.params]
lr = optimizer.lr: as it is
betas = optimizer.betas: as it is
eps = optimizer.eps: as it is
weight_decay -> optimizer.weight_decay: as it is; of all parameters
momentum = optimizer.momentum: as it is
adam_w_mode -> optimizer.name: see optimizer.type
torch_adam -> optimizer.weight_decay: true: 0.01 where weight_decay is not given, as torch's AdamW has it
fused foreach set_grad_none capturable differentiable: no effect: the update is always torch's fused one
fp32_optimizer_states: no effect: optimizer state is in precision.master, which is float32 or float64
bias_correction: refused unless true: moments are always corrected; set it to true
amsgrad maximize: refused: set it to false
nesterov: refused: momentum is the ordinary one; set it to false
dampening: refused unless 0: set it to 0
lr_decay: refused unless 0: set it to 0, and choose a scheduler
max_grad_norm: refused unless 0: DeepSpeed does not take it either; set gradient_clipping
[]
optimizer.legacy_fusion: no effect: the update is always torch's fused one

## Scheduler
scheduler.type -> schedule.name: WarmupLR: constant_with_warmup; WarmupDecayLR: linear; WarmupCosineLR: cosine_warmup_with_min_lr;
    OneCycle: polynomial. LRRangeTest is refused. Without a scheduler the rate is constant
[scheduler.params]
warmup_min_lr -> schedule.start_ratio: as a part of warmup_max_lr
warmup_max_lr -> optimizer.lr: as it is
warmup_num_steps -> schedule.warmup_steps: as it is, and at least 2 as there
warmup_type -> schedule.warmup_shape: log, which is DeepSpeed's default, or linear
total_num_steps -> run.max_steps: the curve ends with the run
warmup_min_ratio -> schedule.start_ratio: as it is
cos_min_ratio -> schedule.min_ratio: as it is; without it 0.0001
cycle_min_lr -> schedule.start_ratio schedule.min_ratio: its shape, as polynomial has it with a linear warm-up; momentum that
    cycles, stairs and decay after it are refused
cycle_max_lr -> optimizer.lr: "
cycle_first_step_size -> schedule.warmup_steps run.max_steps: "
cycle_second_step_size -> run.max_steps: "
cycle_first_stair_count cycle_second_stair_count decay_step_size: refused unless 0: "
decay_lr_rate decay_mom_rate: no effect: it is about decay after the cycle, which decay_step_size 0 turns off
cycle_momentum: read: false, which is not DeepSpeed's default
cycle_min_mom cycle_max_mom: no effect: it is about cycle_momentum, which is refused
last_batch_iteration: no effect: a run goes on with the step after its checkpoint's
lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase: no effect: it is about
    LRRangeTest, which is refused

## Precision
bf16.enabled -> precision.compute: true: bfloat16; float32 if neither it nor fp16 is enabled
bf16.immediate_grad_update: no effect: gradients leave for their buckets as they come
bf16.check_grad_overflow: no effect: run.on_nonfinite says whether a step whose gradients are not finite is skipped or the last
bf16.bf16_master_weights_and_grads: refused: master weights are in float32; offload the optimizer state instead
bf16.bf16_optimizer_states: refused: optimizer state is in float32; offload it instead
bfloat16.enabled -> precision.compute: the old name of bf16.enabled
fp16.enabled -> precision.compute precision.loss_scale.initial_scale precision.loss_scale.growth_interval: true: float16, with a
    dynamic loss scale
fp16.loss_scale: refused unless 0: the scale is found while training; set it to 0
fp16.initial_scale_power -> precision.loss_scale.initial_scale: 2 to this power
fp16.loss_scale_window -> precision.loss_scale.growth_interval: as it is; without it 1000
fp16.hysteresis fp16.consecutive_hysteresis: no effect: the scale falls at the first overflow
fp16.min_loss_scale: refused unless 1: the scale never falls below 1; set it to 1
fp16.auto_cast: no effect: inputs are always in the compute dtype
fp16.fp16_master_weights_and_grads: refused: master weights are in float32; offload the optimizer state instead
torch_autocast.enabled -> precision.compute: the dtype of torch_autocast.dtype
torch_autocast.dtype -> precision.compute precision.loss_scale.initial_scale precision.loss_scale.growth_interval: bfloat16 or
    float16
torch_autocast.lower_precision_safe_modules: no effect: all modules compute in precision.compute
data_types.grad_accum_dtype: no effect: gradients are summed in precision.reduce, which is float32 or float64, or
    bfloat16 on the way to sums in float32
data_types.param_dtype data_types.buffer_dtype: no effect: parameters are in precision.compute, buffers as the model has them
data_types.keep_in_fp32_modules: refused: those that the model names stay in float32; set it to auto
amp: refused unless off: Apex is not there; set bf16 or fp16

## ZeRO
[zero_optimization]
stage -> zero.stage: as it is; without it 0
overlap_comm -> zero.overlap: as it is
offload_optimizer.device -> offload.optimizer: none; cpu: host; nvme: file
offload_optimizer.nvme_path -> offload.directory: as it is
offload_optimizer.ratio -> offload.optimizer: the part that is offloaded
offload_optimizer.pin_memory offload_param.pin_memory cpu_offload_use_pin_memory: no effect: host memory is pinned as far as
    limits allow
offload_optimizer.buffer_count offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu sub_group_size: no
    effect: buffers between files and memory are bounded together by offload.staging
offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.fast_init: no effect: reading, computing and
    writing always overlap, and states are made where they rest
offload_optimizer.super_offload offload_optimizer.cpuadam_cores_perc: no effect: offload.update says where updates are computed
offload_param.device -> offload.parameters: none; cpu: host; nvme: file; at stage 3 alone, as there
offload_param.nvme_path -> offload.directory: as it is
cpu_offload -> offload.optimizer: true: host
cpu_offload_param -> offload.parameters: true: host
zero_hpz_partition_size -> parallel.shard parallel.replicate: above 1: so many ranks share one copy of all states
mics_shard_size -> parallel.shard parallel.replicate: above 0: so many ranks share one copy of all states
mics_hierarchical_params_gather: no effect: parameters are gathered within a group of shards
contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
    allgather_bucket_size round_robin_gradients parameter_alignment legacy_stage1: no effect: a block is gathered and reduced as
    one flat bucket
stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance stage3_param_persistence_threshold
    stage3_model_persistence_threshold prefetch_bucket_size max_live_parameters max_reuse_distance param_persistence_threshold
    model_persistence_threshold: no effect: blocks are gathered ahead by number (zero.prefetch) and kept by bytes
    (zero.gathered_budget)
stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential leaf_module
    module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential: no effect: parameters are gathered block
    by block, experts among them
stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save gather_16bit_weights_on_model_save: no
    effect: checkpoints hold whole tensors, which transformers loads
load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint: no effect: checkpoints hold float32 weights, for any
    ranks
compute_grad_norm: no effect: the norm is always computed, and logged
ignore_unused_parameters: no effect: a parameter without a gradient keeps its value, as in torch
zero_quantized_weights zero_quantized_gradients zeropp_loco_param: no effect: what travels is not quantized: more bytes, exact
zero_quantized_nontrainable_weights: refused: frozen weights are in precision.compute; offload parameters instead
memory_efficient_linear override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory:
    no effect: it is about DeepSpeed's own modules
aio: no effect: see aio, which transformers' documentation has here
zenflow: refused: updates are never late by a step; leave it out, and offload the optimizer

## Activation checkpointing
[activation_checkpointing]
partition_activations -> model.activation_checkpointing: true: block, and parallel.sequence shares activations out
cpu_checkpointing -> offload.activations model.activation_checkpointing: true: host, of recomputed blocks
number_checkpoints -> model.activation_checkpointing: a number: block, with each block by itself
contiguous_memory_optimization synchronize_checkpoint_boundary profile: no effect: it is about DeepSpeed's own function

## Figures
wall_clock_breakdown memory_breakdown timers dump_state comms_logger: no effect: times, memory and traffic are measured in every
    step, and go into metrics.jsonl
flops_profiler.enabled -> profile.steps: true: the step of profile_step is recorded
flops_profiler.profile_step -> profile.steps: as it is
flops_profiler.module_depth flops_profiler.top_modules flops_profiler.detailed flops_profiler.output_file
    flops_profiler.recompute_fwd_factor: no effect: a trace of torch's profiler is written to the run's directory
tensorboard.enabled -> tracking.backends: true: tensorboard
tensorboard.output_path tensorboard.job_name: no effect: files lie in the run's directory, and the run is called run.name
wandb.enabled -> tracking.backends tracking.mode: true: wandb, online
wandb.project -> tracking.project: as it is
wandb.group wandb.team: no effect: wandb reads WANDB_RUN_GROUP and WANDB_ENTITY
comet.enabled -> tracking.backends: true: comet_ml
comet.project -> tracking.project: as it is
comet.samples_log_interval: no effect: run.log_every says how often
comet.workspace comet.experiment_name comet.experiment_key comet.online comet.mode: no effect: comet reads its own variables
comet.api_key: refused: a key in a configuration gets into files; set COMET_API_KEY
csv_monitor.enabled csv_monitor.output_path csv_monitor.job_name: no effect: each run writes metrics.jsonl
log_level: no effect: the console is zeromesh's own

## Ranks
tensor_parallel.autotp_size -> parallel.tensor: above 1: as it is
tensor_parallel.tp.tp_size -> parallel.tensor: above 1: as it is
tensor_parallel.tensor_parallel.tp_size -> parallel.tensor: the same by its other name
tensor_parallel.tp.tp_grain_size tensor_parallel.tensor_parallel.tp_grain_size: no effect: shares follow heads and blocks
tensor_parallel.dtype tensor_parallel.tp_overlap_comm tensor_parallel.vocab_parallel_lm_head
    tensor_parallel.vocab_parallel_ce_backend tensor_parallel.preset_model tensor_parallel.keep_module_on_host: no effect:
    layers are divided by the model's own plan or zeromesh's, the head and its loss by the vocabulary
tensor_parallel.partition_config tensor_parallel.injection_policy_tuple: refused: write the styles of layers as parallel.plan
tensor_parallel.replace_with_kernel_inject tensor_parallel.kernel_inject: refused: modules are not replaced; set it to false
sequence_parallel_size: refused unless 1: sequences are not shared out like that; set it to 1, and see parallel.sequence
seq_parallel_communication_data_type: no effect: it is about sequence_parallel_size
pipeline: refused unless {}: zeromesh cuts the model itself; set parallel.pipeline
expert_parallel: refused unless off: experts are not shared out to ranks; leave it out
use_data_before_expert_parallelism: no effect: experts are not shared out to ranks

## Other
aio: no effect: files are read and written by threads that bypass the page cache; offload.staging bounds their buffers
checkpoint.tag_validation checkpoint.load_universal: no effect: a checkpoint is of one step, and loads on any number of ranks
checkpoint.parallel_write checkpoint.writer checkpoint.checkpoint_serialization: no effect: every rank writes its own bytes
checkpoint.use_node_local_storage: refused: a checkpoint is written once, where all hosts see it; set it to false
nebula datastates_ckpt: no effect: checkpoints are written while training goes on (checkpoint.asynchronous)
disable_python_gc vocabulary_size: no effect: it is about DeepSpeed's engine
compile: refused unless {} or {"deepcompile":false}: set model.compile with an override, and leave it out
autotuning: refused unless off: leave it out; what fits is told before training
compression_training: refused unless off: models are not compressed while they are trained; leave it out
quantize_training: refused unless off: models are not quantized while they are trained; leave it out
weight_quantization: refused unless off: weights are not quantized; leave it out
data_efficiency curriculum_learning: refused unless off: samples come in one order, by data.shuffle; leave it out
progressive_layer_drop: refused unless off: all layers are trained; leave it out
eigenvalue: refused unless off: leave it out
sparse_attention: refused unless off: attention is the model's own; leave it out
hybrid_engine: refused unless off: leave it out; Trainer.generate works before, during and after training
elasticity: refused unless off: leave it out; zeromesh train --nnodes MIN:MAX keeps batch.global_size on any number of ranks
graph_harvesting: refused: set model.compile with an override, and leave it out
""")

TABLE = tuple(row for rows in SECTIONS.values() for row in rows)
