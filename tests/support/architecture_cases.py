"""Training the architectures: by the trainer on several ranks, and by a plain loop in one process, with the model's own loss."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support.architectures import ARCHITECTURES, model_of
from tests.support.plain import apart, compare, error_of, fitted, plain_fit, stacked
from tests.support.tasks import SAMPLES as ROWS
from tests.support.tasks import SPEECH, TASKS, spoken
from tests.support.trainer_cases import lines_of, seeded, settings
from zeromesh import Trainer
from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.models.small_copy import InFloat64

STEPS = 5
SAMPLES = 17
EPSILON = 1e-6
"""Of AdamW. Some gradients are zero but for rounding (an answer's bias moves all scores of a softmax alike), and AdamW with
its usual epsilon of 1e-8 makes of 1e-17, which is another on every machine, what can be seen."""


Mean = Callable[[torch.Tensor, int], torch.Tensor]
"""What a model gives for a batch of so many samples, and the mean that this is."""


def differences(
    folder: str,
    name: str,
    pair: tuple[Any, Any],
    data: Sequence[Any],
    mean: Mean = lambda loss, count: loss,
    after: Callable[[Trainer], object] = lambda trainer: None,
    **sections: Mapping[str, Any],
) -> dict[str, float]:
    """How far the trainer's run of one of two equal models is from the plain one of the other. `after` is called at its end."""
    mine, reference = pair
    sizes = {
        "batch": {"global_size": 10, "micro_size": 2},
        "run": {"name": name, "max_steps": STEPS},
        "optimizer": {"eps": EPSILON},
    }
    config = settings(folder, **{**sizes, **sections})
    with InFloat64():
        held, size = data[:7], config["batch"]["global_size"]
        plain = plain_fit(reference.train(), data, config, lambda model, batch: (mean(model(**batch).loss, size), 1))
        found, report = compare(mine, config, data, plain, eval_dataset=held, after=after)
        with torch.no_grad():
            wanted = float(mean(reference.eval()(**stacked(held, range(len(held)))).loss, len(held)))
    norms = [line["grad_norm"] for line in lines_of(Path(folder) / name)]
    return {**found, "norms": apart(norms, plain.norms), "evaluation": apart([report.eval_loss or 0.0], [wanted])}


def seeded_pair(build: Any) -> tuple[Any, Any]:
    """Two models with the same weights."""
    return seeded(build), seeded(build)


def trained(mesh: Mesh, folder: str, name: str, stage: int) -> dict[str, float]:
    subject = ARCHITECTURES[name]
    data = subject.samples(SAMPLES)
    return differences(folder, f"{name}-{stage}", seeded_pair(subject.build), data, zero={"stage": stage})


def _rows(batch: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: values[index] for name, values in batch.items()} for index in range(ROWS)]


def task(mesh: Mesh, folder: str, name: str) -> None:
    """One of the tasks, without dropout, trains as in one process."""
    subject = TASKS[name]
    rows = _rows(subject.batch())
    pair = seeded_pair(lambda: _without_randomness(model_of(subject.config, subject.head)))
    found = differences(folder, "task", pair, [*rows, *rows[::-1]], mean=subject.mean)
    assert all(value <= 1e-9 for value in found.values()), found


def _without_randomness(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if hasattr(module, "config"):
            module.config.apply_spec_augment = False
            module.config.layerdrop = 0.0
    return model


def masked_sounds(mesh: Mesh, folder: str) -> dict[str, Any]:
    """A model of speech that masks what it hears, at random, with and without that."""
    found: dict[str, Any] = {}
    shaken = {"mask_time_prob": 0.4, "mask_time_length": 2, "layerdrop": 0.0, "hidden_dropout": 0.1}
    for name, masked in (("losses", True), ("without", False)):
        config = {**SPEECH, **shaken, "apply_spec_augment": masked, "ctc_loss_reduction": "mean"}
        model, _ = seeded_pair(lambda config=config: model_of(config, "ctc"))
        np.random.seed(3 * mesh.world_size + mesh.rank)
        before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
        run = settings(folder, run={"name": name, "max_steps": 3})
        with InFloat64(), Trainer(model, run, _rows(spoken())) as trainer:
            found[name] = trainer.fit().losses
        found["untouched"] = np.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr]
    return found


def left_out(mesh: Mesh, folder: str) -> str:
    """A model that leaves layers out; why it is refused, or nothing."""
    config = {**SPEECH, "layerdrop": 0.5, "ctc_loss_reduction": "mean"}
    given = model_of(config, "ctc"), settings(folder, run={"max_steps": 2}), _rows(spoken())
    return error_of(partial(fitted, *given), ConfigError)
