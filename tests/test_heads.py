"""The loss over a divided vocabulary, for models whose logits change on their way to it, masked ones and those with an encoder."""

from __future__ import annotations

from workers import Workers

CHUNKED = "loss: cross entropy in chunks of tokens, equal to the model's own in a trial"
LOCAL = "loss: cross entropy of logits that each tensor rank has some of, equal to the model's own in a trial"
WHOLE = "loss: the model's own, with all logits in memory of every tensor rank, because the loss differs"
NOTES = {
    "llama": CHUNKED,
    "bert": CHUNKED,
    "modernbert": CHUNKED,
    "t5": CHUNKED,
    "gemma2": LOCAL,
    "granite": LOCAL,
    "cohere": LOCAL,
    "centred": WHOLE,
}


def test_logits_of_a_divided_head_are_not_gathered(workers: Workers) -> None:
    for results in workers.run(2, "head_cases:learns", names=list(NOTES)):
        for name, result in results.items():
            assert result["notes"] == [NOTES[name]], name
            assert not result["wrong"], name
            assert result["nothing"] == 0
            # Logits of 16 tokens are more than their hidden states: 67 of each, and those are 32.
            assert result["gathered"] == (name == "centred"), name
