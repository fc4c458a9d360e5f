"""The configuration of a run as a whole; its keys are in `sections/`.

`docs/configuration.md` is generated from these models by `scripts/config_reference.py`. Rules that join several keys are in
`config_rules.py`; `config_file.py` reads files and reports all problems at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml
from pydantic import Field, PrivateAttr, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from zeromesh.trainer.config import cross_checks
from zeromesh.trainer.config.sections.base import Section
from zeromesh.trainer.config.sections.data import BatchSection, DataSection
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.config.sections.outputs import (
    CheckpointSection,
    HubSection,
    ProfileSection,
    RunSection,
    TrackingSection,
)
from zeromesh.trainer.config.sections.parallelism import OffloadSection, ParallelSection, PrecisionSection, ZeroSection
from zeromesh.trainer.config.sections.training import (
    DEFAULT_WARMUP_STEPS,
    EmaSection,
    OptimizerSection,
    ScheduleSection,
    default_warmup,
)
from zeromesh.trainer.config.yaml_reader import plain_scalar


class TrainerConfig(Section):
    """The whole configuration. Every key has a default, so `TrainerConfig()` is the quick-start run."""

    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    zero: ZeroSection = Field(default_factory=ZeroSection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    offload: OffloadSection = Field(default_factory=OffloadSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    ema: EmaSection = Field(default_factory=EmaSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    batch: BatchSection = Field(default_factory=BatchSection)
    run: RunSection = Field(default_factory=RunSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    hub: HubSection = Field(default_factory=HubSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    profile: ProfileSection = Field(default_factory=ProfileSection)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that say what became of the settings of another trainer, where the configuration was made of such."""
        return self._notes

    def with_notes(self, notes: tuple[str, ...]) -> TrainerConfig:
        """The same configuration with other notes, which are no part of what it says."""
        config = self.model_copy()
        config._notes = notes
        return config

    @model_validator(mode="before")
    @classmethod
    def _default_warmup_fits_the_run(cls, data: Any) -> Any:
        """A warm-up that nobody asked for must not outlast a short run."""
        if not isinstance(data, dict):
            return data
        schedule, run = data.get("schedule", {}), data.get("run", {})
        steps = run.get("max_steps") if isinstance(run, dict) else getattr(run, "max_steps", None)
        if type(steps) is not int or not 1 <= steps < DEFAULT_WARMUP_STEPS:
            return data
        if not isinstance(schedule, dict) or "warmup_steps" in schedule:
            return data
        return {**data, "schedule": {**schedule, "warmup_steps": default_warmup(steps)}}

    @model_validator(mode="after")
    def _keys_agree(self, info: ValidationInfo) -> TrainerConfig:
        if (info.context or {}).get("rules", True):
            problems = cross_checks.problems(self)
            if problems:
                raise PydanticCustomError("keys_disagree", "{problems}", {"problems": "\n".join(problems)})
        return self

    def to_yaml(self, change: Callable[[dict[str, Any]], Any] = lambda values: values) -> str:
        """Every key with its value, as YAML that `load_config` reads back to an equal configuration, unless `change` says more."""
        return yaml.dump(change(self.model_dump(mode="json")), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that would be read as something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML folds some line breaks (U+0085) unless they are escaped, which it does in double quotes only.
        style = None if text.isprintable() and plain_scalar(text) == text else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
