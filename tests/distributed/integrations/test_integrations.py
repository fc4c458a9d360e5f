"""Over the engine, loops of accelerate, trainers of transformers and runs of Lightning are what they were over the library alone.

What cannot be right is refused."""

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.tables import row, tried
from tests.support.workers import Workers

FULL = pytest.mark.full
LIGHTNING = pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
TRL = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
QUANTIZED = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
STAGES = [{"zero": {"stage": stage}} for stage in range(4)]


# Each is compared with the library alone, or with one process of plain PyTorch.
test_over_accelerate = tried(
    "accelerate_cases",
    [
        row(2, "as_accelerate", FULL, stage=0),
        row(2, "as_accelerate", stage=3),
        row(2, "any_backwards", stage=1),
        row(2, "over_tensor"),
        row(1, "as_autocast", stage=2),
        row(2, "in_low_precision", FULL, asked={"mixed_precision": "bf16"}, dtype="torch.bfloat16"),
        row(2, "in_low_precision", asked={"zeromesh": {"precision": {"compute": "float16"}}}, dtype="torch.float16"),
    ],
)
test_over_transformers = pytest.mark.sampled(2)(
    tried(
        "hf_trainer_cases",
        [
            row(2, "as_original", stage=1),
            row(2, "as_original", FULL, stage=3),
            row(2, "as_original", FULL, stage=3, adapted=True),
            row(2, "twice"),
            row(1, "unfreezing"),
            row(1, "other_groups"),
            row(2, "generating"),
            row(2, "generating_together"),
            row(1, "streams"),
            row(2, "saved_by_its_library"),
            row(2, "weights_alone", FULL, zeromesh=STAGES[2]),
            row(2, "weights_alone", zeromesh=STAGES[3], adapted=True),
            row(2, "weights_alone", FULL, zeromesh={"parallel": {"tensor": 2}}),
            row(1, "alike", FULL, stage=1),
            row(1, "alike", FULL, stage=3),
        ],
    )
)
test_of_bitsandbytes = tried(
    "quantized_cases",
    [
        row(2, "as_original", QUANTIZED, stage=3),
        row(2, "over_trl", QUANTIZED, TRL, kind="SFT", stage=3),
        row(2, "over_trl", QUANTIZED, TRL, kind="DPO", stage=1),
        row(3, "in_layout", QUANTIZED, FULL, stage=3),
        row(4, "in_layout", QUANTIZED, FULL, stage=1, axes={"replicate": 2}),
        row(2, "in_layout", QUANTIZED, stage=2, axes={"tensor": 2}),
        row(2, "in_layout", QUANTIZED, FULL, stage=0, axes={"pipeline": 2}),
        row(2, "other_values_elsewhere", QUANTIZED),
    ],
)
test_over_trl = tried(
    "trl_cases",
    [
        row(2, "as_trl", TRL, kind="DPO", zeromesh=STAGES[3]),
        row(2, "as_trl", TRL, kind="DPO", zeromesh={"zero": {"stage": 2}, "parallel": {"tensor": 2}}, model="phi"),
        row(2, "as_trl", TRL, kind="SFT", zeromesh={"parallel": {"tensor": 2}}),
        row(2, "as_trl", TRL, kind="GRPO", zeromesh=STAGES[3]),
        row(2, "as_trl", TRL, kind="GRPO", zeromesh=STAGES[1], temperature=0.7),
    ],
)
test_over_lightning = tried(
    "lightning_cases",
    [
        row(1, "as_lightning", LIGHTNING, stage=3, accumulation=1),
        row(2, "as_lightning", LIGHTNING, stage=3, accumulation=2),
        row(2, "as_lightning", LIGHTNING, stage=1, accumulation=1),
        row(2, "in_part", LIGHTNING),
        row(2, "asked_early", LIGHTNING),
        row(2, "asked_early", LIGHTNING, parallel={"tensor": 2, "plan": {"net.0": "colwise", "net.2": "rowwise"}}),
    ],
)


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        *(
            ("accelerate", {"name": name}, said)
            for name, said in {
                "optimizer_alone": "without its model",
                "two_optimizers": "2 optimizers",
                "some_parameters": "all parameters",
                "other_norm": "norm_type=2",
                "two_precisions": "set one alone",
                "other_plugin": "by fsdp; leave it out",
                "other_configuration": "by deepspeed; leave it out",
                "compressed_gradients": "comm_hook is bf16",
                "scaler": "GradScalerKwargs",
                "values": "clip_grad_norm_",
                "clipped_before_a_backward": "after the last backward",
                "clipped_while_accumulating": "sync_gradients",
                "step_of_one_rank": "leave no_sync()",
                "saved_by_one_rank": "is_main_process",
                "uneven_batches": "even_batches",
            }.items()
        ),
        ("hf_trainer", {"name": "pipeline"}, "zeromesh.Trainer"),
        ("hf_trainer", {"name": "compiled"}, "torch.compile"),
        ("hf_trainer", {"name": "no trainer"}, "not built on"),
        *(
            pytest.param("lightning", arguments, said, marks=LIGHTNING)
            for arguments, said in (
                ({"precision": "bf16-mixed"}, "precision is bf16-mixed"),
                ({"gradient_clip_algorithm": "value"}, "set it to norm"),
                ({"callback": "WeightAveraging"}, "ema.decay"),
                ({"callback": "StochasticWeightAveraging"}, "ema.decay"),
                ({"callback": "Finetuning"}, "Finetuning adds groups to the optimizer while it trains"),
                ({"rename": True}, "has put first.weight into state_dict"),
            )
        ),
    ],
)
def test_what_cannot_be_right_is_refused(
    workers: Workers, tmp_path: Path, module: str, arguments: dict[str, Any], said: str
) -> None:
    assert said in workers.run(1, f"{module}_cases:refused", folder=str(tmp_path), **arguments)[0]


def test_a_trainer_of_trl_over_tensor_ranks_is_refused(workers: Workers, tmp_path: Path) -> None:
    """A version of TRL that does not fuse the head, or does it otherwise, reads the weight of which each rank has a part."""
    for said in workers.run(2, "hf_trainer_cases:refused", folder=str(tmp_path), name="of TRL"):
        assert "DPOTrainer is not shown to be exact over tensor ranks" in said


def test_methods_of_the_accelerator_take_what_those_of_accelerate_take() -> None:
    """An argument that accelerate's would refuse, such as a misspelt one, is not passed over."""
    accelerate, ours = pytest.importorskip("accelerate").Accelerator, import_module("zeromesh.accelerate").Accelerator
    for name, method in inspect.getmembers(accelerate, inspect.isfunction):
        theirs, taken = (
            [
                (each.kind, each.name if each.kind is each.POSITIONAL_OR_KEYWORD else "", each.default)
                for each in inspect.signature(function).parameters.values()
            ]
            for function in (method, getattr(ours, name))
        )
        assert name.startswith("_") or taken == theirs, name


def test_transformers_trainer_shares_sequences(workers: Workers, tmp_path: Path) -> None:
    wanted, *_ = workers.run(1, "hf_trainer_cases:shared", folder=str(tmp_path / "one"), config={})
    for found in workers.run(2, "hf_trainer_cases:shared", folder=str(tmp_path), config={"parallel": {"context": 2}}):
        assert [name for name, _ in found] == [name for name, _ in wanted]
        assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-6)
