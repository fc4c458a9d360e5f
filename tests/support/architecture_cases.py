"""Training the architectures: by the trainer on several ranks, and by a plain loop in one process, with the model's own loss."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import nn

from tests.support.architectures import ARCHITECTURES
from tests.support.tasks import SAMPLES as ROWS
from tests.support.tasks import SPEECH, TASKS, spoken
from tests.support.trainer_cases import Plain, apart, distance, lines_of, settings, stacked
from zeromesh import Callback, Trainer
from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.sections.model import AUTO_CLASSES
from zeromesh.trainer.data.sampler import SampleOrder
from zeromesh.trainer.models.small_copy import InFloat64

STEPS = 5
SAMPLES = 17
EPSILON = 1e-6
"""Of AdamW. Some gradients are zero but for rounding (an answer's bias moves all scores of a softmax alike), and AdamW with
its usual epsilon of 1e-8 makes of 1e-17, which is another on every machine, what can be seen."""


Mean = Callable[[torch.Tensor, int], torch.Tensor]
"""What a model gives for a batch of so many samples, and the mean that this is."""


def plainly_trained(
    model: Any, data: Sequence[Mapping[str, torch.Tensor]], config: Mapping[str, Any], mean: Mean
) -> Plain:
    """Train as torch's users do: the global batch at once, in float64."""
    run, size, found = config["run"], config["batch"]["global_size"], Plain()
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.1)
    schedule = tf.get_scheduler("linear", optimizer, 1, run["max_steps"])
    order = SampleOrder(length=len(data), seed=run["seed"])
    for step in range(run["max_steps"]):
        batch = stacked(data, [order.dataset_index(index) for index in range(step * size, (step + 1) * size)])
        loss = mean(model(**batch).loss, size)
        loss.backward()
        found.losses.append(float(loss.detach()))
        found.gradients.append(
            {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}
        )
        found.norms.append(float(nn.utils.clip_grad_norm_(trained.values(), run["clip_norm"])))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


class Watch(Callback):
    """Compares every gradient of every step."""

    def __init__(self, plain: Plain) -> None:
        self.plain, self.worst = plain, 0.0

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        wanted = self.plain.gradients[step - 1]
        found = {name: trainer.gradient(name) for name in wanted}
        self.worst = max(self.worst, distance({name: g for name, g in found.items() if g is not None}, wanted))


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
        plain = plainly_trained(reference.train(), data, config, mean)
        watch, held = Watch(plain), data[:7]
        with Trainer(mine, config, data, held, callbacks=[watch]) as trainer:
            report = trainer.fit()
            after(trainer)
        with torch.no_grad():
            wanted = float(mean(reference.eval()(**stacked(held, range(len(held)))).loss, len(held)))
    return {
        "losses": apart(report.losses, plain.losses),
        "norms": apart([line["grad_norm"] for line in lines_of(Path(folder) / name)], plain.norms),
        "gradients": watch.worst,
        "parameters": distance(dict(mine.named_parameters()), dict(reference.named_parameters())),
        "evaluation": apart([report.eval_loss or 0.0], [wanted]),
    }


def seeded_pair(build: Any) -> tuple[Any, Any]:
    """Two models with the same weights."""
    made = []
    for _ in range(2):
        torch.manual_seed(11)
        made.append(build())
    return made[0], made[1]


def trained(mesh: Mesh, folder: str, name: str, stage: int) -> dict[str, float]:
    """One of the fifteen."""
    subject = ARCHITECTURES[name]
    data = subject.samples(SAMPLES)
    return differences(folder, f"{name}-{stage}", seeded_pair(subject.build), data, zero={"stage": stage})


def _rows(batch: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: values[index] for name, values in batch.items()} for index in range(ROWS)]


def _built(config: Mapping[str, Any], head: str) -> Any:
    values = dict(config)
    made = tf.AutoConfig.for_model(values.pop("model_type"), **values)
    return getattr(tf, AUTO_CLASSES[head]).from_config(made, trust_remote_code=False)  # type: ignore[index]


def task(mesh: Mesh, folder: str, name: str) -> dict[str, float]:
    """One of the tasks, without dropout."""
    subject = TASKS[name]
    rows = _rows(subject.batch())
    pair = seeded_pair(lambda: _without_randomness(_built(subject.config, subject.head)))
    return differences(folder, "task", pair, [*rows, *rows[::-1]], mean=subject.mean)


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
        model, _ = seeded_pair(lambda config=config: _built(config, "ctc"))
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
    try:
        with Trainer(_built(config, "ctc"), settings(folder, run={"max_steps": 2}), _rows(spoken())) as trainer:
            trainer.fit()
    except ConfigError as error:
        return str(error)
    return ""
