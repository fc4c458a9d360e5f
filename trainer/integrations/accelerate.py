"""`Accelerator`: accelerate's class, with models and optimizers partitioned by the engine.

accelerator = Accelerator(gradient_accumulation_steps=4, zeromesh={"zero": {"stage": 3}}) model, optimizer, loader, scheduler =
accelerator.prepare(model, optimizer, loader, scheduler)"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from os import PathLike
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator as PlainAccelerator
from accelerate import ParallelismConfig
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, convert_to_fp32, parse_flag_from_env, recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer

from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError, LayoutError, PhaseError
from zeromesh.mesh.mesh_shape import SIZES, MeshShape
from zeromesh.offload.accelerator import current_accelerator as accelerator_kind
from zeromesh.overrides import override
from zeromesh.trainer.config.load import ConfigSource, Consent, load_config
from zeromesh.trainer.models.adapters import is_adapted, pretrained_of
from zeromesh.trainer.models.quantized_layers import make_plain
from zeromesh.trainer.models.save_pretrained import copy_with, peft_reading
from zeromesh.trainer.shard import engine_of, is_sharded, load, save, shard, state_dict, unshard
from zeromesh.weight_init.weight_sources import canonical_names
from zeromesh.zero.hooks import cast_inputs
from zeromesh.zero.sharded_optimizer import ShardedOptimizer

_ORIGINALS: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()
"""The original dtypes of the tensors of every prepared model, by name."""
_COMPUTE = {"bf16": "bfloat16", "fp16": "float16"}


class PreparedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate has no types.
    """The optimizer that `prepare` returns: a `ShardedOptimizer` that steps when accelerate's accumulation is complete."""

    @property
    def step_was_skipped(self) -> bool:
        """True if the latest step made no update, because gradients under a loss scale were not finite."""
        return bool(self.optimizer.skipped)


class PreparedScheduler(AcceleratedScheduler):  # type: ignore[misc]  # accelerate has no types.
    """A scheduler that advances once per data-parallel rank in each step, where accelerate's advances once per process."""

    data_ranks = 1

    def step(self, *arguments: Any, **named: Any) -> None:
        complete = self.step_with_optimizer and self.gradient_state.sync_gradients
        if not complete or self.split_batches or any(each.step_was_skipped for each in self.optimizers):
            super().step(*arguments, **named)
            return
        for _ in range(self.data_ranks):
            if getattr(self.scheduler, "total_steps", float("inf")) >= self.scheduler._step_count:
                self.scheduler.step(*arguments, **named)


