"""The keys of the configuration that the engine reads, each declared once: its type with its bounds, default and description.

`zeromesh/options.py` adds what only the engine knows, `trainer/config/sections` what only the trainer reads. Neither torch nor
pydantic is imported here: a configuration is refused quickly, and the engine needs no pydantic."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt, MinLen, Predicate


@dataclass(frozen=True, slots=True)
class Allowed:
    """Metadata of a type with a description of allowed values that the type does not give."""

    text: str


@dataclass(frozen=True, slots=True)
class ConvertedBy:
    """Metadata of a type with the function that converts a value read from a file, such as text, before it is checked."""

    convert: Callable[[object], object]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        """Return pydantic's schema of a type with this metadata, which pydantic asks for."""
        function = {"type": "no-info", "function": self.convert}
        return {"type": "function-before", "function": function, "schema": handler(source)}


def _number_from_text(value: object) -> object:
    """Convert text such as `1e-3`, which YAML 1.1 and JSON writers leave as text, to a number."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()):
        return float(value)
    return value


def bytes_from_text(value: object) -> object:
    """Convert text such as `256MiB` to a number of bytes."""
    pattern = r"(\d{1,15}(?:\.\d{1,6})?)\s*(?:([KMGT])(i?))?B"
    if isinstance(value, str) and (match := re.fullmatch(pattern, value.strip())):
        number, prefix, binary = match.groups("")
        return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))
    return value


def int_if_whole(value: object) -> object:
    """Convert a float without a fraction, such as 1e3, to an integer, as JSON and YAML have one kind of number."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:  # Not every larger integer is a float.
        return int(value)
    return value


