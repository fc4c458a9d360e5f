"""`zeromesh.accelerate.Accelerator`: loops of accelerate are what they were, and what cannot be right is refused."""

from pathlib import Path

import pytest

from tests.support.workers import Workers


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
def test_a_loop_is_that_of_accelerate(workers: Workers, tmp_path: Path, stage: int) -> None:
    found = workers.run(2, "accelerate_cases:as_accelerate", folder=str(tmp_path), stage=stage)[0]
    assert found["stage"] == stage
    assert found["losses"] <= 1e-6  # Norms are rounded to float32; a state that was not restored is off by 1e-3.
    assert found["resumed"] <= 1e-6
    assert found["weights"] <= 1e-9
    assert found["saved"] == ["random_states_0.pkl", "random_states_1.pkl", "scheduler.bin", "zeromesh", "zeromesh_1"]
    assert found["whole"]


def test_ranks_that_divide_layers_see_the_same_batches(workers: Workers) -> None:
    assert workers.run(2, "accelerate_cases:over_tensor")[0]["losses"] <= 1e-6


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [pytest.param("bf16", "torch.bfloat16", marks=pytest.mark.full), ("fp16", "torch.float16")],
)
def test_mixed_precision_keeps_master_weights(workers: Workers, precision: str, dtype: str) -> None:
    found = workers.run(2, "accelerate_cases:in_low_precision", dtype=precision)[0]
    assert found[f"{precision} dtypes"] == [dtype, *3 * ["torch.float32"]]
    assert found[precision] == pytest.approx(found["no"], abs=0.05)
    assert found[precision] != found["no"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optimizer_alone", "without its model"),
        ("two_optimizers", "2 optimizers"),
        ("some_parameters", "all parameters"),
        ("other_norm", "norm_type=2"),
        ("two_precisions", "set one alone"),
        ("other_plugin", "by fsdp; leave it out"),
        ("other_configuration", "by deepspeed; leave it out"),
        ("compressed_gradients", "comm_hook is bf16"),
        ("scaler", "GradScalerKwargs"),
        ("values", "clip_grad_norm_"),
        ("clipped_before_a_backward", "after the last backward"),
        ("clipped_while_accumulating", "sync_gradients"),
        ("step_of_one_rank", "leave no_sync()"),
        ("saved_by_one_rank", "is_main_process"),
        ("uneven_batches", "even_batches"),
    ],
)
def test_what_cannot_be_right_is_refused(workers: Workers, name: str, said: str) -> None:
    assert said in workers.run(1, "accelerate_cases:refused", name=name)[0]
