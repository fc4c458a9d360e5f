"""The sections of a configuration: every key, its default, what is allowed and what it does.

They are frozen and strict: an integer is not a float's text, a bool is not an integer, and an unknown key is an error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from zeromesh.trainer.config_types import (
    Allowed,
    Bytes,
    Count,
    CountOrOff,
    Fraction,
    Number,
    Text,
    Texts,
    bytes_from_text,
    tuple_from_list,
)
from zeromesh.trainer.hf.heads import Head

DEFAULT_MODEL: dict[str, JsonValue] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "use_cache": False,
}
DEFAULT_WARMUP_STEPS = 20
LEAST_STAGING = 4 << 20


class Section(BaseModel):
    """A section of the configuration. Construction raises pydantic's `ValidationError`."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        validate_default=True,
    )


class LoraSection(Section):
    """Low-rank adapters: `W x + (alpha / rank) B A x`, of which A and B alone are trained."""

    rank: Count = Field(default=8, description="Rows of A, and columns of B.")
    alpha: Annotated[Number, Field(gt=0.0)] | None = Field(
        default=None, description="Scale of the adapters, divided by `rank`; null: twice the rank."
    )
    dropout: Fraction = Field(default=0.0, description="Dropout of the adapters' inputs.")
    targets: Literal["all-linear"] | Texts | None = Field(
        default=None,
        description="Ends of the names of layers that get adapters, or all-linear; null: those that PEFT has for the architecture.",
    )


