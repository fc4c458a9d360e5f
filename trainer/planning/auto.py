"""Plans of configurations, and the values of `auto`: conversions between configuration keys and fields of a layout."""

from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from typing import Any

from zeromesh.environment import LaunchEnvironment, available_cores
from zeromesh.errors import ConfigError, counted
from zeromesh.offload import TierChoice, accelerator
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import BatchRules, check_dataset
from zeromesh.trainer.data.streaming import is_stream
from zeromesh.trainer.data.tokenizer import BYTES, load_tokenizer
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.machines.cards import find_name
from zeromesh.trainer.models.build import TOKENIZER_FILES, directory_of
from zeromesh.trainer.models.user_model import ForwardInputs
from zeromesh.trainer.planning.estimate import Estimate
from zeromesh.trainer.planning.layouts import FIELDS, TIERS, with_layout
from zeromesh.trainer.planning.machine import Machine, find_machine
from zeromesh.trainer.planning.planner import Plan, Planner
from zeromesh.trainer.planning.subject import Subject, token_batches
from zeromesh.trainer.setup.model import build_whole_model, loss_of

_CARDS = 8  # of a host, where the number is not known


def machine_here(name: str | None, devices: int = 1) -> Machine:
    """Return a machine by name, size or file, or this host's; `devices` are its cards where unknown. Raises `ConfigError`."""
    if name is None and accelerator.current_accelerator() is not None:
        name = find_name(accelerator.device_name(accelerator.initialize()[0]))
    return find_machine(name, devices=devices)


def ranks_here(machine: Machine | None = None) -> int:
    """Return the number of this host's accelerators, or else its cores; for another kind of machine, its ranks per host."""
    if accelerator.current_accelerator() is not None and not (machine and machine.is_cpu):
        return len(accelerator.initialize())
    return available_cores() if machine is None or machine.is_cpu else machine.host.devices


def fixed_fields(config: TrainerConfig, keys: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a layout, with their values, that these keys of a configuration (`section.key`) set."""
    found: dict[str, Any] = {}
    for key in keys:
        section, name, *_ = [*key.partition("=")[0].strip().split("."), ""]  # Of a key below an option, the whole option.
        if field := FIELDS.get(f"{section}.{name}"):
            value = getattr(getattr(config, section), name)
            found[field] = TierChoice(tier=value.tier, fraction=value.fraction) if field in TIERS else value
    if "schedule" in found or "chunks" in found:
        found |= {"schedule": config.parallel.schedule, "chunks": config.parallel.chunks}
    return found


def plan_config(
    config: TrainerConfig,
    given: Sequence[str] = (),
    *,
    inputs: UserInputs | None = None,
    device: str | None = None,
    ranks: int | None = None,
    host: int | None = None,
    more: bool = False,
) -> tuple[Plan, Plan | None]:
    """Plan a configuration, or a trainer with its own model and data (`inputs`), for `ranks` ranks, `host` of them per host;
    layouts keep the keys `given` (`section.key` or `section.key=value`). Returns the plan, and with `more` also that for one more
    rank, or host where ranks fill hosts. Raises `ConfigError`, `DataError` or `LayoutError` for what cannot be planned."""
    machine = machine_here(device, host or min(ranks or 1, _CARDS))
    with closing(subject_of(config, inputs, device=machine.device.kind)) as subject:
        planner = Planner(subject, machine, host=host, fixed=fixed_fields(config, given))
        ranks = ranks or ranks_here(machine)
        plan, after = planner.plan(ranks), None
        each = host or machine.host.devices
        # The number of ranks may divide nothing.
        with suppress(ConfigError):
            after = planner.plan(ranks + (1 if ranks < each else each)) if more else None
    return plan, after


def given_keys(config: TrainerConfig, free: Collection[str] | None = None) -> list[str]:
    """Return the keys that a plan of a trainer keeps: all but `free`, by default the `auto` ones, or all where there are none."""
    free = _auto_keys(config) if free is None else free
    return [key for key in FIELDS if key not in free]


def set_auto(config: TrainerConfig, inputs: UserInputs, launch: LaunchEnvironment) -> tuple[TrainerConfig, Estimate]:
    """Replace `auto` by the values of the fastest plan that fits, and return its estimate. Raises `ConfigError` without one."""
    ranks, host, chosen = launch.world_size, launch.local_world_size, _auto_keys(config)
    parts = ((key, *key.split(".")) for key in FIELDS)
    more = {key for key, section, name in parts if name not in getattr(config, section).model_fields_set}
    for free in dict.fromkeys((chosen, chosen | more)):
        plan, _ = plan_config(config, given_keys(config, free), inputs=inputs, ranks=ranks, host=host)
        if plan.best is not None:
            break
    if plan.best is None:
        cure = f"the least is {plan.least.layout}: {plan.least.why_not}; leave given keys to the plan too, or take more ranks"
        raise ConfigError(f"no layout fits on {counted(ranks, 'rank')}; {cure}", where=", ".join(config.parallel.auto))
    best = plan.best
    note = f"auto: {best.layout}, the first row of the plan (zeromesh plan shows the others)"
    return with_layout(config, best.layout, free).with_notes((*config.notes, note), config.folders), best


def _auto_keys(config: TrainerConfig) -> frozenset[str]:
    automatic = config.parallel.auto
    axes = {f"parallel.{name}" for name in type(config.parallel).model_fields.keys() - config.parallel.model_fields_set}
    axes |= {"zero.replicas"} if "replicas" not in config.zero.model_fields_set else set()
    return frozenset(automatic or FIELDS) | (axes & FIELDS.keys() if "parallel" in automatic else set())


def subject_of(config: TrainerConfig, inputs: UserInputs | None = None, *, device: str = "cpu") -> Subject:
    """Return the subject of a plan, with a trainer's `inputs`. Raises `ConfigError` or `DataError` for what is missing."""
    inputs = inputs or UserInputs()
    named = config.data.tokenizer or (BYTES if config.model.source is None else None)
    tokenizer = None
    if named is not None and inputs.model is None:
        tokenizer = load_tokenizer(named if named == BYTES else directory_of(named, None, TOKENIZER_FILES, where="data.tokenizer"))
    model = build_whole_model(inputs.model, config, tokenizer).model
    loss = loss_of(config, inputs)(model)
    if inputs.train_dataset is None:
        return Subject(model, loss, config, token_batches(config), device=device)
    dataset: Any = inputs.train_dataset
    takes, unused = ForwardInputs.of(model, users_loss=inputs.compute_loss is not None), config.data.remove_unused
    rules = BatchRules(collate=inputs.collate, fields=takes.fields, named=takes.named, unused=unused)
    if is_stream(dataset):
        raise ConfigError("a stream is not read before the run begins; give parallel, zero.stage and batch.micro_size yourself")
    check_dataset(dataset)

    def batches(micro: int) -> dict[str, Any]:
        return rules.accepted(rules.make_batch(dataset, [index % len(dataset) for index in range(micro)]))

    return Subject(model, loss, config, batches, device=device)
