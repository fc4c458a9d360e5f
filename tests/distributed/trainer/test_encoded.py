"""Frozen weights that rest as a codec's bytes have the same values in every layout, on every tier, and after a reshard."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.trainer.encoded_cases import rounded
from tests.support.quantized_models import SIZES, loaded, written
from tests.support.tables import row, tried
from tests.support.trainer_cases import llama, seeded, sentences, settings
from tests.support.workers import Workers
from zeromesh import Trainer
from zeromesh.errors import ConfigError
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.data.tokenizer import ByteTokenizer
from zeromesh.trainer.monitoring.step_metrics import read_metrics
from zeromesh.trainer.setup.engine_options import require_trained

FULL = pytest.mark.full
HOST, FILE = ({"parameters": tier} for tier in ("host", "file"))
LAYOUTS: list[tuple[int, int, dict[str, int], tuple[pytest.MarkDecorator, ...]]] = [
    (1, 0, {}, ()),
    (1, 3, {}, (FULL,)),
    (2, 0, {}, (FULL,)),
    (2, 1, {}, (FULL,)),
    (2, 2, {}, (FULL,)),
    (3, 3, {}, ()),
    (4, 3, {"replicate": 2}, (FULL,)),
    (2, 3, {"tensor": 2}, ()),
    (2, 1, {"pipeline": 2}, ()),
    (4, 2, {"tensor": 2, "pipeline": 2}, (FULL,)),
]


def layout(ranks: int, stage: int, axes: dict[str, int], marks: tuple[pytest.MarkDecorator, ...]) -> Any:
    words = " ".join(f"{axis} {size}" for axis, size in axes.items())
    return pytest.param(ranks, "trained", {"stage": stage, "axes": axes}, marks=marks, id=f"{ranks} {stage} {words}")


test_losses_are_those_of_the_decoded_weights = pytest.mark.sampled(8)(
    tried(
        "encoded_cases",
        [
            *(layout(*each) for each in LAYOUTS),
            *(row(2, "trained", *marks, stage=3, weights=name) for name, *marks in (("fp4", FULL), ("int8",), ("fp8",))),
            *(row(2, "trained", *marks, stage=3, offload=tier) for tier, marks in ((HOST, (FULL,)), (FILE, ()))),
            row(2, "trained", stage=3, activation_checkpointing="block"),
        ],
    )
)
MANY = {"use_dora": True, "use_rslora": True, "modules_to_save": ["embed_tokens"]}
test_twenty_steps_are_those_of_peft_with_bitsandbytes = tried(
    "encoded_cases",
    [
        row(1, "beside_bitsandbytes", stage=0),
        *(row(ranks, "beside_bitsandbytes", FULL, stage=stage) for ranks, stage in ((1, 3), (2, 1), (3, 2), (4, 3))),
        *(
            row(2, "beside_bitsandbytes", FULL, stage=stage, parallel=axes)
            for stage, axes in ((3, {"tensor": 2}), (1, {"pipeline": 2}))
        ),
        *(row(2, "beside_bitsandbytes", FULL, stage=3, offload=tier) for tier in (HOST, FILE)),
        row(2, "beside_bitsandbytes", FULL, stage=2, model={"activation_checkpointing": "block"}),
        row(2, "beside_bitsandbytes", FULL, stage=3, batch={"micro_size": 1}),
        *(row(2, "beside_bitsandbytes", FULL, stage=3, adapter={name: value}) for name, value in MANY.items()),
    ],
)


@pytest.mark.full
def test_a_run_of_four_ranks_goes_on_elsewhere_as_peft_with_bitsandbytes(workers: Workers, tmp_path: Path) -> None:
    for ranks, stage, axes, start in ((4, 3, {}, 0), (1, 0, {}, 10), (2, 1, {"tensor": 2}, 10)):
        workers.run(
            ranks, "encoded_cases:beside_bitsandbytes", folder=str(tmp_path), stage=stage, parallel=axes, start=start, adapter=MANY
        )


test_memory_is_what_was_predicted = tried(
    "encoded_cases", [row(1, "counted", stage=0), row(1, "counted", stage=3, offload=FILE, prefetch=2), row(2, "counted", stage=3)]
)
ALL = {"r": 4, "lora_alpha": 6, "use_rslora": True, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}
ALL |= {"modules_to_save": ["embed_tokens"]}
PISSA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": "pissa"}
test_adapters_by_configuration_are_those_of_peft = pytest.mark.sampled(2)(
    tried(
        "encoded_cases",
        [
            *(row(2, "alike", *marks, stage=stage, adapter=ALL) for stage, marks in ((0, (FULL,)), (1, (FULL,)), (3, ()))),
            *(row(2, "alike", stage=2, adapter=ALL, axes=axes) for axes in ({"tensor": 2}, {"pipeline": 2})),
            row(1, "alike", FULL, stage=2, adapter=ALL, weights=None),
            row(2, "alike", stage=3, adapter=PISSA, weights=None),
            row(2, "alike", FULL, stage=2, adapter=PISSA),
            row(2, "alike", FULL, stage=1, adapter={**PISSA, "init_lora_weights": "olora"}, weights=None, axes={"tensor": 2}),
            row(1, "alike", FULL, stage=3, adapter={**PISSA, "init_lora_weights": "orthogonal"}),
        ],
    )
)


def test_runs_go_on_in_other_layouts(workers: Workers, tmp_path: Path) -> None:
    folder = str(tmp_path / "whole")
    whole = workers.run(1, "encoded_cases:moved", folder=folder, steps=4, stage=0, frozen="whole")[0]
    message = workers.run(2, "encoded_cases:another_base", folder=folder)[0]
    assert "frozen weights that are kept encoded differ" in message, message
    folder = str(tmp_path / "parts")
    first = workers.run(2, "encoded_cases:moved", folder=folder, steps=2, stage=1, axes={"tensor": 2})
    second = workers.run(3, "encoded_cases:moved", folder=folder, steps=4, stage=3, frozen="whole")
    third = workers.run(2, "encoded_cases:moved", folder=folder, steps=6, stage=2, axes={"pipeline": 2})
    losses = [*first[0]["losses"], *second[0]["losses"]]
    assert losses == pytest.approx(whole["losses"], rel=1e-9)
    assert len(third[0]["losses"]) == 2


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (None, r"model\.weights: nf4 is for frozen matrices"),
        ({"weights": "nf4"}, r"model\.weights: nf4 is for frozen matrices.*set model\.lora"),
        ({"train": ["!*"]}, r"model\.train: .* freezes all parameters"),
    ],
)
def test_a_model_without_frozen_matrices_or_trained_ones_is_refused(
    tmp_path: Path, model: dict[str, Any] | None, match: str
) -> None:
    """A directory's before the data are read, which are no data."""
    (tmp_path / "bad.jsonl").write_text("{")
    written(tmp_path / "base")
    section = {"weights": "nf4"} if model is None else {"source": str(tmp_path / "base"), **model}
    config = settings(str(tmp_path), model=section, **({} if model is None else {"data": {"train": str(tmp_path / "bad.jsonl")}}))
    given = (llama(), config, sentences()) if model is None else (None, config)
    with pytest.raises(ConfigError, match=match), Trainer(*given) as trainer:
        trainer.fit()