class ModelSection(Section):
    """What is trained. A model that is given to `Trainer` itself stands in for `source` and `config`."""

    source: Text | None = Field(
        default=None,
        description="Hugging Face model to start from: a local directory, or a name on the Hub; its safetensors are streamed into "
        "shards.",
    )
    revision: Text | None = Field(
        default=None,
        description="Branch, tag or commit of a `source` on the Hub; null: its main branch. The commit is in the resolved "
        "configuration.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run the Python code that `source` brings along. false: nothing of it is run."
    )
    config: Annotated[dict[str, JsonValue] | None, Allowed("a mapping with model_type, or null")] = Field(
        default_factory=lambda: dict(DEFAULT_MODEL),
        description="Hugging Face configuration of a model with random weights. With `source`: fields, such as num_labels, that "
        "differ from its own.",
    )
    head: Head = Field(
        default="causal_lm",
        description="The task, and so the class of the model; base is the model without a head.",
    )
    lora: Annotated[LoraSection | None, Allowed("null, or a mapping such as {rank: 8}")] = Field(
        default=None,
        description="Train low-rank adapters of linear layers (LoRA, by PEFT) and freeze the rest; null: none.",
    )
    activation_checkpointing: Literal["none", "block", "selective"] = Field(
        default="none",
        description="Activations recomputed in backward: none, whole blocks, or all of a block but its "
        "matrix products.",
    )
    compile: bool = Field(default=False, description="Compile each block's forward with torch.compile.")
    loss: Literal["auto", "native"] = Field(
        default="auto",
        description="auto: cross entropy in chunks of tokens where a start-up check finds it equal to the "
        "model's own; native: always the model's own.",
    )

    @model_validator(mode="before")
    @classmethod
    def _source_replaces_the_default(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("source") is not None and "config" not in data:
            return {**data, "config": None}
        return data


class DataSection(Section):
    """What it is trained on. Datasets that are given to `Trainer` itself stand in for `train` and `eval`."""

    train: Text | Texts = Field(
        default="stdlib",
        description="stdlib (the source of Python's standard library), or paths of text, .jsonl, "
        ".parquet or directories.",
    )
    eval: Text | Texts | None = Field(
        default=None,
        description="Paths of the evaluation text; null holds `eval_fraction` of the training documents out.",
    )
    eval_fraction: Fraction = Field(
        default=0.05,
        description="Part of the training documents that is held out when `eval` is null. 0 holds none out.",
    )
    text_field: Text = Field(default="text", description="The column of .jsonl and .parquet files that holds the text.")
    tokenizer: Text = Field(
        default="bytes", description="bytes, a local directory that save_pretrained wrote, or a name on the Hub."
    )
    sequence_length: Annotated[int, Field(ge=2)] = Field(default=256, description="Tokens in a packed sequence.")
    shuffle: bool = Field(
        default=True, description="Shuffle the sequences of each epoch, by the seed and the epoch's number."
    )
    shuffle_window: Count = Field(
        default=1024,
        description="Samples of a streamed dataset that are shuffled among each other; others are as a whole.",
    )
    separate_documents: bool = Field(
        default=False,
        description="Positions begin anew with each document of a packed sequence, and none attends to another. Needs a model that "
        "takes position_ids.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63), Allowed("null, or an integer >= 0 and < 2**63")] | None = Field(
        default=None, description="Seed of the order of the data; null: that of the run."
    )


class ParallelSection(Section):
    """The mesh. The product of the axes is the number of ranks."""

    replicate: Count = Field(default=1, description="Replicas of each group of shards (hybrid sharding).")
    shard: Literal["auto"] | Count = Field(
        default="auto", description="Ranks that share one copy of the states; auto: all left."
    )
    tensor: Count = Field(default=1, description="Ranks that divide every layer among them, best within one host.")
    pipeline: Count = Field(default=1, description="Ranks that divide the blocks of the model into stages.")
    sequence: bool = Field(
        default=False,
        description="Between divided layers each tensor rank has a share of the sequence: less memory, the same result.",
    )
    plan: Annotated[dict[str, Text], Allowed("null, or a mapping of patterns to styles")] | None = Field(
        default=None,
        description='Styles of layers by pattern of their names, such as `{"*.q_proj": "colwise"}`, beside those that the '
        "model or zeromesh has.",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        default="1f1b", description="The order in which stages run the microbatches of a step."
    )
    chunks: Count = Field(
        default=1, description="Stages of each pipeline rank: more than one with the schedule `interleaved` alone."
    )
    stages: (
        Annotated[tuple[Count, ...], BeforeValidator(tuple_from_list), Allowed("null, or a list of numbers of blocks")]
        | None
    ) = Field(
        default=None,
        description="Blocks of each stage, first to last; null: by `balance`.",
    )
    balance: Literal["parameters", "flops"] = Field(
        default="parameters",
        description="What stages have about as much of: parameters, which is even in memory, or multiplications of a token, "
        "which is even in time where the head is large.",
    )
    order: Literal["topology", "launch"] = Field(
        default="topology",
        description="How processes become ranks: host by host, so that tensor ranks are neighbours, or as they were launched.",
    )
    transport: Literal["auto", "shared", "gloo", "nccl"] = Field(
        default="auto",
        description="How ranks exchange tensors: host-shared memory, gloo or NCCL; auto: the fastest that works.",
    )
    timeout_seconds: Annotated[Number, Field(gt=0.0, le=86400.0)] = Field(
        default=60.0,
        description="Seconds without progress after which a wait ends with an error that names the late rank.",
    )


class ZeroSection(Section):
    """What is partitioned, and how it moves."""

    stage: Annotated[int, Field(ge=0, le=3)] = Field(
        default=3, description="Sharded are: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."
    )
    prefetch: CountOrOff = Field(default=1, description="Units gathered ahead of the one that computes. 0 = off.")
    gathered_budget: Literal["auto"] | Bytes = Field(
        default="auto",
        description="Bytes of gathered parameters that are kept between uses; auto: what costs no extra peak.",
    )
    overlap: bool = Field(default=True, description="Gather and reduce while forward and backward compute.")


class TierShare(Section):
    """Where something rests: a tier, or a tier and the part of it that rests there; what is left stays on the device."""

    tier: Literal["none", "host", "file"] = Field(default="none", description="The tier.")
    fraction: Annotated[Number, Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="The part of it that rests there."
    )

    @model_validator(mode="before")
    @classmethod
    def _tier_alone(cls, data: Any) -> Any:
        return {"tier": data} if isinstance(data, str) else data

    @model_serializer(mode="wrap")
    def _shortest(self, plain: SerializerFunctionWrapHandler) -> Any:
        return self.tier if self.fraction == 1 else plain(self)


class GradientShare(TierShare):
    """The same; `auto` is where the optimizer state rests."""

    tier: Literal["auto", "none", "host", "file"] = Field(default="auto", description="The tier.")  # type: ignore[assignment]


_TIERS = "none, host or file, or a mapping such as {tier: file, fraction: 0.7}"


class OffloadSection(Section):
    """What rests elsewhere than in the device's memory, and comes only when it is needed. Nothing that is computed changes."""

    optimizer: Annotated[TierShare, Allowed(_TIERS)] = Field(
        default_factory=TierShare, description="Master weights and moments, at any stage."
    )
    gradients: Annotated[GradientShare, Allowed(f"auto, {_TIERS}")] = Field(
        default_factory=GradientShare,
        description="Gradient shards between reduction and update; auto: as the optimizer state.",
    )
    parameters: Annotated[TierShare, Allowed(_TIERS)] = Field(
        default_factory=TierShare, description="Parameters between their uses, at stage 3."
    )
    activations: Annotated[TierShare, Allowed(_TIERS)] = Field(
        default_factory=TierShare,
        description="Inputs of recomputed blocks until backward; a fraction is that of the first blocks.",
    )
    update: Literal["auto", "host", "device"] = Field(
        default="auto",
        description="Where updates are computed whose states are not in an accelerator's memory: on the CPU (host), or on the "
        "device; auto tries both once.",
    )
    directory: Text | Texts | None = Field(
        default=None,
        description="Where files of the file tier lie: best on a local NVMe disk; several are used in turn, stripe by stripe. "
        "null: `offload` in the run's directory.",
    )
    checksums: bool = Field(
        default=False, description="Verify what is read from files by checksums that stay in memory."
    )
    staging: Annotated[
        int,
        BeforeValidator(bytes_from_text),
        Field(ge=LEAST_STAGING),
        Allowed("a number of bytes of 4MiB or more, such as 64MiB"),
    ] = Field(default=64 << 20, description="Bytes of all buffers of a rank between files and the optimizer.")


class LossScaleSection(Section):
    """The dynamic loss scale of float16, as in torch.amp.GradScaler. Other compute dtypes do not read it."""

    initial_scale: Annotated[Number, Field(gt=0.0)] = Field(default=65536.0, description="The scale of the first step.")
    growth_factor: Annotated[Number, Field(gt=1.0)] = Field(
        default=2.0, description="Factor after `growth_interval` good steps."
    )
    backoff_factor: Annotated[Number, Field(gt=0.0, lt=1.0)] = Field(
        default=0.5, description="Factor after a step with non-finite gradients."
    )
    growth_interval: Count = Field(
        default=2000, description="Consecutive steps with finite gradients before the scale grows."
    )


class PrecisionSection(Section):
    """The dtypes of each role. They are printed once at the start of a run."""

    compute: Literal["bfloat16", "float16", "float32", "float64"] = Field(
        default="bfloat16", description="Forward and backward, and the parameters that they read."
    )
    master: Literal["float32", "float64"] = Field(default="float32", description="Master weights and optimizer state.")
    reduce: Literal["float32", "float64"] = Field(
        default="float32", description="Sums of gradients over microbatches and ranks."
    )
    loss_scale: LossScaleSection = Field(
        default_factory=LossScaleSection, description="The dynamic loss scale of float16."
    )


class OptimizerSection(Section):
    """The update, by torch's fused optimizers on flat shards."""

    name: Literal["adamw", "adam", "sgd", "adagrad"] = Field(default="adamw", description="The optimizer.")
    lr: Annotated[Number, Field(ge=0.0)] = Field(default=3.0e-4, description="Learning rate after the warm-up.")
    betas: Annotated[
        tuple[Fraction, Fraction],
        BeforeValidator(tuple_from_list),
        Allowed("a list of two numbers, each >= 0 and < 1"),
    ] = Field(default=(0.9, 0.95), description="Decay rates of the two moments of adamw and adam.")
    eps: Annotated[Number, Field(ge=0.0)] = Field(
        default=1.0e-8, description="Added to the denominator of adamw, adam and adagrad."
    )
    weight_decay: Annotated[Number, Field(ge=0.0)] = Field(
        default=0.1,
        description="Decay of every parameter that `no_decay` does not match; adamw decouples it from the gradient.",
    )
    momentum: Fraction = Field(default=0.0, description="Momentum of sgd.")
    no_decay: Annotated[tuple[Text, ...], BeforeValidator(tuple_from_list)] = Field(
        default=(), description="Patterns such as '*.bias' of the names of parameters without weight decay."
    )
    exempt: Literal["none", "biases_and_norms"] = Field(
        default="none",
        description="Parameters without weight decay besides those of `no_decay`: none, or those that transformers' Trainer leaves "
        "out.",
    )
    in_backward: bool = Field(
        default=False,
        description="Update each bucket inside backward, so that its gradient is freed at once. Needs "
        "clip_norm 0, "
        "on_nonfinite stop and no float16.",
    )
    granularity: Literal["element"] = Field(
        default="element", description="Shards are cut at any element of a parameter."
    )


class ScheduleSection(Section):
    """The learning rate over the steps. Names and curves are those of transformers' get_scheduler."""

    name: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "polynomial",
        "warmup_stable_decay",
        "wsd",
        "inverse_sqrt",
    ] = Field(default="cosine", description="The curve after the warm-up. wsd is short for warmup_stable_decay.")
    warmup_steps: CountOrOff = Field(
        default=DEFAULT_WARMUP_STEPS,
        description="Steps over which the rate rises from 0. The default shrinks to a tenth of a run that is shorter.",
    )
    warmup_ratio: Fraction | None = Field(
        default=None, description="The same as a part of the run's steps; it stands in for `warmup_steps`."
    )
    min_ratio: Annotated[Number, Field(ge=0.0, le=1.0)] | None = Field(
        default=None,
        description="The lowest rate, as a part of lr, of the cosines with min_lr, polynomial and wsd.",
    )
    num_cycles: Annotated[Number, Field(gt=0.0)] | None = Field(
        default=None, description="Waves of the cosine curves; null: one fall to the lowest rate."
    )
    power: Annotated[Number, Field(gt=0.0)] | None = Field(default=None, description="Exponent of polynomial; null: 1.")
    decay_steps: CountOrOff | None = Field(
        default=None, description="Steps of wsd's final decay; null: a tenth of the run."
    )
    decay_shape: Literal["linear", "cosine", "1-sqrt"] | None = Field(
        default=None, description="Curve of wsd's final decay; null: cosine."
    )
    timescale: Count | None = Field(
        default=None,
        description="Steps after which inverse_sqrt begins to fall, as it were; null: those of the warm-up.",
    )
    warmup_shape: Literal["linear", "log", "cosine", "1-sqrt"] | None = Field(
        default=None, description="Curve of the warm-up; log is that of DeepSpeed's schedulers. null: linear."
    )
    start_ratio: Annotated[Number, Field(ge=0.0, le=1.0)] | None = Field(
        default=None,
        description="The rate that the warm-up starts at, as a part of lr; null: 0, and min_ratio for wsd.",
    )


