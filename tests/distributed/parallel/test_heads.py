"""The loss over a divided vocabulary, for models whose logits change on their way to it, masked ones and those with an encoder."""

from pathlib import Path

import pytest

from tests.support.workers import Workers

CHUNKED = "loss: cross entropy in chunks of tokens, equal to the model's own in a trial"
CHANGED = "loss: cross entropy in chunks of tokens, of logits changed by {}, equal to the model's own in a trial"
WHOLE = "loss: the model's own, with all logits in memory, because "
NOTES = {
    "llama": CHUNKED,
    "bert": CHUNKED,
    "modernbert": CHUNKED,
    "t5": CHUNKED,
    "gemma2": CHANGED.format("a factor of 1, capped at 0.5"),
    "granite": CHANGED.format("a factor of 0.125"),
    "cohere": CHANGED.format("a factor of 0.3"),
    "centred": WHOLE,
}


def test_logits_of_a_divided_head_are_not_gathered(workers: Workers) -> None:
    for results in workers.run(2, "head_cases:learns", names=list(NOTES)):
        for name, result in results.items():
            assert result["notes"][0].startswith(NOTES[name]), name
            assert not result["wrong"], name
            assert result["nothing"] == 0
            # Logits of 16 tokens are more than their hidden states: 67 of each, and those are 32.
            assert result["gathered"] == (name == "centred"), name


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(2, {"tensor": 2}), pytest.param(4, {"tensor": 2, "pipeline": 2}, marks=pytest.mark.full)]
)
def test_a_run_gathers_none_either(workers: Workers, tmp_path: Path, ranks: int, parallel: dict[str, int]) -> None:
    for found in workers.run(ranks, "head_cases:trains", folder=str(tmp_path), parallel=parallel):
        assert found["losses"] < 1e-6  # Norms of Gemma compute in fp32.
        assert found["whole"]
        assert not found["gathered"]
        before, at_the_end, after = found["evaluated"]
        assert before > at_the_end
        assert after == pytest.approx(at_the_end, rel=1e-6)
