"""Cases of steps that are judged before their update, which workers run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers as tf
from torch.utils.data import IterableDataset

from tests.support.plain import apart, calling, distance, error_of, plain_loop, sentence_loss, stacked
from tests.support.trainer_cases import gpt2, seeded, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.data.sampler import SampleOrder
from zeromesh.trainer.monitoring.step_metrics import read_metrics
from zeromesh.trainer.setup import model as setup

STEPS, SIZE, COUNT = 9, 8, 80
NAN_BITS, HIGH, LOW = 64, 62, 3  # bits of a float64: of the exponent, and of a mantissa so low that no figure shows it
SPIKE, NAN, BAD_STEP = (63, 62, 5)  # first tokens of samples whose loss is too large or no number, and the step that has one


def model(dropout: float = 0.0) -> Any:
    return gpt2(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)


def data(*poison: int, step: int = BAD_STEP) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """Samples, of which one in a step (from 0) begins with each token of `poison`; and those of that step."""
    found, order = sentences(COUNT), SampleOrder(length=COUNT, seed=5)
    for each in found:
        each["input_ids"][0] = 1
    rows = [order.dataset_index(number) for number in range(step * SIZE, (step + 1) * SIZE)]
    for number, token in enumerate(poison):
        found[rows[3 + number]]["input_ids"][0] = token
    return found, sorted(rows)


def loss(model: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    total, count = sentence_loss(model, dict(batch))
    first = batch["input_ids"][:, 0]
    return total * (1 + 1e4 * (first == SPIKE).any()) * (torch.nan if (first == NAN).any() else 1.0), count


def plain(found: list[dict[str, torch.Tensor]], without: tuple[int, ...], *, steps: int = STEPS, shuffled: bool = True) -> Any:
    """A loop of one process that leaves out the data of steps `without`."""
    trained = seeded(model).double().train()
    order = SampleOrder(length=COUNT, seed=5)
    places = [[step * SIZE + n for n in range(SIZE)] for step in range(steps) if step not in without]
    rows = [[order.dataset_index(each) if shuffled else each for each in numbers] for numbers in places]
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

    def mean(model: Any, batch: Any) -> torch.Tensor:
        total, count = loss(model, batch)
        return total / count

    schedule = tf.get_scheduler("linear", optimizer, 1, steps)
    return plain_loop(trained, (stacked(found, each) for each in rows), mean, optimizer, clip_norm=0.5, schedule=schedule)


def config(folder: str, recovery: Mapping[str, Any], **sections: Mapping[str, Any]) -> dict[str, Any]:
    given = settings(folder, **sections)
    given["run"] |= {"max_steps": STEPS, **sections.get("run", {})}
    return {**given, "recovery": {"spike_factor": 4.0, "spike_window": 3, **recovery}}


def passed_over(mesh: Mesh, folder: str, token: int = SPIKE, *, computed_again: bool = True, **sections: Mapping[str, Any]) -> None:
    """Data of a step with a spike, or without a number as loss, are passed over as in a loop that leaves them out."""
    found, rows = data(token)
    wanted = plain(found, (BAD_STEP,))
    with Trainer(seeded(model), config(folder, {}, **sections), found, compute_loss=loss) as trainer:
        report = trainer.fit()
        assert apart(report.losses, wanted.losses) <= 1e-9
        assert distance(dict(trainer.state_dict()), wanted.states[-1]) <= 1e-9
    assert (report.passed_over, report.final_step, report.skipped_steps) == (1, STEPS - 1, 0)
    if mesh.rank == 0:
        lines = read_metrics(Path(folder) / "run" / "metrics.jsonl")
        ((line, (act,)),) = [(line["step"], line["judged"]) for line in lines if "judged" in line]
        assert (line, act["act"], act["data_step"], act["samples"]) == (BAD_STEP + 1, "pass_over", BAD_STEP, rows)
        assert act.get("bits") == ("are equal on all ranks" if computed_again else None)


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    """A result `[batch, sequence, features]` with one bit of an element flipped, whose gradient stays as it is."""
    wrong = tensor.detach().clone()
    if bit == NAN_BITS:
        wrong[-1, -2, 0] = torch.nan
    else:
        wrong[-1, -2, :1].view(torch.int64).bitwise_xor_(1 << bit)
    return torch.where(wrong == tensor.detach(), tensor, wrong)


class Faulty(Callback):
    """Flips a bit of a result of the model on one rank from the step `at` on, `times` so often."""

    def __init__(self, model: Any, bit: int, at: int, times: int = 1 << 30) -> None:
        self.step, self.left, self.bit, self.at = 0, times, bit, at
        (model.lm_head if bit >= HIGH else model.transformer.h[0].mlp).register_forward_hook(self.flip)

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        self.step = step

    def flip(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self.step < self.at or not self.left or not torch.is_grad_enabled():
            return None
        self.left -= 1
        return flipped(output, self.bit)


def errors_of(mesh: Mesh, folder: str, odd: int, bit: int, times: int = 1 << 30, recovery: Any = None, **sections: Any) -> str:
    """The error of a run in which a rank computes wrongly from step 6 on."""
    trained = seeded(lambda: model(0.1))
    faults = [Faulty(trained, bit, 6, times)] if mesh.rank == odd else [Faulty(trained, 0, 1 << 30)]
    given = config(folder, recovery or {}, **sections)
    with Trainer(trained, given, data()[0], compute_loss=loss, callbacks=faults) as trainer:
        return error_of(trainer.fit)


def named(mesh: Mesh, folder: str, odd: int, bit: int, why: str, group: str = "", **named: Any) -> None:
    """The rank that computes wrongly is named on all ranks, and is the one that ends by it."""
    error = errors_of(mesh, folder, odd, bit, **named)
    ranks = group or f"rank {odd}"
    ends = "MachineError" if str(mesh.rank) in ranks else "CollectiveError"
    assert error.startswith(f"{ends}: {ranks} computes wrongly: {why}"), repr(error)


def unclear(mesh: Mesh, folder: str) -> None:
    """Of two ranks none can be outvoted."""
    error = errors_of(mesh, folder, 1, HIGH)
    assert error.startswith("MachineError: the "), error
    assert "no two outvote one" in error


def equal_with_random_numbers(mesh: Mesh, folder: str, **sections: Any) -> None:
    """Audits find equal bits, with dropout too, and change no number."""
    losses = []
    for name, recovery in (("with", {"audit_steps": 2}), ("without", {})):
        given = config(folder, {"spike_factor": 0.0, **recovery}, **sections)
        given["run"]["name"] = name
        with Trainer(seeded(lambda: model(0.1)), given, data()[0]) as trainer:
            losses.append(trainer.fit().losses)
    assert losses[0] == losses[1]


def rewound(mesh: Mesh, folder: str, *, stream: bool = False, interrupted: bool = False, **sections: Any) -> None:
    """A spike that lasts is left by going back to a checkpoint, and equals a loop that has never seen the data since then."""
    found, _ = data(SPIKE, step=6)
    order = SampleOrder(length=COUNT, seed=5)
    found[order.dataset_index(7 * SIZE + 1)]["input_ids"][0] = SPIKE
    if stream:  # in the order of a dataset
        found = [found[order.dataset_index(number)] for number in range(COUNT)]
    given = config(folder, {"rewind_steps": 2}, **{"checkpoint": {"every_steps": 2}, **sections})
    given["run"] |= {"max_steps": 10, "max_nonfinite": 2}
    wanted = plain(found, (4, 5, 6, 7), steps=10, shuffled=not stream)
    heard: list[int] = []

    def end(trainer: Trainer, step: int, metrics: Any) -> None:
        heard.append(step)
        if interrupted and len(heard) == 7:
            raise OSError("the power is out")

    kept = Stream(found) if stream else found
    if interrupted:
        with Trainer(seeded(model), given, kept, compute_loss=loss, callbacks=[calling(on_step_end=end)]) as trainer:
            assert "the power is out" in error_of(trainer.fit)
    with Trainer(seeded(model), given, kept, compute_loss=loss, callbacks=[calling(on_step_end=end)]) as trainer:
        report = trainer.fit()
        assert heard == [1, 2, 3, 4, 5, 6, 5, *([5] if interrupted else []), 6], heard
        assert (report.final_step, report.skipped_steps) == (6, 0)
        assert report.passed_over == (0 if interrupted else 4)
        assert apart(report.losses, wanted.losses[4 if interrupted else 0 :]) <= 1e-12
        assert distance(dict(trainer.state_dict()), wanted.states[-1]) <= 1e-12
    if mesh.rank == 0:
        run = Path(folder) / "run"
        lines = read_metrics(run / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        (line,) = read_metrics(run / "recoveries.jsonl")
        assert (line["step"], line["lost_steps"], line["source"]) == (6, 2, "checkpoint of step 4")
        if not interrupted:
            *spikes, act = lines[4]["judged"]
            assert [each["data_step"] for each in spikes] == [6, 7]
            assert (act["act"], act["data_step"], len(act["samples"])) == ("rewind", 4, 4 * SIZE)


def not_rewound(mesh: Mesh, folder: str) -> None:
    """A run that has no checkpoint that is old enough ends by the spike, as one does that has gone back three times."""
    found, _ = data(SPIKE, step=5)
    given = config(folder, {"rewind_steps": 4}, checkpoint={"every_steps": 2})
    given["run"] |= {"max_nonfinite": 1}
    with Trainer(seeded(model), given, found, compute_loss=loss) as trainer:
        error = error_of(trainer.fit)
    assert error.startswith("NonFiniteError: data were suspicious in 1 step in a row, up to step 5"), error
    assert "no checkpoint is old enough to go back 4 steps" in error, error
    order = SampleOrder(length=COUNT, seed=5)
    for step in (6, 7, 8):
        found[order.dataset_index(step * SIZE)]["input_ids"][0] = SPIKE
    given["run"] |= {"name": "often"}
    given["recovery"] |= {"rewind_steps": 1, "spike_window": 2}
    given["checkpoint"] |= {"every_steps": 1, "keep_last": 0}
    with Trainer(seeded(model), given, found, compute_loss=loss) as trainer:
        error = error_of(trainer.fit)
    assert "the run has gone back 3 times already" in error, error


def acts(mesh: Mesh, folder: str, act: str) -> None:
    """A spike is accepted, ends the run, or is one too many; a loss that is no number is left to `run.on_nonfinite` by an audit."""
    token = NAN if act == "on_nonfinite" else SPIKE
    found, rows = data(token)
    if act == "on_nonfinite":
        given = config(folder, {"spike_factor": 0.0, "audit_steps": 100})
    elif act == "max_nonfinite":
        given = config(folder, {}, run={"max_nonfinite": 1})
    else:
        given = config(folder, {"on_spike": act})
    with Trainer(seeded(model), given, found, compute_loss=loss) as trainer:
        if act == "max_nonfinite":
            assert "suspicious in 1 step in a row, up to step 5" in error_of(trainer.fit)
            return
        if act == "stop":
            error = error_of(trainer.fit)
            assert error.startswith("NonFiniteError: the loss "), error
            assert f"in samples {rows[0]}, {rows[1]}" in error
            assert "bits are equal on all ranks" in error
            return
        report = trainer.fit()
    assert (report.final_step, report.passed_over, report.skipped_steps) == (STEPS, 0, int(act == "on_nonfinite"))
    if act == "accept":
        usual = config(folder, {"spike_factor": 0.0})
        usual["run"]["name"] = "usual"
        with Trainer(seeded(model), usual, found, compute_loss=loss) as trainer:
            assert trainer.fit().losses == report.losses, "to the bit: the gradients are those of the own microbatches"
    if mesh.rank == 0:
        told = [each for line in read_metrics(Path(folder) / "run" / "metrics.jsonl") for each in line.get("judged", [])]
        assert [(each["act"], each["data_step"]) for each in told] == [(act, BAD_STEP)]


def resumed(mesh: Mesh, folder: str) -> None:
    """A run that goes on from a checkpoint judges as if it had not been interrupted: it knows the latest accepted steps."""
    found, _ = data(SPIKE)

    def end(trainer: Trainer, step: int, metrics: Any) -> None:
        if step == 4:
            raise OSError("the power is out")

    given = config(folder, {}, checkpoint={"every_steps": 3, "asynchronous": False})
    with Trainer(seeded(model), given, found, compute_loss=loss, callbacks=[calling(on_step_end=end)]) as trainer:
        assert "the power is out" in error_of(trainer.fit)
    with Trainer(seeded(model), given, found, compute_loss=loss) as trainer:
        report = trainer.fit()
    assert (report.final_step, report.passed_over) == (STEPS - 1, 1)
    assert apart(report.losses, plain(found, (BAD_STEP,)).losses[3:]) <= 1e-9


def refused(mesh: Mesh, folder: str) -> None:
    found, _ = data()
    given = config(folder, {"audit_steps": 3})
    if mesh.world_size == 1:
        with Trainer(seeded(model), given, found) as trainer:
            assert error_of(trainer.fit).startswith("ConfigError: recovery.audit_steps: a microbatch with one data rank")
        # In a later start others have been lost.
        with mock.patch.object(setup, "number_of_start", return_value=1), Trainer(seeded(model), given, found) as trainer:
            assert trainer.fit().final_step == STEPS
        return
    kept = seeded(model)
    kept.register_buffer("running", torch.zeros(3))
    with Trainer(kept, given, found) as trainer:
        assert error_of(trainer.fit).startswith(
            "ConfigError: recovery.audit_steps: a forward that is not counted may change running"
        )
    stream = Stream(found)
    with Trainer(seeded(model), given, stream) as trainer:
        assert error_of(trainer.fit).startswith("ConfigError: recovery.audit_steps: a microbatch of a stream")


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)
