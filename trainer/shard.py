"""`shard`: the engine under a plain PyTorch training loop.

model, optimizer = zeromesh.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=3)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
zeromesh.save("out", model, optimizer)
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from zeromesh.checkpoint.loader import candidates
from zeromesh.checkpoint.saver import Saver
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import CheckpointError, ConfigError, LayoutError, StorageError, some
from zeromesh.offload import prevent_fragmentation
from zeromesh.options import OptimizerSettings, ZeroOptions
from zeromesh.parallelize import Divided
from zeromesh.trainer.checkpoints.frozen import FrozenWeights
from zeromesh.trainer.checkpoints.manager import LOOP, content_of, load_engine, load_weights, read_state
from zeromesh.trainer.checkpoints.trainer_state import TrainerState, is_storable
from zeromesh.trainer.config.load import ConfigSource, Consent, load_config
from zeromesh.trainer.config.trainer_config import TrainerConfig, disagreements
from zeromesh.trainer.generation.library_loop import generate
from zeromesh.trainer.generation.settings import check_arguments
from zeromesh.trainer.loop.calls import attend_in_calls
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.model_on_mesh import PlacedModel
from zeromesh.trainer.models.hub_form import HubForm
from zeromesh.trainer.models.prepare import use_float8_linear
from zeromesh.trainer.models.quantized_layers import QuantizedLayer, codec_of_layers, codes_of, make_plain, stand_for
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.setup.build import connect, set_tf32
from zeromesh.trainer.setup.engine_options import engine_options, require_directories
from zeromesh.trainer.setup.model import divide_model, synchronize_initial_values
from zeromesh.units.plan import main_dtype
from zeromesh.units.unit import AtRest
from zeromesh.weight_init.weight_sources import wrap_passed_model
from zeromesh.zero.autograd_engine import AutogradEngine, GuardedParameter
from zeromesh.zero.full_state import WEIGHTS, require_storable
from zeromesh.zero.sharded_optimizer import ChainedOptimizer, ShardedOptimizer, settings_of

_LOGGER = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=nn.Module)
MakeOptimizer = Callable[[Iterator[nn.Parameter]], Optimizer]
_SECTIONS = ("parallel", "zero", "precision", "offload", "ema", "checkpoint")
_SHARDING = "_zeromesh_sharding"
"""The attribute of a partitioned model that has its `ShardedModel`, so that the engine lives as long as the model."""


@dataclass(kw_only=True)
class ShardedModel(PlacedModel):
    """This rank's part of a model that a user's own loop trains. It is pickled and copied as None: copies are not partitioned."""

    owner: ClassVar[str] = "model"
    engine: AutogradEngine
    codes: dict[str, QuantizedLayer]
    """The codes of bitsandbytes' layers by the names of their weights, if the model was partitioned without an optimizer."""
    source: FrozenWeights
    """The frozen weights that checkpoints do not hold, but refer to in the directory of the pretrained model."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def shard(
    model: _Model,
    optimizer: Optimizer | MakeOptimizer | Sequence[Optimizer | MakeOptimizer] | None = None,
    config: ConfigSource = None,
    *,
    reduce: Literal["mean", "sum"] = "mean",
    accumulation: int = 1,
    **options: Any,
) -> tuple[_Model, ShardedOptimizer | None]:
    """Partition a model and its optimizer over the ranks of the launch, for the user's own training loop.

    The loop calls the model as before, and `loss.backward()` sums gradients over the data-parallel ranks. Several calls may come
    before a backward, several backwards before a step, and evaluation under `torch.no_grad()` anywhere. All ranks run the same
    program, each on its own batches. Rank and number of ranks are read from the variables of torchrun or another launcher; where
    there are none, this process is the only rank.

    Args:
        model: a built model with its initial values; rank 0's are used if they differ. The compute dtype is that
            of most of its elements, unless `precision` names another. Built under `torch.device("meta")`, it is never whole on any
            rank: each draws its part, as `reset_parameters` or transformers' `_init_weights` do, by `config`'s `run.seed`.
        optimizer: a torch optimizer over parameters of the model, with any groups; a class or function that creates one from
            `model.parameters()`; several with disjoint parameters, which become one; None for evaluation, without gradients.
        config: a file (YAML or JSON) or a dict; a warning names sections beside `zero`, `parallel`, `precision`, `offload`, `ema`.
        reduce: `mean` averages gradients over the data-parallel ranks, as DDP does; `sum` adds them.
        accumulation: the number of backwards of each step. Above 1, stages 0 and 1 accumulate gradients on each rank, and reduce
            them in the last backward only. 1 allows any number of backwards, and reduces in each.
        options: keys of the section `zero` (`stage=3`, `prefetch=2`), and other sections by name (`parallel={"tensor": 2}`,
            `offload={"optimizer": "host"}`). They replace those of `config`.

    Returns the same model, and the sharded optimizer, a `torch.optim.Optimizer`, or None without one. Raises `ConfigError` with
    all invalid options at once, and for an unsupported optimizer, and `LayoutError` for a model that cannot be partitioned in
    this way.
    """
    if reduce not in ("mean", "sum"):
        raise ConfigError(f"reduce is {reduce!r}; allowed are mean and sum")
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise ConfigError(f"model is a {type(model).__name__}, which reduces gradients itself; give its .module")
    for name, parameter in model.named_parameters():
        if issubclass(type(parameter), AtRest | GuardedParameter):
            cure = "give all modules to one shard(), or call unshard() before"
            raise ConfigError(f"parameter {name} is partitioned already, in this model or in another one; {cure}")
    make_plain(model)
    resolved = _resolve(model, config, options)
    several: Sequence[Any] = [] if optimizer is None else optimizer if isinstance(optimizer, Sequence) else [optimizer]
    made = [each if isinstance(each, Optimizer) else each(model.parameters()) for each in several]
    if wrong := [type(each).__name__ for each in made if not isinstance(each, Optimizer)]:
        raise ConfigError(f"optimizer is a {wrong[0]}; give a torch.optim.Optimizer, its class, or a list of them")
    optimizer = ChainedOptimizer(*made) if len(made) > 1 else made[0] if made else None
    settings = OptimizerSettings() if optimizer is None else settings_of(optimizer, model.named_parameters())
    zero = replace(engine_options(resolved, accumulation), optimizer=settings, in_loop=True)
    with _flags_kept(model):
        engine = _partition(model, resolved, zero, trains=optimizer is not None)
    if optimizer is None:
        return model, None
    return model, ShardedOptimizer(optimizer, engine, 1.0 / engine.mesh.data.size if reduce == "mean" else 1.0)


def _partition(model: nn.Module, config: TrainerConfig, options: ZeroOptions, *, trains: bool) -> AutogradEngine:
    codes = {} if trains else codes_of(model)
    if not trains:  # Frozen parameters have no master weights and no moments.
        model.requires_grad_(False)
    mesh = connect(config)
    if "tf32" in config.precision.model_fields_set:  # Otherwise torch's settings are left alone.
        set_tf32(config, mesh.device)
    mesh.recorder.enabled = False
    options = replace(options, weights=codec_of_layers(model))
    built = wrap_passed_model(model, config.run.seed)
    synchronize_initial_values(built, mesh, config.run.seed)
    for note in built.notes if mesh.rank == 0 else ():
        _LOGGER.warning("%s", note)
    hub_form, native = HubForm(model), partial(make_loss, mode="native")
    divided = divide_model(model, mesh, config, loss_of=native)
    if config.precision.linear is not None:
        use_float8_linear(model, mesh.device)
    engine = AutogradEngine.build(model, mesh, options, built.source, cuts=divided.cuts)
    vars(model)[_SHARDING] = ShardedModel(
        config=config,
        mesh=mesh,
        console=Console(shown=False),
        module=model,
        hub_form=hub_form,
        divided=divided,
        engine=engine,
        processing_class=None,
        codes=codes,
        source=FrozenWeights(engine, config.checkpoint.frozen, _LOGGER.info),
    )
    vars(model)["no_sync"] = partial(_no_sync, model)  # DDP's models have it too.
    attend_in_calls(model, _divided)
    for name, method in _MODEL_METHODS.items():
        if callable(getattr(model, name, None)):
            vars(model)[name] = MethodType(method, model)
    if mesh.device.type == "cpu":
        prevent_fragmentation()
    return engine


@contextmanager
def _flags_kept(model: nn.Module) -> Iterator[None]:
    """Run the block, after which each parameter has the `requires_grad` that it had before, as the user has set it."""
    flags = {name: each.requires_grad for name, each in model.named_parameters()}
    try:
        yield
    finally:
        for name, each in model.named_parameters():
            each.requires_grad_(flags.get(name, each.requires_grad))


def _resolve(model: nn.Module, config: ConfigSource, options: Mapping[str, Any]) -> TrainerConfig:
    given = load_config(config, consent=Consent.GIVEN)
    unused = sorted(given.model_fields_set - {*_SECTIONS, "run"})
    unused += [f"run.{name}" for name in sorted(given.run.model_fields_set - {"seed", "name"})]
    dtype = main_dtype(model.parameters())
    sums = "float64" if dtype == torch.float64 else "float32"
    found: dict[str, dict[str, Any]] = {
        "precision": {"compute": str(dtype).removeprefix("torch."), "master": sums, "reduce": sums},
        "run": {"clip_norm": 0.0, "seed": given.run.seed},
    }
    for name in _SECTIONS:
        own = options.get(name, {})
        if not isinstance(own, Mapping):
            raise ConfigError(f"{name} is {own!r}; give a mapping of keys of that section")
        found[name] = {**found.get(name, {}), **getattr(given, name).model_dump(exclude_unset=True), **own}
    found["zero"] |= {name: value for name, value in options.items() if name not in _SECTIONS}
    unused += [f"checkpoint.{name}" for name in sorted(found["checkpoint"].keys() - {"frozen"})]
    if unused:
        _LOGGER.warning("the loop has its own settings, not those of the configuration: %s", ", ".join(unused))
    resolved = load_config(found)
    if problems := disagreements(resolved, under="a loop"):
        raise ConfigError(problems)
    require_directories(resolved.offload)
    return resolved


def _zero_grad(model: Any, set_to_none: bool = True) -> None:
    """Replace `zero_grad` of a partitioned model. A copy of the model, which is not partitioned, uses the original."""
    if is_sharded(model):
        engine_of(model).forget_gradients(zeros=not set_to_none)
    else:
        type(model).zero_grad(model, set_to_none)


def _generate(model: Any, inputs: torch.Tensor | None = None, **arguments: Any) -> Any:
    """Replace `generate` of a partitioned model; ranks whose prompts differ make equally many calls of the model."""
    if not is_sharded(model):
        return type(model).generate(model, inputs, **arguments)
    placed = placed_of(model)
    arguments.pop("synced_gpus", None)  # The function `generate` synchronizes ranks anyway.
    if inputs is not None:
        arguments["inputs"] = inputs
    check_arguments(model, arguments, placed.mesh)
    return generate(placed, arguments, seed=None)


def _collective_load(name: str) -> Callable[..., Any]:
    """Return a replacement of the model's method `name`, which loads whole values. All ranks call it with equal values."""

    def method(model: Any, /, *arguments: Any, **named: Any) -> Any:
        load = partial(getattr(type(model), name), model, *arguments, **named)
        return engine_of(model).load_whole(load) if is_sharded(model) else load()

    return method