class Accelerator(PlainAccelerator):  # type: ignore[misc]  # accelerate has no types.
    """accelerate's `Accelerator` over the engine. All ranks make the same calls. A model and its optimizer are passed to one call
    of `prepare`; a model without an optimizer is partitioned for evaluation."""

    def __init__(self, *arguments: Any, zeromesh: ConfigSource = None, accumulation: int | None = None, **named: Any):
        """Create an accelerator with accelerate's arguments; `mixed_precision` is the dtype of forward and backward, the states are
        float32. `zeromesh` is the configuration of `shard`: a YAML or JSON file, or a dict, with the sections `zero`, `parallel`,
        `precision`, `offload`. `accumulation` is the number of backwards per step, and at stages 0 and 1 the last one reduces
        gradients; None: any number. Raises `ConfigError` for another partitioning plugin, and for processes that are not seen."""
        if accelerator_kind() is None:
            named["cpu"] = True  # Otherwise accelerate ignores the other processes of a launch.
        for name in ("deepspeed", "fsdp", "megatron_lm"):
            if named.get(f"{name}_plugin") or parse_flag_from_env(f"ACCELERATE_USE_{name.upper()}"):
                cure = 'leave it out and give zeromesh={"zero": {"stage": 3}} instead'
                raise ConfigError(f"{name}_plugin or accelerate's configuration partitions models by {name}; {cure}")
        super().__init__(*arguments, **named)
        self._config = load_config(zeromesh, consent=Consent.GIVEN)
        own = self._config.precision
        self._compute = own.compute if "compute" in own.model_fields_set else _COMPUTE.get(self.mixed_precision)
        self._accumulation = accumulation
        self._optimizers: list[PreparedOptimizer]
        self._prepared: dict[int, PreparedOptimizer] = {}
        self.scaler = None  # The engine scales the loss.
        if problems := [*self._problems()]:
            raise ConfigError(problems, where="Accelerator")
        self.layout = parallel = self._config.parallel
        self.together = parallel.model_size
        if self.together > 1:
            # Loaders ask the device mesh for their ranks, so that those of a batch get the same one.
            shape = MeshShape.resolve(self.num_processes, **{name: getattr(parallel, name) for name in SIZES})
            self.state.parallelism_config = mesh = ParallelismConfig(tp_size=self.together, dp_shard_size=shape.shard)
            self.state.device_mesh = mesh.get_device_mesh(self.device.type)

    def _problems(self) -> Iterator[str]:
        state, mixed, handler = self.state, self.state.mixed_precision, self.ddp_handler
        ranks, shape = read_environment().world_size, state.parallelism_config
        if state.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
            yield f"accelerate is set to {state.distributed_type.value}; zeromesh partitions the model instead"
        if mixed not in ("no", *_COMPUTE):
            yield f"mixed_precision is {mixed}; allowed are no, {', '.join(_COMPUTE)}"
        if mixed in _COMPUTE and self._compute != _COMPUTE[mixed]:
            yield f"mixed_precision is {mixed}, precision.compute {self._compute}; set one alone"
        if shape is not None and shape.total_size > 1:
            instead = 'zeromesh={"parallel": {"tensor": 2, "context": 2}} with its tp_size and cp_size or sp_size'
            yield f"parallelism_config is accelerate's; give {instead} instead"
        if handler is not None and handler.comm_hook.value != "no":
            yield f"comm_hook is {handler.comm_hook.value}; leave it out: the engine sums gradients as they are"
        if self.scaler_handler is not None or self.autocast_handler is not None:
            why = "have no effect on the engine, which has the loss scale and computes in one dtype"
            yield f'GradScalerKwargs and AutocastKwargs {why}; give zeromesh={{"precision": {{...}}}} instead'
        if state.dynamo_plugin.backend.value != "NO":
            yield "torch.compile is on (dynamo); compile inner modules before prepare() instead"
        if self._config.parallel.pipeline > 1:
            yield "parallel.pipeline is above 1: a loop of one's own calls the whole model; use zeromesh.Trainer"
        if ranks != self.num_processes:
            cure = "make the Accelerator with cpu=True, or TrainingArguments with use_cpu=True, before anything else of accelerate"
            yield f"accelerate sees {self.num_processes} processes and the launch has {ranks}; without a GPU, {cure}"

    def prepare(self, *arguments: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders, in any order and number, and return them in that order. Raises
        `ConfigError` for an optimizer whose model is not among them, and for a model with several."""
        prepared = (PreparedOptimizer, ShardedOptimizer)
        optimizers = [each for each in arguments if isinstance(each, Optimizer) and not isinstance(each, prepared)]
        pairs: list[tuple[nn.Module, Optimizer | None]] = []
        for model in (each for each in arguments if isinstance(each, nn.Module)):
            ids = {id(each) for each in model.parameters()}
            updating = [each for each in optimizers if any(id(p) in ids for group in each.param_groups for p in group["params"])]
            if len(updating) > 1:
                raise ConfigError(f"{type(model).__name__} has {len(updating)} optimizers; join them by zeromesh.ChainedOptimizer")
            pairs.append((model, updating[0] if updating else None))
        if any(all(each is not optimizer for _, optimizer in pairs) for each in optimizers):
            raise ConfigError("prepare() got an optimizer without its model; pass both to one call")
        with override(self, "_prepared", {}):
            for model, optimizer in pairs:
                # The model may have been evaluated before, or trained by another optimizer.
                if optimizer is not None and is_sharded(model):
                    self.make_whole(model)
                if not is_sharded(model):
                    self._partition(model, optimizer)
            return super().prepare(*arguments, device_placement=device_placement)

    def _prepare_tp(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments  # The engine divides layers, without accelerate's tensor parallelism.

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Partition a model, for evaluation unless `prepare` has its optimizer too."""
        if not is_sharded(model):
            self._partition(model, None)
        if not any(each is model for each in self._models):
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Wrap the optimizer of a model that `prepare` or `shard` has partitioned."""
        if isinstance(optimizer, ShardedOptimizer):
            optimizer = PreparedOptimizer(optimizer, device_placement=False)
        prepared = optimizer if isinstance(optimizer, PreparedOptimizer) else self._prepared.get(id(optimizer))
        if prepared is None:
            raise ConfigError("pass an optimizer and its model to one call of prepare()")
        if not any(each is prepared for each in self._optimizers):
            self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler. It follows the optimizer that it was made with, or all optimizers if that one is unknown."""
        prepared, original = super().prepare_scheduler(scheduler), getattr(scheduler, "optimizer", None)
        prepared.optimizers = [each for each in self._optimizers if each.optimizer.stands_for(original)] or prepared.optimizers
        if self.together > 1:
            prepared.__class__ = PreparedScheduler
            prepared.data_ranks = self.num_processes // self.together
        return prepared

    def _partition(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        make_plain(model)
        given = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        _ORIGINALS[model] = {name: each.dtype for name, each in given.items()}
        for each in model.parameters():
            vars(each)["copied_as"] = each.dtype
        _replace(model, "save_pretrained", _make_save_pretrained, self)
        narrow = getattr(torch, str(self._compute)) if self._compute in _COMPUTE.values() else None
        if narrow is not None:  # Weights change their memory.
            cast_inputs(model)
            _replace(model, "forward", _cast_forward, partial(torch.autocast, self.device.type, narrow, cache_enabled=False))
        precision = {} if self._compute is None else {"compute": self._compute}
        # Stages 2 and 3 reduce gradients in each backward anyway, the others at the end of a step, after any number of them.
        usual = sys.maxsize if self.gradient_accumulation_steps > 1 else 1
        accumulation = (self._accumulation or usual) if self._config.zero.stage < 2 else 1
        _, sharded = shard(model, optimizer, self._config, accumulation=accumulation, precision=precision)
        if self.together > 1 and engine_of(model).mesh.data_index != self.process_index // self.together:
            raise LayoutError("ranks of a batch are not numbered one after the other, as accelerate's loaders need")
        if optimizer is not None and sharded is not None:
            self._prepared[id(optimizer)] = PreparedOptimizer(sharded, device_placement=False)

    def make_whole(self, model: nn.Module) -> None:
        """Make a prepared model whole, in its dtypes before `prepare`; its optimizer cannot be used then. All ranks call it."""
        unshard(model, keep_codes=True)
        for name, each in model.named_parameters():
            each.data = each.data.to(_ORIGINALS.get(model, {}).get(name, each.dtype))

    def backward(self, loss: Tensor, **named: Any) -> None:
        """Run backward with the loss over `gradient_accumulation_steps`, times the loss scale of float16. Raises `ConfigError` for
        float16 with several optimizers, as each has a loss scale."""
        loss = loss / self.gradient_accumulation_steps
        if self._compute == "float16":
            if len(self._optimizers) != 1:
                raise ConfigError(f"float16 has a loss scale, and {len(self._optimizers)} optimizers differ; use bf16")
            loss = self._optimizers[0].optimizer.scale(loss)
        torch.autograd.backward(loss, **named)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing, since the engine returns norms and gradients without the loss scale."""

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients of a model down to `max_norm`; returns their norm before, a scalar, exact over all ranks. Raises
        `ConfigError` unless these are all parameters of one model, for other norms, and before the last backward of a step."""
        if not self.sync_gradients:
            raise ConfigError("clip_grad_norm_ was called before a step's last backward; call it if sync_gradients")
        given = {id(each) for each in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        for prepared in self._optimizers:
            optimizer = prepared.optimizer
            trained = {id(each): each.requires_grad for each in optimizer.engine.model.parameters()}
            if not given & trained.keys():
                continue
            if norm_type != 2 or given - trained.keys() or any(trained[each] for each in trained.keys() - given):
                why = "clip_grad_norm_ needs all parameters of one prepared model and norm_type=2"
                raise ConfigError(f"{why}: gradients are divided among ranks")
            norm: Tensor = optimizer.clip_grad_norm_(max_norm).to(self.device, torch.float32)
            return norm
        raise ConfigError("clip_grad_norm_ got parameters of no prepared model that is trained")

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise ConfigError("clip_grad_value_ needs whole gradients, which are divided among ranks; use clip_grad_norm_")

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Run the block, as even batches need no joining. Raises `ConfigError` for uneven ones: all ranks gather together."""
        if self.num_processes > 1 and not (self.even_batches if even_batches is None else even_batches):
            raise ConfigError("even_batches is False, and all ranks must call the model equally often; leave it True")
        yield

    def gather_of_data(self, tensor: Any) -> Any:
        """Gather tensors of all data-parallel ranks, once from those that compute a batch together."""
        return recursively_apply(lambda each: torch.cat(each.chunk(self.num_processes)[:: self.together]), super().gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the results of every sample once. Raises `ConfigError` for other objects where ranks share batches."""
        if self.together > 1 and use_gather_object:
            raise ConfigError("gather_for_metrics gathers only tensors if parallel.tensor or parallel.context > 1")
        with override(self, "gather", self.gather_of_data if self.together > 1 else self.gather):
            return super().gather_for_metrics(input_data, use_gather_object)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return all whole parameters and buffers of a model, on the CPU, in their original dtypes, on the main process. All ranks
        call it; the others get an empty dict, as with accelerate's FSDP."""
        if not is_sharded(model):
            plain: dict[str, Tensor] = super().get_state_dict(model, unwrap)
            return plain
        originals, tensors = _ORIGINALS.get(model, {}), {}
        for name, tensor in state_dict(model):
            if self.is_main_process:
                tensors[name] = tensor.to("cpu", originals.get(name, tensor.dtype), copy=True)
        tied = canonical_names(model).items()  # A tied parameter has several names.
        return tensors | {name: tensors[first] for name, first in tied if first in tensors}

    def save_state(self, output_dir: str | PathLike[str] | None = None, safe_serialization: bool = True, **named: Any) -> Any:
        """Write models and optimizers as checkpoints for any number of ranks, beside accelerate's files; returns the directory."""
        with self._without_models():
            location = super().save_state(output_dir, safe_serialization, **named)
        for directory, model, optimizer in self._model_folders(Path(location)):
            save(directory, model, optimizer, alone=True)
        return location

    def load_state(
        self, input_dir: str | PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None, **named: Any
    ) -> None:
        """Load the files of `save_state`, on any number of ranks. Raises as `load`, or `PhaseError` where files are missing."""
        parts = [*self._model_folders(Path())]

        def load_parts(models: list[nn.Module], directory: str) -> None:
            models.clear()
            for name, model, optimizer in parts:
                if load(directory / name, model, optimizer) is None:
                    raise PhaseError(f"there is no checkpoint of zeromesh in {directory / name}")

        with self._without_models(), self.register_load_state_pre_hook(load_parts):
            super().load_state(input_dir, load_kwargs, **named)

    @contextmanager
    def _without_models(self) -> Iterator[None]:
        """Inside the block accelerate writes and reads neither weights nor states of optimizers."""
        hook = self.register_save_state_pre_hook(lambda models, weights, directory: weights.clear())
        with hook, override(self, "_optimizers", []), override(self, "get_state_dict", lambda *_, **__: {}):
            yield

    def _model_folders(self, directory: Path) -> Iterator[tuple[Path, nn.Module, ShardedOptimizer | None]]:
        for number, model in enumerate(self._models):
            name = f"zeromesh_{number}" if number else "zeromesh"
            yield directory / name, model, self.optimizer_of(model)

    def optimizer_of(self, model: nn.Module) -> ShardedOptimizer | None:
        return next((each.optimizer for each in self._optimizers if each.optimizer.engine.model is model), None)


def _cast_forward(forward: Callable[..., Any], autocast: Callable[[], AbstractContextManager[object]]) -> Callable[..., Any]:
    """Return a model's `forward` under autocast, with results in float32."""

    def converted(model: Any, /, *arguments: Any, **named: Any) -> Any:
        if not is_sharded(model):
            return forward(model, *arguments, **named)
        with autocast():
            return convert_to_fp32(forward(model, *arguments, **named))

    return converted


def _make_save_pretrained(store: Callable[..., Any], accelerator: Accelerator) -> Callable[..., Any]:
    """Return a `save_pretrained` that saves whole parameters, in the dtype of the master weights; all ranks call it."""

    def stored(model: Any, /, save_directory: Any, *arguments: Any, state_dict: Any = None, **named: Any) -> None:
        if state_dict is None and is_sharded(model):
            if accelerator.num_processes > 1 and "is_main_process" not in named:
                why = "save_pretrained gathers a model of all ranks: call it on all of them"
                how = "with is_main_process=accelerator.is_main_process, or pass state_dict=accelerator.get_state_dict(model)"
                raise ConfigError(f"{why}, {how}")
            state_dict = accelerator.get_state_dict(model)
            if not accelerator.is_main_process:
                return
        if is_sharded(model) and pretrained_of(model) is None:  # A library's own, which takes no weights.
            if state_dict:
                store(copy_with(model, state_dict, ""), save_directory, *arguments, **named)
            return
        floating = {each.dtype for each in (state_dict or {}).values() if torch.is_tensor(each) and each.is_floating_point()}
        with peft_reading(model, state_dict or {}):
            store(model, save_directory, *arguments, state_dict=state_dict, **named)
        if accelerator.is_main_process and floating and not is_adapted(model) and model.config.dtype not in floating:
            # transformers saves in the model's dtype.
            model.config.dtype = max(floating, key=lambda each: each.itemsize)
            model.config.save_pretrained(save_directory)

    return stored


def _replace(
    model: nn.Module, name: str, make_replacement: Callable[[Callable[..., Any], Any], Callable[..., Any]], option: Any
) -> None:
    method: Any = getattr(model, name, None)
    if method is None or hasattr(method, "of_accelerator"):
        return
    function = getattr(method, "__func__", None) or (lambda _, *arguments, **named: method(*arguments, **named))
    replaced: Any = wraps(function)(make_replacement(function, option))
    replaced.of_accelerator = True
    setattr(model, name, MethodType(replaced, model))
