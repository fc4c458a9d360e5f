"""Plans of configurations, and what `auto` becomes: the keys of a layout from those of a configuration, and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from zeromesh.environment import LaunchEnvironment, available_cores
from zeromesh.errors import ConfigError
from zeromesh.offload import TierChoice, accelerator
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import BatchRules, is_library
from zeromesh.trainer.data.streaming import is_stream
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.models.adapters import add_lora
from zeromesh.trainer.models.user_model import ForwardInputs
from zeromesh.trainer.planning.estimate import Estimate, Estimator
from zeromesh.trainer.planning.layouts import NAMES, Layout
from zeromesh.trainer.planning.machine import Machine, find_machine, shipped
from zeromesh.trainer.planning.planner import Plan, Planner
from zeromesh.trainer.planning.subject import Subject, tokens_of
from zeromesh.trainer.setup.model import build_whole_model

FIELDS: dict[str, str] = {key: key.rpartition(".")[2] for key in dict(Layout().keys())} | {
    "zero.stage": "stage",
    "batch.micro_size": "micro",
    "model.activation_checkpointing": "recompute",
}
"""The field of a layout for each key of a configuration that it decides."""


def machine_here(name: str | None) -> Machine:
    """The machine of a name or a file; without one that which was measured here, or the one that has this host's accelerators.

    Raises:
        ConfigError: for a machine that is not known.
    """
    if name is None and accelerator.found() is not None:
        device = accelerator.device_name(accelerator.begin()[0]).lower()
        name = next((each for each in shipped() if each in device), None)
    return find_machine(name)


def ranks_here(machine: Machine) -> int:
    """Accelerators of this host, or else its cores; of another kind of machine, the ranks of one host."""
    if machine.is_cpu:
        return available_cores()
    return len(accelerator.begin()) if accelerator.found() is not None else machine.host.devices


def fixed_fields(config: TrainerConfig, keys: Sequence[str]) -> dict[str, Any]:
    """Fields of a layout that a configuration decides by these keys."""
    found: dict[str, Any] = {}
    for key in keys:
        field = FIELDS.get(key.partition("=")[0].strip())
        if field in NAMES:
            section, _, name = key.partition("=")[0].strip().partition(".")
            value = getattr(getattr(config, section), name)
            tiers = field in ("optimizer", "parameters", "activations")
            found[field] = TierChoice(tier=value.tier, fraction=value.fraction) if tiers else value
    if "schedule" in found or "chunks" in found:
        found |= {"schedule": config.parallel.schedule, "chunks": config.parallel.chunks}
    return found


def plan_config(
    config: TrainerConfig,
    given: Sequence[str] = (),
    *,
    device: str | None = None,
    ranks: int | None = None,
    host: int | None = None,
    more: bool = False,
) -> tuple[Plan, Plan | None, Estimator]:
    """Plan a configuration; `given` are keys (`section.key` or `section.key=value`) that every layout is to have as it says.

    Returns the plan; with `more` that of one rank more, or of one host more where ranks fill hosts; and what estimates layouts.

    Raises:
        ConfigError, DataError, LayoutError: for a model, a machine or ranks that cannot be planned.
    """
    machine = machine_here(device)
    subject = Subject.of(config, device=machine.device.kind)
    planner = Planner(subject, machine, host=host, fixed=fixed_fields(config, given))
    ranks = ranks or ranks_here(machine)
    plan, after = planner.plan(ranks), None
    each = host or machine.host.devices
    # So many ranks may divide nothing.
    with suppress(ConfigError):
        after = planner.plan(ranks + (1 if ranks < each else each)) if more else None
    return plan, after, Estimator(subject, machine, each)


_AXES = ("pipeline", "replicate", "shard", "tensor", "sequence", "schedule", "chunks")


def settle(config: TrainerConfig, inputs: UserInputs, environment: LaunchEnvironment) -> tuple[TrainerConfig, Estimate]:
    """Give what is automatic the values of the fastest plan that fits, with the estimate of that.

    Raises:
        ConfigError: where no layout fits, and for a model or a machine that cannot be planned.
    """
    automatic = config.parallel.auto
    plan = plan_inputs(config, inputs, environment.world_size, host=environment.local_world_size)
    if plan.best is None:
        least = min(plan.rows, key=lambda row: row.estimate.device_bytes)
        raise ConfigError(
            f"no layout fits on {environment.world_size} ranks; the least is {least.estimate.layout}: {least.lacks}; leave "
            "other keys to the plan too, or take more ranks",
            where=", ".join(automatic),
        )
    best = plan.best.estimate
    return with_layout(config, best.layout, _free(config)), best


def plan_inputs(
    config: TrainerConfig, inputs: UserInputs, ranks: int, *, host: int | None = None, device: str | None = None
) -> Plan:
    """Plan a trainer with its own model and data for so many ranks, `host` of them on each host.

    Raises:
        ConfigError, LayoutError: for a model, a machine or ranks that cannot be planned.
    """
    machine = machine_here(device)
    subject = subject_of(config, inputs, device=machine.device.kind)
    try:
        free = _free(config)
        fixed = fixed_fields(config, [key for key in FIELDS if key not in free])
        return Planner(subject, machine, host=host, fixed=fixed).plan(ranks)
    finally:
        subject.close()


def _free(config: TrainerConfig) -> set[str]:
    """The keys that a plan may choose: those that are automatic, or all where none is."""
    automatic = config.parallel.auto
    if not automatic:
        return set(FIELDS)
    axes = {f"parallel.{name}" for name in _AXES if name not in config.parallel.model_fields_set}
    return (axes if "parallel" in automatic else set()) | set(automatic)


def with_layout(config: TrainerConfig, layout: Layout, free: Collection[str]) -> TrainerConfig:
    """The configuration with the keys of `free` as a layout has them, and nothing automatic any more."""
    changes: dict[str, dict[str, Any]] = {"parallel": {"auto": ()}}
    for key, value in layout.keys().items():
        if key in free:
            section, _, name = key.partition(".")
            changes.setdefault(section, {})[name] = value
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    note = f"auto: {layout}, the first row of the plan (zeromesh plan shows the others)"
    return config.model_copy(update=sections).with_notes((*config.notes, note))


def subject_of(config: TrainerConfig, inputs: UserInputs, *, device: str) -> Subject:
    """Return the subject of a plan for a trainer: its own model and data where it was given some.

    Raises:
        ConfigError, DataError: for a model or data that cannot be had.
    """
    if inputs.model is None and inputs.train_dataset is None:
        return Subject.of(config, device=device)
    built = build_whole_model(inputs.model, config, None)
    if config.model.lora is not None:
        built = add_lora(built, config.model.lora, config.model.head, config.run.seed)
    mode, smoothing = config.model.loss, config.run.label_smoothing
    loss = make_loss(built.model, mode=mode, compute_loss=inputs.compute_loss, smoothing=smoothing)
    if inputs.train_dataset is None:
        return Subject(built.model, loss, config, tokens_of(config), device=device)
    dataset: Any = inputs.train_dataset
    forward = ForwardInputs.of(built.model, users_loss=inputs.compute_loss is not None)
    rules = BatchRules(
        collate=inputs.collate,
        fields=forward.fields,
        reduced=partial(forward.reduced, unused=config.data.remove_unused, library=is_library(inputs.collate)),
    )
    if is_stream(dataset):
        raise ConfigError(
            "a stream is not read before the run begins; give parallel, zero.stage and batch.micro_size yourself"
        )

    def batches(micro: int) -> dict[str, Any]:
        batch = rules.make_batch(dataset, [index % len(dataset) for index in range(micro)])
        left_out = forward.left_out(batch)
        return {name: value for name, value in batch.items() if name not in left_out}

    return Subject(built.model, loss, config, batches, device=device)