def _no_sync(model: nn.Module) -> AbstractContextManager[None]:
    return engine_of(model).no_sync() if is_sharded(model) else nullcontext()


_MODEL_METHODS: dict[str, Callable[..., Any]] = {"zero_grad": _zero_grad, "generate": _generate}
_MODEL_METHODS |= {name: _collective_load(name) for name in ("load_state_dict", "load_adapter")}
# A bound method is copied and pickled by its `__name__`; with these names a copy of the model gets the methods of its class.
for _name, _method in _MODEL_METHODS.items():
    _method.__name__ = _name


def is_sharded(model: nn.Module) -> bool:
    """Return True if `shard` has partitioned a model."""
    return vars(model).get(_SHARDING) is not None


def _divided(model: nn.Module) -> Divided | None:
    return placed_of(model).divided if is_sharded(model) else None


def engine_of(model: nn.Module) -> AutogradEngine:
    """Return the engine of a model that `shard` has partitioned. Raises `ConfigError` for any other."""
    return placed_of(model).engine


def placed_of(model: nn.Module) -> ShardedModel:
    """Return this rank's part of a partitioned model, with the operations of `Trainer`. Raises `ConfigError` for others."""
    placed: ShardedModel | None = vars(model).get(_SHARDING)
    if placed is None:
        raise ConfigError(f"this {type(model).__name__} is not partitioned; first call zeromesh.shard(model, ...)")
    return placed


