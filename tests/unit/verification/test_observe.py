"""What a verification records of a run, and by which bound it differs from the plain process."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.trainer_cases import settings
from zeromesh.errors import ConfigError
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.verification.observe import (
    EXACT,
    Recorder,
    Verification,
    differences_of,
    rank_microbatches,
    relative,
    relative_errors,
)
from zeromesh.trainer.verification.reference import PlainRun

INFINITE = float("inf")
NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "plain", "size"),
    [
        (1.5, 1.5, 0.0),
        (1.0, 2.0, 0.5),
        (-3.0, -2.0, 0.5),
        (0.0, 0.0, 0.0),
        (NAN, 1.0, INFINITE),
        (1.0, NAN, INFINITE),
        (INFINITE, 1.0, INFINITE),
        (1.0, INFINITE, INFINITE),
        (INFINITE, INFINITE, 0.0),
    ],
)
def test_relative_differences(value: float, plain: float, size: float) -> None:
    assert relative(value, plain) == size


@pytest.mark.parametrize(
    ("global_size", "micro", "ranks", "wanted"),
    [(5, 2, 1, [[0, 1, 2]]), (11, 2, 2, [[0, 2, 4], [1, 3, 5]]), (5, 1, 2, [[0, 2, 4], [1, 3]]), (2, 2, 3, [[0], [], []])],
)
def test_microbatches_of_ranks(global_size: int, micro: int, ranks: int, wanted: list[list[int]]) -> None:
    config: Any = SimpleNamespace(batch=SimpleNamespace(global_size=global_size, micro_size=micro))
    meshes: list[Any] = [SimpleNamespace(data_index=rank, data=SimpleNamespace(size=ranks)) for rank in range(ranks)]
    assert [list(rank_microbatches(config, mesh)) for mesh in meshes] == wanted


def run_of(losses: list[float], norms: list[float], weight: list[float], lr: float = 0.0) -> Any:
    config = SimpleNamespace(optimizer=SimpleNamespace(lr=lr))
    weights = {"w": torch.tensor(weight, dtype=torch.float64)}
    return SimpleNamespace(losses=losses, norms=norms, parameters=weights, steps=losses, config=config)


def test_errors_are_relative_to_the_plain_run_and_begin_where_a_run_does() -> None:
    plain = run_of([1.0, 2.0, 4.0], [1.0, 1.0, 2.0], [3.0, 4.0])
    found = list(relative_errors(run_of([2.5, 4.0], [NAN, 3.0], [3.0, 4.5]), plain, first=1))
    assert found == [("loss", 2, "", 0.25), ("loss", 3, "", 0.0), ("norm", 3, "", 0.5), ("parameter", 3, "w", 0.1)]
    small = run_of([1.0, 2.0, 4.0], [1.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0], lr=0.5)
    moved = run_of(small.losses, small.norms, [3.0, 0.0, 0.0, 0.0])
    assert list(relative_errors(moved, small))[-1] == ("parameter", 3, "w", 1.0), "as much as all steps may move it"
    with pytest.raises(ValueError, match="zip"):
        list(relative_errors(run_of([1.0], [1.0], [3.0, 4.0]), plain))
    nearly = run_of([1.0 + EXACT / 2, 2.0 * (1 + 2 * EXACT), NAN], plain.norms, [3.0, 4.0])
    noted = list(differences_of(nearly, plain, run="resume"))
    assert [(each.kind, each.step, each.run, each.detail) for each in noted] == [
        ("loss", 2, "resume", "resume"), ("loss", 3, "resume", "resume")
    ]  # fmt: skip


@pytest.mark.parametrize("saves", [False, True])
def test_a_recorder_stops_a_run(saves: bool) -> None:
    asked: list[Any] = []
    states = {False: torch.ones(2), True: torch.zeros(2)}
    trainer: Any = SimpleNamespace(
        request=lambda **how: asked.append(how),
        state_dict=lambda ema=False: [("w", states[ema])],
        config=SimpleNamespace(precision=SimpleNamespace(compute="float32"), ema=SimpleNamespace(decay=0.5 if saves else 0.0)),
    )
    recorder, ended = Recorder(stop_after=2, saves=saves), list[str]()
    assert not recorder.began
    recorder.on_train_begin(trainer)
    recorder.cleanup.callback(ended.append, "cleanup")
    for step, norm in ((1, 0.5), (2, None), (3, 0.25)):
        recorder.on_step_end(trainer, step, {"loss": torch.tensor(float(step)), "grad_norm": norm})
        assert asked == ([{"save": saves, "stop": True}] if step > 1 else [])
    recorder.on_train_end(trainer)
    assert (recorder.began, recorder.losses, ended) == (True, [1.0, 2.0, 3.0], ["cleanup"])
    assert (recorder.norms[0], math.isnan(recorder.norms[1]), recorder.norms[2]) == (0.5, True, 0.25)
    states[False].zero_()
    assert recorder.parameters["w"].tolist() == [1.0, 1.0]
    assert recorder.average.keys() == ({"w"} if saves else set())


def verification(fit: Any, subject: Any = None) -> Verification:
    class Fake:
        def __init__(self, model: Any, config: Any, samples: Any, *, callbacks: list[Any], **_: Any) -> None:
            self.recorder = callbacks[0]

        def __enter__(self) -> None:
            return None

        def __exit__(self, *_: object) -> None:
            return None

        def fit(self) -> None:
            fit(self.recorder)

    mesh: Any = SimpleNamespace(rank=3)
    subject = subject or SimpleNamespace(model=torch.nn.Linear(1, 1), samples=[], collate=None)
    return Verification(make=Fake, mesh=mesh, config=subject, inputs=UserInputs(), subject=subject)


@pytest.mark.parametrize(
    ("error", "began", "finding"),
    [
        (ConfigError("no"), False, ""),
        (ConfigError("no"), True, "the run ends in step 2, and rank 3 says: ConfigError: no"),
        (RuntimeError("shapes"), False, "the run ends in step 2, and rank 3 says: RuntimeError: shapes"),
        (ValueError("shapes"), False, "the run ends in step 2, and rank 3 says: ValueError: shapes"),
    ],
)
def test_an_error_is_a_finding_unless_the_configuration_is_refused(error: Exception, began: bool, finding: str) -> None:
    cleaned: list[str] = []

    def fit(recorder: Recorder) -> None:
        recorder.began, recorder.losses = began, [1.0]
        recorder.cleanup.callback(cleaned.append, "cleanup")
        print("nothing of this is shown")
        raise error

    made = verification(fit)
    with pytest.raises(type(error)):
        made.run(made.config, Recorder())
    assert [(each.kind, each.step, each.detail) for each in made.differences] == ([("error", 2, finding)] if finding else [])
    assert (made.failed, cleaned) == (error if finding else None, ["cleanup"])


@pytest.mark.parametrize(("factor", "found"), [(1.0, False), (1.02, False), (1.1, True)])
def test_a_run_in_the_user_s_precision_may_round_as_a_plain_one(factor: float, found: bool) -> None:
    """In bfloat16, whose tolerance of 8 epsilons is 1/16, and not in the kind that the run computes rightly."""
    narrow = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}
    config = load_config(settings("out", precision=narrow, batch={"global_size": 2}, run={"max_steps": 1}))
    rows = [{"x": torch.tensor([float(n), 1.0])} for n in range(2)]
    subject = SimpleNamespace(model=torch.nn.Linear(2, 1), config=config, samples=rows, collate=None)

    def loss(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return (model(batch["x"]).float() ** 2).sum() + 8.0, 2

    def fit(recorder: Recorder) -> None:
        made.recorder, plain = recorder, made.passes_plain
        recorder.losses = [each * factor for each in plain.losses]
        recorder.norms, recorder.parameters = plain.norms, plain.parameters

    made: Any = verification(fit, subject)
    made.inputs = UserInputs(compute_loss=loss)
    made.passes_plain = PlainRun(subject, config, made.inputs).train()  # type: ignore[arg-type]
    made.user_precision_pass()
    assert [(each.kind, each.run) for each in made.differences] == [("rounding", "own precision")] * found
    assert made.passes["bfloat16"].bound >= 1 / 16
