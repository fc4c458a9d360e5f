"""The plain process that a layout is compared with, itself compared with loops written out by hand."""

import math
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn.functional import cross_entropy

from tests.support.architectures import tiny
from tests.support.trainer_cases import LLAMA, WIDE, gpt2, llama, settings
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.verification.reference import PlainRun, batches_of, count_of, loss_sum, tensors_of
from zeromesh.trainer.verification.shrink import SmallRun

SAMPLES = [{"x": torch.tensor([float(n % 5), 1.0, n / 7]), "y": torch.tensor(float(n % 3))} for n in range(13)]
BERT = tf.BertConfig(
    num_labels=3, **{name: LLAMA[name] for name in ("hidden_size", "intermediate_size", "vocab_size")},
    num_hidden_layers=1, num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
BATCH = {"global_size": 5, "micro_size": 2}


class Scaled(nn.Module):
    """A model with a weight, a bias and a scale that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)[:, 0] * self.scale


def squares(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """The sum of squares, of which the first sample of three counts twice."""
    weights = 1 + (batch["y"] == 0).int()
    return ((model(batch["x"]) - batch["y"]) ** 2 * weights).sum(), int(weights.sum())


def plain(compute_loss: Any = squares, **sections: Any) -> PlainRun:
    how = {"batch": BATCH, "schedule": {"name": "constant", "warmup_steps": 0}, **sections}
    how["run"] = {"max_steps": 4, "clip_norm": 0.0, **sections.get("run", {})}
    config = load_config(settings("out", **how))
    subject = SmallRun(model=Scaled(), config=config, samples=SAMPLES, collate=None, notes=())
    return PlainRun(subject, config, UserInputs(compute_loss=compute_loss))


def rows_of(step: int) -> list[dict[str, torch.Tensor]]:
    return [SAMPLES[number % 13] for number in range(5 * step, 5 * step + 5)]


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("average", ["tokens", "samples"])
@pytest.mark.parametrize("name", ["constant", "linear"])
def test_a_plain_run_is_a_loop_written_out(clip: float, average: str, name: str) -> None:
    sections: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.5, "exempt": "biases_and_norms"}}
    warmup = 2 if name == "linear" else 0
    sections |= {"batch": {**BATCH, "average": average}, "schedule": {"name": name, "warmup_steps": warmup}}
    found = plain(**sections, run={"clip_norm": clip}, ema={"decay": 0.75, "start_step": 2, "every_steps": 2})
    found.train([1])
    model, shadow = Scaled().double(), dict[str, torch.Tensor]()
    weight, bias = model.linear.weight, model.linear.bias
    rates = [0.0, 0.05, 0.1, 0.05] if name == "linear" else [0.1] * 4
    for step, rate in enumerate(rates):
        rows = rows_of(step)
        parts = [squares(model, {"x": x.double()[None], "y": y[None]}) for x, y in (row.values() for row in rows)]
        if average == "samples":
            groups = [parts[0:2], parts[2:4], parts[4:]]
            loss = sum((len(each) / 5 * sum(a for a, _ in each) / sum(n for _, n in each) for each in groups), torch.tensor(0.0))
        else:
            loss = sum((a for a, _ in parts), torch.tensor(0.0)) / sum(n for _, n in parts)
        gradients = torch.autograd.grad(loss, [weight, bias])
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradients))
        assert found.steps[step].loss == pytest.approx(float(loss), rel=1e-12)
        assert found.norms[step] == pytest.approx(norm, rel=1e-12)
        assert torch.allclose(found.steps[step].gradients["linear.weight"], gradients[0], rtol=1e-12)
        assert [len(each) for each in found.steps[step].outputs] == [0, 1, 0]
        with torch.no_grad():
            for parameter, gradient, decay in zip((weight, bias), gradients, (0.5, 0.0), strict=True):
                clipped = gradient * min(1.0, (clip or math.inf) / (norm + 1e-6))
                parameter -= rate * (clipped + decay * parameter)
            assert torch.allclose(found.steps[step].parameters["linear.weight"], weight, rtol=1e-10)
            assert torch.allclose(found.steps[step].parameters["linear.bias"], bias, rtol=1e-10)
            if step in (1, 3):
                now = weight.detach().clone()
                shadow["w"] = now if "w" not in shadow else 0.75 * shadow["w"] + 0.25 * now
    assert torch.allclose(found.average["linear.weight"], shadow["w"], rtol=1e-10)
    assert found.steps[-1].parameters.keys() == {"linear.weight", "linear.bias", "scale"}
    assert found.losses == [step.loss for step in found.steps]
    assert found.parameters is found.steps[-1].parameters


def test_a_step_that_overflows_float16_is_skipped_and_scales_down() -> None:
    narrow = {"compute": "float16", "master": "float32", "reduce": "float32", "loss_scale": {"initial_scale": 65536.0}}
    found = plain(precision=narrow, optimizer={"lr": 0.1}).train()
    assert not math.isfinite(found.norms[0])
    assert torch.equal(found.steps[0].parameters["linear.weight"], found.initial["linear.weight"])
    finite = [math.isfinite(norm) for norm in found.norms]
    assert found.scale == 65536.0 * 0.5 ** finite.count(False)
    wide = plain(precision={**narrow, "loss_scale": {"initial_scale": 16.0}}, optimizer={"lr": 0.1}).train()
    exact = plain(precision=WIDE, optimizer={"lr": 0.1}).train()
    assert wide.norms[0] == pytest.approx(exact.norms[0], rel=0.01)
    assert {each.dtype for each in wide.parameters.values()} == {torch.float32}
    assert {each.dtype for each in wide.model.parameters()} == {torch.float16}


def test_batches_take_samples_in_turn() -> None:
    subject = plain().subject
    batches = [batch for step in range(3) for batch in batches_of(subject, subject.config, step)]
    assert [len(batch["y"]) for batch in batches] == [2, 2, 1] * 3
    assert torch.cat([batch["x"][:, 2] * 7 for batch in batches]).round().tolist() == [n % 13 for n in range(15)]
    made = SmallRun(model=subject.model, config=subject.config, samples=[1, 2], collate=lambda rows: {"sum": sum(rows)}, notes=())  # type: ignore[list-item, arg-type]
    assert [batch["sum"] for batch in batches_of(made, subject.config, 0)] == [3, 3, 1]


IDS = torch.tensor([[4, 5, 6, 7], [7, 8, 9, 4]])
LABELS = torch.tensor([[4, -100, 6, 7], [-100, -100, -100, 4]])


@pytest.mark.parametrize(
    ("model", "batch", "count"),
    [
        (llama(), {"labels": LABELS}, 3),
        (gpt2(), {"labels": LABELS}, 3),
        (tiny("t5"), {"labels": LABELS}, 4),
        (tf.BertForMaskedLM(BERT), {"labels": LABELS}, 4),
        (tf.BertForTokenClassification(BERT), {"labels": LABELS.clamp(max=2)}, 4),
        (tf.BertForSequenceClassification(BERT), {"labels": torch.tensor([0, 2])}, 2),
        (tf.BertForQuestionAnswering(BERT), {"start_positions": IDS[:, 0], "end_positions": IDS[:, 1]}, 4),
        (llama(), {}, 2),
        (nn.Linear(1, 1), {"labels": LABELS}, 2),
    ],
)
def test_targets_are_counted_as_the_loss_of_a_head_takes_them(model: Any, batch: dict[str, Any], count: int) -> None:
    assert count_of(model, {"input_ids": IDS, **batch}) == count


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(("model", "shift"), [(llama(), 1), (gpt2(), 1), (tf.BertForMaskedLM(BERT), 0)])
def test_the_summed_loss(model: Any, shift: int, smoothing: float) -> None:
    model = model.double().eval()
    total, count = loss_sum(model, {"input_ids": IDS, "labels": LABELS, "name": IDS}, smoothing=smoothing)
    logits = model(input_ids=IDS).logits
    logits, labels = (logits[:, :-1], LABELS[:, 1:]) if shift else (logits, LABELS)
    wanted = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing)
    # Some losses of the library are computed in float32.
    torch.testing.assert_close(total.detach(), wanted.detach(), rtol=1e-5, atol=0, check_dtype=False)
    assert count == (3 if shift else 4)
    nothing = loss_sum(model, {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}, smoothing=smoothing)
    assert (float(nothing[0]), nothing[1]) == (0.0, 0)


def test_a_loss_of_one_s_own_and_outputs() -> None:
    own: Any = lambda model, batch: (torch.tensor([3.0]), 4, "more")  # noqa: E731
    total, count = loss_sum(None, {}, compute_loss=own)
    assert (total.shape, float(total), count) == (torch.Size(), 3.0, 4)
    given = {"loss": torch.tensor(1.0), "logits": torch.ones(2), "ids": IDS, "more": (torch.zeros(1),)}
    found = tensors_of(given)
    assert [each.tolist() for each in found] == [[1.0, 1.0], [0.0]]
    given["logits"].zero_()  # type: ignore[union-attr]
    assert found[0].tolist() == [1.0, 1.0]
