"""Dynamic loss scale for float16 gradients, as in Micikevicius et al., "Mixed Precision Training", 2018."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalerSettings:
    """`initial` scale; halved at an overflow, doubled after `growth_interval` steps without one."""

    initial: float = 65536.0
    growth_interval: int = 2000
    growth: float = 2.0
    backoff: float = 0.5
    smallest: float = 1.0


class LossScaler:
    """The present scale. With settings None it is 1 for ever."""

    def __init__(self, settings: ScalerSettings | None) -> None:
        self._settings = settings
        self.scale = settings.initial if settings else 1.0
        self.good_steps = 0
        """Steps without an overflow since the scale has changed."""

    @property
    def dynamic(self) -> bool:
        return self._settings is not None

    def load(self, scale: float, good_steps: int) -> None:
        """Go on from an earlier run's. A scale that is fixed here stays."""
        if self._settings is not None:
            self.scale, self.good_steps = scale, good_steps

    def update(self, *, overflow: bool) -> None:
        """Learn from a step; all ranks call it with the same verdict."""
        settings = self._settings
        if settings is None:
            return
        if overflow:
            self.scale = max(settings.smallest, self.scale * settings.backoff)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == settings.growth_interval:
            self.scale *= settings.growth
            self.good_steps = 0
