"""Every task of `model.head`: its model is built, and the sums of its losses over uneven microbatches make the model's own mean."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers as tf

from tests.support.tables import row, tried
from tests.support.tasks import BERT, LENGTH, SAMPLES, TASKS, Task, noise, spans, text
from tests.support.workers import Workers
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.config.sections.model import AUTO_CLASSES, Head, ModelSection
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.models.build import build_model
from zeromesh.trainer.models.small_copy import InFloat64


def made(task: Task) -> Any:
    torch.manual_seed(0)
    meta = build_model(ModelSection(config=task.config, head=task.head), 0).model
    model = getattr(tf, AUTO_CLASSES[task.head]).from_config(meta.config, trust_remote_code=False)
    assert type(model) is type(meta)
    return model.double().eval()


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


@pytest.mark.parametrize("name", TASKS)
def test_uneven_microbatches_make_the_models_own_mean(name: str) -> None:
    task = TASKS[name]
    model, batch = made(task), task.batch()
    loss = make_loss(model)
    assert loss.kind == task.kind, loss.notes
    parts = [{key: value[begin:end] for key, value in batch.items()} for begin, end in ((0, 3), (3, 4), (4, 7))]
    count = sum(loss.count(part) or 0 for part in parts)
    assert count == loss.count(batch)
    with InFloat64():
        own = task.mean(model(**batch).loss, SAMPLES)
        wanted = gradients(model, own)
        total = sum((loss(model, part, seed=1.0) for part in parts), torch.zeros(())) / count
        found = gradients(model, total)
    torch.testing.assert_close(total, own, rtol=1e-12, atol=0)
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        difference = float((found[parameter] - gradient).norm())
        assert difference <= 1e-11 * (float(gradient.norm()) + 1e-3 * largest), parameter


@pytest.mark.parametrize("name", ["speech", "picture and text"])
def test_logits_of_decoders_are_made_in_chunks(name: str) -> None:
    """Tried without an encoder, or on text alone: what the loss is does not depend on what the decoder has been shown."""
    loss = make_loss(made(TASKS[name]))
    assert loss.kind == "labels"
    assert "in chunks of tokens" in str(loss.notes), loss.notes


def test_every_head_has_a_class() -> None:
    assert set(AUTO_CLASSES) == set(get_args(Head))
    tried = {task.head for task in TASKS.values()}
    assert set(get_args(Head)) - tried == {"causal_lm", "masked_lm", "base"}  # elsewhere


def test_a_model_without_a_head_needs_a_loss() -> None:
    model = build_model(ModelSection(config=BERT, head="base"), 0).model
    assert type(model) is tf.BertModel
    with pytest.raises(ConfigError, match="BertModel has no head, and so no loss of its own; pass compute_loss"):
        make_loss(model)
    assert make_loss(model, compute_loss=lambda model, batch: (torch.zeros(()), 1)).count({}) is None
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        pairs = tf.CLIPModel(tf.CLIPConfig(text_config=sizes, vision_config={**sizes, "image_size": 8, "patch_size": 8}))
    with pytest.raises(ConfigError, match=r"CLIPModel gives the mean .* with return_loss=True; pass compute_loss=lambda"):
        make_loss(pairs)


def test_missing_answers_and_transcripts_are_named() -> None:
    model = made(TASKS["question"])
    with pytest.raises(DataError, match="no `start_positions` tensor; it has input_ids, attention_mask"):
        make_loss(model).count(text())
    with pytest.raises(DataError, match="no `labels` tensor"):
        make_loss(made(TASKS["transcript sum"])).count({"input_values": noise(2, 240)})


def test_a_batch_of_answers_beyond_their_sequences_gives_zero() -> None:
    model, batch = made(TASKS["question"]), spans()
    batch["start_positions"][:] = batch["end_positions"][:] = LENGTH
    loss = make_loss(model)
    assert loss.count(batch) == 0
    assert float(loss(model, batch, seed=1.0).detach()) == 0.0


def test_a_loss_that_is_of_something_else_counts_examples() -> None:
    config = tf.BertConfig(**{name: value for name, value in BERT.items() if name != "model_type"})
    loss = make_loss(tf.BertForPreTraining(config))
    assert loss.kind == "examples"
    assert "taken for a mean over examples" in loss.notes[0]


# On ranks


QUICK = ("question", "transcript sum")
test_a_task_trains_as_in_one_process = tried(
    "architecture_cases",
    [
        row(2, "task", *(() if name in QUICK else (pytest.mark.full,)), name=name)
        for name in TASKS
        if name != "pixels"  # BatchNorm, whose statistics are those of a microbatch
    ],
)


def test_what_is_masked_of_sounds_depends_on_the_samples_alone(workers: Workers, tmp_path: Path) -> None:
    """transformers draws it from NumPy. Dropout is on too."""
    found = {size: workers.run(size, "architecture_cases:masked_sounds", folder=str(tmp_path / str(size))) for size in (1, 2)}
    assert found[1][0]["losses"] == pytest.approx(found[2][0]["losses"], rel=1e-9)
    assert found[1][0]["losses"] != pytest.approx(found[1][0]["without"], rel=1e-3)
    assert found[1][0]["untouched"] is True


def test_layers_that_are_left_out_at_random_are_refused_on_several_ranks(workers: Workers, tmp_path: Path) -> None:
    said = workers.run(2, "architecture_cases:left_out", folder=str(tmp_path))
    assert all("layerdrop is 0.5: each of 2 data ranks would leave out other layers" in each for each in said)
    assert workers.run(1, "architecture_cases:left_out", folder=str(tmp_path)) == [""]