def test_code_that_comes_with_a_model_may_freeze_it() -> None:
    """Whether it does is known once the model is built."""
    require_trained(ModelSection(source="theirs", trust_remote_code=True, weights="nf4"), given=False)


def test_a_base_in_four_bits_is_evaluated_without_adapters(workers: Workers, tmp_path: Path) -> None:
    build = partial(llama, **SIZES, vocab_size=ByteTokenizer().vocab_size)
    written(tmp_path / "base", build)
    loaded(tmp_path / "base").save_pretrained(tmp_path / "layers")
    rounded(seeded(build).requires_grad_(False), "nf4").save_pretrained(tmp_path / "values")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    words = ["precision.compute=float32", f"run.output_dir={tmp_path}", "data.tokenizer=bytes", "data.sequence_length=16"]
    words += [f"data.{name}={tmp_path / 'text.txt'}" for name in ("train", "eval")]
    found, held = [], []
    for ranks, name, more in ((1, "values", []), (1, "layers", []), (2, "layers", []), (2, "base", ["model.weights=nf4"])):
        all_words = ["evaluate", str(tmp_path / name), *words, *more]
        ended = workers.run(ranks, "input_cases:command", words=all_words)
        assert [each["code"] for each in ended] == [0] * ranks, ended
        found.append(read_metrics(tmp_path / name / "evaluated.jsonl")[-1]["eval_loss"])
        held.append(re.search(r"states of each rank: (\S+ \S+)", ended[0]["out"]))
    assert found == pytest.approx([found[0]] * 4, rel=1e-6)
    assert None not in held
    assert held[0][1] != held[1][1], "codes are kept as they are"
