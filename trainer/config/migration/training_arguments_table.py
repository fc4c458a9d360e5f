"""What becomes of every field of transformers' `TrainingArguments` and `Seq2SeqTrainingArguments`."""

from zeromesh.trainer.config.migration.translate import read_table

SECTIONS = read_table(
    """
## Length and batch
output_dir -> run.output_dir run.name: the run's directory: its parent and its last part
per_device_train_batch_size -> batch.micro_size batch.global_size: the microbatch; the global batch is this x
    gradient_accumulation_steps x data ranks
gradient_accumulation_steps -> batch.global_size: see per_device_train_batch_size
num_train_epochs -> run.epochs: unless max_steps is set
max_steps -> run.max_steps run.epochs: if above 0
per_device_eval_batch_size = batch.eval_micro_size: as it is
average_tokens_across_devices -> batch.average: true: the mean over the targets of the global batch. false: refused, but on one
    rank where it is the same, and without accumulation, where each rank's mean counts alike (samples)
auto_find_batch_size: refused: set per_device_train_batch_size; what fits is told before training

## Learning rate
learning_rate = optimizer.lr: as it is
lr_scheduler_type -> schedule.name schedule.min_ratio schedule.decay_steps: the curve of the same name; reduce_lr_on_plateau and
    greedy are refused: they need the metric of an evaluation
lr_scheduler_kwargs -> schedule.num_cycles schedule.min_ratio schedule.power schedule.decay_steps schedule.decay_shape
    schedule.warmup_shape schedule.start_ratio schedule.timescale: num_cycles, power, timescale as they are; min_lr,
    min_lr_rate, min_lr_ratio and lr_end: min_ratio; num_decay_steps: decay_steps; decay_type: decay_shape; warmup_type:
    warmup_shape; warmup_lr_rate: start_ratio
warmup_steps -> schedule.warmup_steps schedule.warmup_ratio: steps, or below 1 a part of the run's steps; nothing for constant,
    which does not warm up in transformers either

## Optimizer
optim -> optimizer.name optimizer.momentum optimizer.eps: adamw_torch, adamw_torch_fused, adamw_torch_xla and
    adamw_torch_npu_fused: adamw; sgd; adagrad. Others are refused: choose one of these
optim_args -> optimizer.momentum optimizer.eps: momentum of sgd, eps of adagrad; adamw has none. Others are refused
weight_decay -> optimizer.weight_decay optimizer.exempt: of all parameters but biases and normalisations, as transformers has it
adam_beta1 -> optimizer.betas: the first of the two
adam_beta2 -> optimizer.betas: the second of the two
adam_epsilon -> optimizer.eps: for adamw
optim_target_modules: refused: GaLore and APOLLO are not there; leave it out, and set optim to adamw_torch
max_grad_norm = run.clip_norm: as it is; 0 is off here too
label_smoothing_factor = run.label_smoothing: as it is
neftune_noise_alpha: refused: no noise is added to embeddings; leave it out

## Precision
bf16 -> precision.compute: bfloat16, with master weights and optimizer state in float32; float32 if neither bf16 nor fp16 is
    true
fp16 -> precision.compute: float16, with a dynamic loss scale as in torch's GradScaler
bf16_full_eval -> precision.compute: nothing more with bf16; refused without it
fp16_full_eval -> precision.compute: nothing more with fp16; refused without it
tf32: no effect: transformers sets torch's switch when the arguments are made

## Memory and speed
activation_checkpointing -> model.activation_checkpointing: true: block
activation_checkpointing_kwargs -> offload.activations: offload: host. use_reentrant and preserve_rng_state have no effect
    (recomputation is never reentrant, and draws the same numbers); every_n_layers above 1 and others are refused
gradient_checkpointing -> model.activation_checkpointing: the old name of activation_checkpointing
gradient_checkpointing_kwargs -> offload.activations: the old name of activation_checkpointing_kwargs
torch_compile -> model.compile: each block's forward is compiled
torch_compile_backend -> model.compile: inductor alone; others are refused
torch_compile_mode -> model.compile: default alone; others are refused
use_liger_kernel liger_kernel_config: no effect: kernels are the model's own; cross entropy is computed in chunks where that is
    exact (model.loss)
use_cache: no effect: forward is called without a cache in training
torch_empty_cache_steps: no effect: the allocator's cache is not emptied while training

## Logs
logging_strategy -> run.log_every: steps; no: 0; epoch
logging_steps -> run.log_every: steps, or below 1 a part of the run, whose length must be known then
logging_first_step = run.log_first_step: as it is
log_on_each_node: no effect: the first rank alone writes
logging_nan_inf_filter: no effect: a loss is never hidden; what is not finite is said, and the step is skipped
include_num_input_tokens_seen: no effect: tokens are always counted, and logged
log_level log_level_replica disable_tqdm: no effect: the console is zeromesh's own
report_to -> tracking.backends tracking.mode: the trackers that accelerate knows; others are refused. wandb is online, or as
    WANDB_MODE says
run_name = tracking.name: as it is
project -> tracking.project: as it is, or what WANDB_PROJECT says
trackio_space_id trackio_bucket_id trackio_static_space_id: refused: there is no key for where Trackio's Spaces are; leave it
    out, and set up Trackio by its own means

## Evaluation
eval_strategy -> run.eval_every run.eval_at_end: steps; epoch; no: 0, and not after the last step either
eval_steps -> run.eval_every: steps, or below 1 a part of the run, whose length must be known then
eval_delay: refused unless 0: set it to 0; the first evaluation comes after eval_steps or an epoch
eval_on_start = run.eval_at_start: as it is
prediction_loss_only: no effect: predictions are kept for compute_metrics alone, and where there is none, not at all
eval_do_concat_batches: refused unless true: it is about how `compute_metrics` is called; compute what you need from predictions
    and labels there
include_for_metrics: refused unless []: "
batch_eval_metrics: refused: "
eval_use_gather_object: no effect: what the model returns is gathered whatever it is made of
eval_accumulation_steps: no effect: predictions leave the device after each microbatch
label_names: refused unless ["labels"]: labels are the fields that the model's forward calls so; leave it out

## Checkpoints
save_strategy -> checkpoint.every_steps checkpoint.keep_best checkpoint.keep_last: no: 0; steps; epoch; best: after each
    evaluation, of which the best and the newest are kept
save_steps -> checkpoint.every_steps: steps, or below 1 a part of the run, whose length must be known then
save_total_limit => checkpoint.keep_last: the newest that are kept, and the best beside them; None: all
save_only_model: no effect: a checkpoint has all states; its directory is a model that transformers loads
save_on_each_node: refused: a checkpoint is written once, to a directory that all hosts see; give such an output_dir
enable_jit_checkpoint -> checkpoint.every_steps: where save_strategy is no: so many that only the end writes a checkpoint, or
    SIGTERM; else nothing, as SIGTERM always ends a run after the step and its checkpoint
load_best_model_at_end = run.load_best: as it is
metric_for_best_model => run.metric: without eval_ before it; None: loss
greater_is_better => run.metric_goal: true: highest; false: lowest; None: auto
resume_from_checkpoint => checkpoint.resume: a path; true: auto; None: never, so a run does not begin over the checkpoints of
    another
ignore_data_skip: refused: a run goes on with the sample after the last one, at no cost; leave it out
restore_callback_states_from_checkpoint: no effect: what callbacks keep is in each checkpoint, and given back to them

## Hub
push_to_hub = hub.push: when fit has ended, by save_model and by Trainer.push_to_hub, whatever this is
hub_strategy: read: end, which every_save is taken for, and said; with push_to_hub, others are refused: checkpoints are not
    uploaded
hub_model_id = hub.repository: as it is; None: the last part of output_dir
hub_private_repo = hub.private: as it is
hub_revision = hub.revision: as it is
hub_token: read: it is used to upload, and written nowhere
hub_always_push: no effect: each upload has ended before the next begins

## Seeds
seed = run.seed: as it is
data_seed = data.seed: as it is
full_determinism = run.deterministic: as it is

## Data
dataloader_drop_last => batch.last: true: what fills no global batch is left out (drop); false: it makes a smaller one (partial)
dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order: no effect: samples are read and collated in the training process
remove_unused_columns = data.remove_unused: as it is
train_sampling_strategy -> data.shuffle: random: true; sequential: false; others are refused
length_column_name: no effect: samples are not grouped by length

## Ranks
parallelism_config -> parallel.tensor parallel.shard parallel.replicate batch.global_size: tp_size: tensor, which leaves fewer
    data ranks; dp_shard_size: shard; dp_replicate_size: replicate. cp_size and sp_size above 1 are refused
fsdp -> zero.stage: true: 3. Without it and deepspeed the stage stays zeromesh's default; what is computed does not depend on it
fsdp_config -> zero.stage offload.optimizer offload.parameters model.activation_checkpointing: reshard_after_forward false:
    stage 2; cpu_offload: host; activation_checkpointing: block. Hybrid sharding and xla are refused; how modules are wrapped
    and loaded has no effect
deepspeed: read: read as DeepSpeed reads it: see from-deepspeed.md
accelerator_config: read: split_batches and gradient_accumulation_kwargs are refused; others have no effect
use_cpu: refused: CUDA devices are used where there are some; hide them with CUDA_VISIBLE_DEVICES= to train on CPU
ddp_backend -> parallel.transport: gloo, nccl; others are refused
ddp_timeout -> parallel.timeout_seconds: as it is, but 1800 (its default) leaves zeromesh's
ddp_find_unused_parameters ddp_static_graph: no effect: a parameter without a gradient counts as one with zeros
ddp_bucket_cap_mb: no effect: buckets are the model's blocks
ddp_broadcast_buffers: no effect: buffers are each rank's own
local_rank: no effect: ranks are those of the launcher

## Other
debug: refused unless "" or []: leave it out; a gradient that is not finite is named, and no update is made from it
skip_memory_metrics: no effect: memory is always measured
do_train do_eval do_predict: no effect: they are for scripts; call fit, evaluate or predict

## Seq2SeqTrainingArguments
sortish_sampler: refused: samples are not sorted by length; leave it out
predict_with_generate: refused: evaluation does not generate; call Trainer.generate, in a callback for instance
generation_max_length generation_num_beams generation_config: no effect: it is about predict_with_generate
""",
    convert={
        "dataloader_drop_last": lambda drop: "drop" if drop else "partial",
        "save_total_limit": lambda limit: limit or 0,
        "metric_for_best_model": lambda name: "loss" if name is None else str(name).removeprefix("eval_"),
        "greater_is_better": lambda greater: "auto" if greater is None else "highest" if greater else "lowest",
        "resume_from_checkpoint": lambda given: (
            "never" if given in (None, False) else "auto" if given is True else str(given)
        ),
    },
)

TABLE = tuple(row for rows in SECTIONS.values() for row in rows)