class BatchSection(Section):
    """Sequences in a step. Gradient accumulation follows from these and the number of data-parallel ranks."""

    global_size: Count = Field(default=16, description="Sequences that make one optimizer step, over all ranks.")
    micro_size: Count = Field(default=2, description="Sequences in one forward and backward of one rank.")
    eval_micro_size: Count | None = Field(
        default=None, description="The same for evaluation and prediction; null: as `micro_size`."
    )
    last: Literal["carry", "partial", "drop"] = Field(
        default="carry",
        description="Samples at the end of an epoch that fill no global batch: go on into the next epoch's (carry), make a smaller "
        "one (partial), or are left out (drop).",
    )
    average: Literal["tokens", "samples"] = Field(
        default="tokens",
        description="What the loss of a global batch is a mean over: its targets, or its samples, where each microbatch counts by "
        "how many it has.",
    )


class RunSection(Section):
    """How long, how often and where to."""

    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"),
        Allowed("a name of letters, digits, '.', '_' and '-' that starts with a letter or digit"),
    ] = Field(default="quickstart", description="The run's directory inside `output_dir`.")
    output_dir: Text = Field(default="runs", description="Where runs are written.")
    max_steps: Count = Field(default=200, description="Optimizer steps.")
    epochs: Annotated[Number, Field(gt=0.0)] | None = Field(
        default=None, description="Passes over the training data; they stand in for `max_steps`."
    )
    clip_norm: Annotated[Number, Field(ge=0.0)] = Field(
        default=1.0,
        description="Largest global norm of the gradients, as in torch's clip_grad_norm_. 0 = off.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63), Allowed("an integer >= 0 and < 2**63")] = Field(
        default=0, description="Seed of initial weights, data order and dropout."
    )
    log_every: CountOrOff = Field(default=1, description="Steps between lines of metrics.jsonl. 0 = off.")
    eval_every: CountOrOff | Literal["epoch"] = Field(
        default=0, description="Steps between evaluations, or epoch: after each epoch. 0 = off, but for one at the end."
    )
    eval_at_start: bool = Field(default=False, description="Evaluate before the first step too.")
    metric: Text = Field(
        default="loss",
        description="The value of an evaluation that says which is best: loss, or one of `compute_metrics`.",
    )
    metric_goal: Literal["auto", "lowest", "highest"] = Field(
        default="auto",
        description="Which value of `metric` is best; auto: the lowest of what is a loss, the highest of others.",
    )
    patience: CountOrOff = Field(
        default=0, description="Evaluations in a row without a better `metric` after which the run ends. 0 = off."
    )
    min_improvement: Annotated[Number, Field(ge=0.0)] = Field(
        default=0.0, description="By how much `metric` has to change to be better, for `patience`."
    )
    load_best: bool = Field(
        default=False, description="End with the weights of the best evaluation, which is kept as a checkpoint."
    )
    label_smoothing: Fraction = Field(
        default=0.0, description="Part of each target that is spread over all classes, as in cross_entropy."
    )
    deterministic: bool = Field(
        default=False, description="Only kernels that give the same bits each time; an error where there is none."
    )
    on_nonfinite: Literal["skip", "stop"] = Field(
        default="skip",
        description="What a NaN or infinite gradient does: all ranks skip the step, or the run ends.",
    )
    max_nonfinite: CountOrOff = Field(
        default=20, description="Skipped steps in a row after which the run ends. 0 = never."
    )


