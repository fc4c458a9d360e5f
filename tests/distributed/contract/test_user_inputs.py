"""Models and schedulers as users give them: what they have set is kept, and what a callback forgets is put back."""

from pathlib import Path

from tests.support.workers import Workers

CASES = "given_cases"


def test_modes_and_compiled_models_are_those_of_a_plain_loop(workers: Workers, tmp_path: Path) -> None:
    """A forgotten `model.eval()` is undone, modules frozen in evaluation mode stay so, and a compiled model has its own names."""
    for found in workers.run(2, f"{CASES}:modes", folder=str(tmp_path), stages=[0, 3]):
        assert found == {name: value for name, value in found.items() if value <= 1e-9}


def test_a_compiled_model_gets_its_fields_and_the_users_checkpointing_is_kept(workers: Workers, tmp_path: Path) -> None:
    for found in workers.run(2, f"{CASES}:compiled_fields", folder=str(tmp_path)):
        assert found["compiled"]["apart"] <= 1e-9
        assert found["recomputed"]["apart"] <= 1e-9
        assert found["recomputed"]["recomputes"] == [True]
        assert "use_reentrant=True" in found["reentrant"]


def test_schedulers_that_cycle_the_momentum_do_so(workers: Workers, tmp_path: Path) -> None:
    for found in workers.run(2, f"{CASES}:momentum", folder=str(tmp_path)):
        assert "optimizer.momentum" in found.pop("sgd")
        assert "adagrad" in found.pop("adagrad")
        assert found == {name: value for name, value in found.items() if value <= 1e-9}