def gathered(model: nn.Module, names: Iterable[str]) -> AbstractContextManager[None]:
    """Inside the block these parameters of a partitioned model are whole on every rank, to be read. All ranks enter it. Raises
    `StorageError` when they would not fit in memory, and `PhaseError` when the block writes to them."""
    return placed_of(model).gathered(names)


def averaged(model: nn.Module) -> AbstractContextManager[None]:
    """Inside the block a partitioned model has the averaged weights of the section `ema`. All ranks enter it."""
    return placed_of(model).averaged()


def state_dict(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(name, tensor)` of all parameters and buffers of a partitioned model, each whole and a copy, in the dtype of master
    weights. One tensor is gathered at a time. All ranks iterate to the end."""
    engine = engine_of(model)
    engine.require_same_parameters()
    return ((name, each.detach().clone()) for name, each in engine.state.stored())


def unshard(model: nn.Module, *, keep_codes: bool = False) -> None:
    """Make the parameters of a partitioned model ordinary ones again, whole on every rank. All ranks call it. Its
    `ShardedOptimizer` cannot be used afterwards. Parameters keep the `requires_grad` that they show. With `keep_codes`, weights
    that bitsandbytes has quantized, of a model partitioned without an optimizer, are on the meta device, for another `shard`."""
    placed = placed_of(model)
    placed.engine.wait_for_gathers()
    codes = placed.codes if keep_codes else {}
    with _flags_kept(model):
        placed.engine.state.make_whole(placed.divided.restore, codes)
        placed.engine.close()
        for name, values in codes.items():
            stand_for(values, model.get_parameter(name))
    for name in (_SHARDING, "no_sync", *_MODEL_METHODS):
        vars(model).pop(name, None)


def save(
    directory: str | PathLike[str],
    model: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    *,
    step: int | None = None,
    state: Mapping[str, Any] | None = None,
    alone: bool = False,
    without: Collection[str] = (),
) -> Path:
    """Write a checkpoint of a partitioned model and its optimizer into `directory`, beside earlier ones. All ranks call it.

    `load` reads it on any number of ranks and in any layout; `Trainer.load_weights` and transformers' `from_pretrained` read its
    weights. Gradients of a step that is not complete are not saved.

    Args:
        directory: the parent of checkpoint directories such as `step-00000100`.
        model: the model that `shard` has returned.
        optimizer: the optimizer that `shard` has returned, whose `param_groups` are saved. Moments always are.
        step: the number of the checkpoint; None: the number of updates so far.
        alone: remove the other checkpoints of `directory` once this one is complete.
        without: names of parameters and buffers whose values are left out; `load` leaves them as they are.
        state: JSON values of the user, such as `{"epoch": 2, "scheduler": scheduler.state_dict()}`, for `load`.

    Returns the directory of the complete checkpoint. Raises `StorageError` when it cannot be written (incomplete files are
    removed), and `LayoutError` for a tensor, or the state of a module, that a checkpoint cannot hold, unless it is left out.
    """
    engine = engine_of(model)
    engine.require_same_parameters()
    require_storable(engine.model, "name it in `without`", without)
    progress = engine.progress()
    members, groups = engine.options.optimizer.members, list[dict[str, Any]]()
    for group, names in () if optimizer is None else zip(optimizer.param_groups, members, strict=True):
        # Functions and objects are those of the loop that goes on.
        kept = {name: each for name, each in group.items() if name != "params" and is_storable(each)}
        groups.append({**kept, "params": sorted(names)})
    own = {LOOP: {"groups": groups, "state": dict(state or {}), "without": sorted(without)}}
    number = progress["updates"] if step is None else step
    made = TrainerState(step=number, samples=0, tokens=0, skipped=0, **progress, callbacks=own)
    saver = Saver(CheckpointStore(Path(directory).expanduser()), engine.mesh, engine.ledger)
    try:
        away = placed_of(model).source.referenced()
        content = content_of(engine, None, made, lambda: set() if alone else set(saver.store.steps()), away, without)
        saver.begin(made.step, content)
    except CheckpointError as error:
        raise StorageError(str(error)) from error
    if (saved := saver.finish()) is None or saved.failure:
        why = saved.failure if saved else "no save ran"
        raise StorageError(f"the checkpoint of step {made.step} was not written: {why}")
    return saver.store.path(made.step)


def load(directory: str | PathLike[str], model: nn.Module, optimizer: ShardedOptimizer | None = None) -> dict[str, Any] | None:
    """Load a checkpoint into a partitioned model: the newest complete one in `directory`, or `directory` itself if it is one.

    All ranks call it. The number of ranks and the layout may differ from those of `save`. With an optimizer, its moments and the
    values of its `param_groups` are loaded too; without one, only weights are. Returns the `state` passed to `save`; None if there
    is no checkpoint, and nothing was loaded. Raises `CheckpointError` if there are checkpoints, and none of them can be read, or a
    model in transformers' form instead, and `LayoutError` if the checkpoint is of another model or another kind of optimizer."""
    engine, path = engine_of(model), Path(directory).expanduser()
    engine.require_trained("a load")
    store = CheckpointStore(path)
    found = [path] if store.step_of(path) is not None else [store.path(step) for step in candidates(engine.mesh, store)]
    problems: list[str] = []
    for each in found:
        try:
            reader, state = read_state(each, engine)
            kept = state.callbacks.get(LOOP, {})
            if optimizer is not None:
                own = {spec.kind for spec in engine.checkpoint_state.tensors(reading=True)}
                others = {tensor.kind for tensor in reader.manifest.tensors} - own - set(WEIGHTS)
                if others:  # Missing ones are reported later.
                    has = f"{reader.directory} has {', '.join(sorted(others))} of its optimizer"
                    cure = "load weights alone by zeromesh.load(directory, model), or go on with that optimizer"
                    raise LayoutError(f"{has}, which is of another kind than the one here; {cure}")
                _take_groups(optimizer, kept.get("groups", ()))
                load_engine(reader, engine, state)
            else:
                load_weights(each, engine)
        except CheckpointError as error:
            problems.append(str(error))
            _LOGGER.warning("checkpoint %s skipped: %s", each, error)
            continue
        return dict(kept.get("state", {}))
    if problems:
        raise CheckpointError(f"no checkpoint in {path} can be used: {problems[0]}")
    if next(path.glob("*.safetensors"), None) is not None:
        raise CheckpointError(f"{path} has weights and no checkpoint; load them into the model before shard()")
    return None


def _take_groups(optimizer: ShardedOptimizer, stored: Sequence[Mapping[str, Any]]) -> None:
    """Give groups the stored values of those with the same parameters. Raises `LayoutError` if a group has others."""
    members = optimizer.engine.options.optimizer.members
    groups = {tuple(sorted(names)): group for names, group in zip(members, optimizer.param_groups, strict=True)}
    places = dict(enumerate(groups))  # Not every version has written the names.
    found = {tuple(each.get("params", places.get(n, ()))): each for n, each in enumerate(stored)}
    if found and (others := found.keys() ^ groups.keys()):
        why = f"the optimizer's group of {some(min(others, key=len))} has other parameters in the checkpoint than here"
        raise LayoutError(f"{why}; make the groups that were saved, or load weights alone, without the optimizer")
    for names, values in found.items():
        for name in values.keys() - {"params"}:
            if isinstance(own := groups[names].get(name), torch.Tensor):  # A class may insist on tensors.
                own.copy_(torch.tensor(values[name], dtype=own.dtype))
            else:
                groups[names][name] = values[name]