_Tuple = TypeVar("_Tuple", bound=tuple[Any, ...])
Listed = Annotated[_Tuple, ConvertedBy(lambda value: tuple(value) if isinstance(value, list) else value)]
"""The type of a tuple that files write as a list."""
Number = Annotated[float, ConvertedBy(_number_from_text)]
Fraction = Annotated[Number, Ge(0.0), Lt(1.0)]
Fractions = Annotated[Listed[tuple[Fraction, Fraction]], Allowed("a list of two numbers, each >= 0 and < 1")]
Positive = Annotated[Number, Gt(0.0)]
NotNegative = Annotated[Number, Ge(0.0)]
Whole = Annotated[int, ConvertedBy(int_if_whole)]
Count = Annotated[Whole, Ge(1)]
CountOrOff = Annotated[Whole, Ge(0)]
Bytes = Annotated[Whole, ConvertedBy(bytes_from_text), Ge(0), Allowed("a number of bytes, such as 268435456 or 256MiB")]
Seed = Annotated[Whole, Ge(0), Lt(2**63), Allowed("an integer >= 0 and < 2**63")]
Text = Annotated[str, MinLen(1), Predicate(lambda text: "\0" not in text)]
Names = Listed[tuple[Text, ...]]
Balance = Literal["parameters", "flops"]
CodecName = Literal["nf4", "fp4", "int8", "fp8"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
TransportName = Literal["auto", "shared", "gloo", "nccl"]
WireName = Literal["exact", "bfloat16", "int8", "int4", "auto"]
ContextMethod = Literal["gather", "heads", "auto"]
UpdateOn = Literal["auto", "host", "device"]


@dataclass(frozen=True, kw_only=True)
class ZeroKeys:
    """The partitioning of optimizer state, gradients and parameters, and their communication."""

    stage: Annotated[Whole, Ge(0), Le(3)] = 3
    """The ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too."""
    replicas: Literal["whole", "divided"] = "whole"
    """The part of a shard that `parallel.replicate` replicas have. whole: all its states, and they sum its gradients once a step.
    divided: its parameters, and a part of its master weights, moments and final gradients each: less memory, and less traffic."""
    prefetch: CountOrOff = 1
    """Units gathered ahead of the computing one. 0 = off."""
    gathered_budget: Literal["auto"] | Bytes = "auto"
    """Bytes of gathered parameters that are kept between uses, for fewer gathers; auto: as many as do not raise the peak."""
    reduce_once: bool = False
    """Reduce gradients once a step at stages 2 and 3, from sums over microbatches: less traffic, but memory for all gradients."""
    overlap: bool = True
    """Gather and reduce while forward and backward compute."""


@dataclass(frozen=True, kw_only=True)
class TransportKeys:
    """The transport between ranks."""

    transport: TransportName = "auto"
    """The transport of tensors between ranks: host-shared memory, gloo or NCCL; auto: the fastest that works."""
    wire: WireName = "exact"
    """The form in which replicas on several hosts that divide states (`zero.replicas`) send each other sums of gradients and
    changes of parameters. int8, int4: blocks with a scale. auto: the fastest, which is tried at the start, or exact."""


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(TransportKeys):
    """The division of a model among the ranks of the tensor and pipeline axes, and of sequences among those of the context axis."""

    context_method: ContextMethod = "auto"
    """The way in which attention on a share of a sequence sees all of it. gather: keys and values of the others are gathered.
    heads: ranks swap shares of all heads for whole sequences of some. auto: the one that moves fewer bytes."""

    sequence: bool = False
    """Shard activations between divided layers along the sequence (sequence parallelism): less memory, the same result."""
    plan: Annotated[dict[str, Text], Allowed("a mapping of patterns to styles")] | None = None
    """Parallel styles of layers by name pattern, such as `{"*.q_proj": "colwise"}`, beside the model's or zeromesh's plan."""
    schedule: ScheduleName = "1f1b"
    """The order in which stages run the microbatches of a step."""
    chunks: Count = 1
    """Stages of each pipeline rank: more than one with the schedule `interleaved` alone."""
    stages: Annotated[Listed[tuple[Count, ...]], Allowed("a list of numbers of blocks")] | None = None
    """Blocks of each stage, first to last; null: by `balance`."""
    balance: Balance = "parameters"
    """The quantity that stages share evenly: parameters, for even memory, or FLOPs, for even time if the head is large."""


@dataclass(frozen=True, kw_only=True)
class OuterSettings:
    """The outer optimizer of local steps, whose gradient is the replicas' mean change of the weights since the last sync."""

    lr: Positive = 1.0
    """Learning rate. With 1.0 and no momentum, the new weights are the mean of the replicas'."""
    momentum: Fraction = 0.0
    """Nesterov's momentum, as in DiLoCo, which takes 0.9 with a learning rate of 0.7; it takes one more state."""

    @property
    def tensors(self) -> int:
        """The number of tensors like the master weights that it keeps: their values of the last sync, and the momentum."""
        return 2 if self.momentum else int(self.lr != 1)


@dataclass(frozen=True, kw_only=True)
class PrecisionKeys:
    """The dtypes of each role."""

    compute: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Dtype of forward and backward, and of the parameters that they read."""
    master: Literal["float32", "float64", "none", "kahan"] = "float32"
    """Dtype of master weights and optimizer state. none: weights are in bfloat16 alone, and updates are rounded at random. kahan:
    weights are in bfloat16, and so is what was rounded off, which the next update adds."""
    reduce: Literal["float32", "float64", "bfloat16"] = "float32"
    """Dtype of gradient sums over microbatches and ranks. In bfloat16 they travel so, but are summed in float32: half the bytes."""


@dataclass(frozen=True, kw_only=True)
class OffloadKeys:
    """The processor that updates offloaded states, and if they outlive the run's processes."""

    update: UpdateOn = "auto"
    """Processor that computes updates of states outside of accelerator memory: the CPU (host) or the device; auto tries both."""
    durable: bool = False
    """Make every step last, for states on files (twice the bytes): a run that is killed or loses a rank goes on after it."""


@dataclass(frozen=True, kw_only=True)
class StepKeys:
    """The keys of `run` on which the values of a step depend."""

    clip_norm: NotNegative = 1.0
    """Largest global norm of the gradients, as in torch's clip_grad_norm_. 0 = off."""
    seed: Seed = 0
    """Seed of initial weights, data order and dropout."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """Effect of a NaN or infinite gradient: all ranks skip the step, or the run ends."""


@dataclass(frozen=True, kw_only=True)
class OptimizerKeys:
    """The optimizer and its hyperparameters, under torch's names."""

    name: Annotated[Text, Allowed("a name of an optimizer, or of its class such as package.module:Class")] = "adamw"
    """The optimizer: a name of zeromesh's table, one of transformers' `optim`, or a class such as package.module:Class."""
    lr: NotNegative = 3.0e-4
    """Learning rate after the warm-up."""
    betas: Fractions | None = None
    """Decay rates of the two moments; null: [0.9, 0.95] for adamw and adam, else the class's own."""
    eps: NotNegative | None = None
    """Added to the denominator; null: 1e-8 for adamw, adam and adagrad, else the class's own."""
    weight_decay: NotNegative = 0.1
    """Weight decay of all parameters that `no_decay` does not match; adamw decouples it from the gradient."""
    states: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of the moments: float32, which stands for that of master weights; bfloat16, rounded at random, for classes that work
    element by element; int8, blocks with a scale, rounded so too, for adamw, adam and lion."""
    momentum: Fraction = 0.0
    """Momentum of sgd and of other classes that have one; 0: the class's own."""
    no_decay: Names = ()
    """Patterns such as '*.bias' of the names of parameters without weight decay."""


@dataclass(frozen=True, kw_only=True)
class ScalerSettings:
    """The dynamic loss scale of float16, as in torch.amp.GradScaler. Other compute dtypes do not read it."""

    initial_scale: Positive = 65536.0
    """The scale of the first step."""
    growth_factor: Annotated[Number, Gt(1.0)] = 2.0
    """Factor of the scale after `growth_interval` good steps."""
    backoff_factor: Annotated[Number, Gt(0.0), Lt(1.0)] = 0.5
    """Factor of the scale after a step with non-finite gradients."""
    growth_interval: Count = 2000
    """Consecutive steps with finite gradients before the scale grows."""


@dataclass(frozen=True, kw_only=True)
class AverageSettings:
    """An exponential moving average of the weights, in shards."""

    decay: Fraction = 0.0
    """EMA decay at each update, such as 0.999: average = decay x average + (1 - decay) x weights. 0 = off."""
    every_steps: Count = 1
    """Optimizer updates between two updates of the average."""
    start_step: CountOrOff = 0
    """The first optimizer update that enters the average; before it, the average equals the weights."""