class CheckpointSection(Section):
    """What is kept of a run, so that nothing is lost: whole directories that transformers loads, in `checkpoints`."""

    every_steps: CountOrOff | Literal["epoch"] = Field(
        default=100,
        description="Steps between checkpoints, or epoch: after each epoch; the last step has one too. 0 = no checkpoints.",
    )
    keep_last: CountOrOff = Field(default=3, description="Newest checkpoints that are kept. 0 = all.")
    keep_best: CountOrOff = Field(
        default=0, description="Checkpoints with the lowest evaluation loss that are kept beside them. 0 = off."
    )
    asynchronous: bool = Field(default=True, description="Write while training goes on, straight from the live states.")
    resume: Literal["auto", "never"] | Text = Field(
        default="auto",
        description="auto goes on from the run's newest whole checkpoint; never refuses to run over an old one; a path of a "
        "checkpoint or a run starts from there.",
    )
    max_failures: CountOrOff = Field(
        default=3, description="Saves in a row that may fail before the run ends. 0 = it never ends for that."
    )


class TrackingSection(Section):
    """Where figures of a run go beside its own files. Nothing that fails here stops or slows training."""

    backends: Annotated[tuple[Text, ...], BeforeValidator(tuple_from_list)] = Field(
        default=(),
        description="Trackers: wandb, tensorboard, aim, clearml, comet_ml, dvclive, mlflow, swanlab, trackio, or one that "
        "was given to accelerate's register_tracker_class.",
    )
    project: Text = Field(default="zeromesh", description="The project that trackers file the run under.")
    name: Text | None = Field(default=None, description="What trackers call the run; null: `run.name`.")
    mode: Literal["offline", "online"] = Field(
        default="offline", description="Whether wandb sends what it keeps; online needs a network and a key."
    )
    tags: Annotated[tuple[Text, ...], BeforeValidator(tuple_from_list)] = Field(
        default=(), description="Labels of the run."
    )


class ProfileSection(Section):
    """What is recorded of a few steps: traces of torch's profiler in the run's directory."""

    steps: (
        Annotated[tuple[Count, Count], BeforeValidator(tuple_from_list), Allowed("null, or a list of two steps")] | None
    ) = Field(default=None, description="First and last step that are recorded on every rank; null: none.")
    memory: bool = Field(default=False, description="Record allocations and shapes of operators too.")
