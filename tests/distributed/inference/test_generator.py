"""`Generator` gives the tokens and log-probabilities of the library's own `generate` in one process, under every layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.inference.generator_cases import MODELS
from tests.support.workers import PoolOptions, Workers

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {"zero": {"stage": 0}}),
    "sharded": (2, {"zero": {"stage": 3, "gathered_budget": 0}}),
    "tensor": (2, {"parallel": {"tensor": 2}}),
    "pipeline": (2, {"parallel": {"pipeline": 2}}),
    "tensor-pipeline": (4, {"parallel": {"tensor": 2, "pipeline": 2}}),
    "sharded-pipeline": (4, {"parallel": {"pipeline": 2}, "zero": {"gathered_budget": 0}}),
    "file": (2, {"offload": {"parameters": "file"}}),
    "stored": (2, {"offload": {"parameters": "file"}}),
    "host": (2, {"offload": {"parameters": "host"}}),
    "interleaved": (2, {"parallel": {"pipeline": 2, "chunks": 2, "schedule": "interleaved"}}),
    "tensor-4": (4, {"parallel": {"tensor": 4}}),
    "data-tensor": (4, {"parallel": {"tensor": 2}, "zero": {"stage": 0}}),
    "data-pipeline": (4, {"parallel": {"pipeline": 2}, "zero": {"stage": 0}}),
    "hybrid": (4, {"parallel": {"replicate": 2}, "zero": {"gathered_budget": 0}}),
}
FEW = {
    "bart-decoder": {"sharded", "pipeline"},
    "bert": {"sharded", "pipeline"},
    "longrope": {"data", "pipeline"},
    "dynamic": {"sharded", "pipeline"},
    "qwen3_next": {"sharded", "pipeline"},
    "llama4": {"pipeline", "sharded"},
    "gemma4": {"sharded", "tensor"},
    "recurrent_gemma": {"data", "sharded", "host"},
    "ctrl": {"pipeline", "sharded"},
    "led": {"sharded", "data"},
    "git": {"sharded", "pipeline"},
    "moshi": {"sharded", "pipeline"},
    "t5gemma": {"sharded", "data"},
}
"""Models that are tried in a few layouts, as others are like them."""
SHORT = {("bart-decoder", "sharded"), ("bert", "pipeline"), ("longrope", "pipeline"), ("qwen3_next", "pipeline")} | {
    *{("llama4", "pipeline"), ("gemma4", "sharded"), ("dynamic", "sharded")},
    *{
        ("recurrent_gemma", "sharded"),
        ("ctrl", "pipeline"),
        ("led", "sharded"),
        ("moshi", "sharded"),
        ("git", "pipeline"),
        ("t5gemma", "sharded"),
    },
}
SHORT |= {("llama", "sharded"), ("gpt2", "pipeline"), ("qwen3_moe", "stored"), ("t5", "tensor")}
_STAGED = {"pipeline", "tensor-pipeline", "sharded-pipeline"}
IMPOSSIBLE: dict[str, set[str]] = {"t5": _STAGED, "bart": {*_STAGED, "tensor"}}
"""Layouts that these models cannot be divided for, in training either."""
ALONE = {"llama-deep": {"interleaved"}, "llama-heads": {"tensor-4", "data-tensor", "data-pipeline", "hybrid"}}
"""Models for a few layouts, which no other model is tried in."""
CASES: list[Any] = [
    pytest.param(model, layout, marks=() if (model, layout) in SHORT else pytest.mark.full)
    for model in MODELS
    for layout in LAYOUTS
    if layout not in IMPOSSIBLE.get(model, ())
    and layout in FEW.get(model, LAYOUTS)
    and (layout in ALONE[model] if model in ALONE else layout not in set().union(*ALONE.values()))
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_tokens_are_those_of_one_process(workers: Workers, tmp_path: Path, model: str, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    if layout == "file":
        sections = {"offload": {"parameters": "file", "directory": str(tmp_path / "swap")}}
    results = workers.run(
        ranks, "generator_cases:agrees", timeout=120.0, folder=str(tmp_path), model=model, sections=sections
    )
    for found in results:
        assert not found["wrong"]
        assert found["apart"] < 1e-9
        assert found["kinds"] > 1, "prompts are continued by one text, which any mistake would give too"
        assert not found["trained"]
        assert not found["unexpected"]
        # Nothing but the parameters: no gradients, no moments, no master weights beside them.
        assert set(found["memory"]) <= {"PARAMETERS", "STAGING", "COMMUNICATORS"}
        assert found["rounds"] == results[0]["rounds"]
        assert sorted(number for numbers in found["rounds"] for number in numbers) == list(range(6))


@pytest.mark.parametrize("tier", ["none", "file"])
def test_a_start_takes_a_ranks_part_and_little_more(workers: Workers, tmp_path: Path, tier: str) -> None:
    with workers.fresh(PoolOptions(size=1)) as pool:
        (found,) = pool.run("generator_cases:takes", folder=str(tmp_path), tier=tier)
    assert found["whole"] > 60 << 20
    part = found["whole"] if tier == "none" else 0
    assert part <= found["starting"] <= part + (12 << 20)
    assert found["generating"] <= part + (48 << 20)
    assert found["left"] <= 40 << 20
    assert found["copied"] == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_in_the_models_own_files_are_read_into_place(workers: Workers, tmp_path: Path, ranks: int) -> None:
    for found in workers.run(ranks, "generator_cases:reads_into_place", folder=str(tmp_path), shard="1GB"):
        assert found["same"]
        assert len(found["begins"]) == 1
        assert found["begins"] != [0]
        assert found["copied"] == 0
        assert found["bits"], "a copy at whole blocks is not what is in memory"


def test_of_weights_in_two_files_most_are_read_into_place(workers: Workers, tmp_path: Path) -> None:
    (found,) = workers.run(1, "generator_cases:reads_into_place", folder=str(tmp_path), shard="20MB")
    assert found["same"]
    assert len(found["begins"]) > 1
    assert 0 < found["copied"] < 0.4


def test_fewer_prompts_than_ranks(workers: Workers, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"folder": str(tmp_path), "model": "llama", "prompts": 1}
    for found in workers.run(2, "generator_cases:agrees", sections={"zero": {"gathered_budget": 0}}, **arguments):
        assert not found["wrong"]


def test_padding_before_an_encoder_is_not_penalised(workers: Workers, tmp_path: Path) -> None:
    for rows in workers.run(2, "generator_cases:penalises", folder=str(tmp_path)):
        assert all(found == wanted for found, wanted in rows), rows


def test_of_a_run_and_of_a_checkpoint(workers: Workers, tmp_path: Path) -> None:
    for found in workers.run(2, "generator_cases:from_a_run", folder=str(tmp_path)):
        assert not found["wrong"]


def test_what_is_refused(workers: Workers, tmp_path: Path) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5)) as pool:
        for messages in pool.run("generator_cases:refuses", folder=str(tmp_path)):
            wanted = {
                "none": "DataError: there are no prompts",
                "text": "DataError: prompt 0 is text, and the model's directory has no tokenizer",
                "no prompt": "DataError: prompt 0 is text, a list of token ids",
                "token": "DataError: prompt 1 has token 64, and the model knows 64",
                "long": "DataError: prompt 0: the prompt has 30 tokens, which with the new ones become 35",
                "field": "max_new_token is no field of transformers' GenerationConfig",
                "several": "num_return_sequences is not taken",
                "closed": "this generator ended with close(); make a new one",
                "differ": "ranks were given different things: prompts is",
            }
            for name, text in wanted.items():
                assert text in messages[name], messages
            assert messages["sampled"][0] == messages["sampled"][1] != messages["sampled"][2]
            together, by_length, one_by_one, plain = messages["ways"]
            assert together == by_length == one_by_one == plain, "what is drawn depends on the prompt's seed alone"
            assert len(set(map(tuple, together))) == 4


def test_states_that_modules_keep_are_refused_in_stages(workers: Workers, tmp_path: Path) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5)) as pool:
        for said in pool.run("generator_cases:refuses_states_in_stages", folder=str(tmp_path)):
            assert "keeps model.layers" in said
            assert "in its modules between tokens, which microbatches of a pipeline would share" in said


@pytest.mark.parametrize(
    "sections", [{"zero": {"gathered_budget": 0}}, pytest.param({"parallel": {"pipeline": 2}}, marks=pytest.mark.full)]
)
def test_logits_that_are_no_numbers_end_their_prompt_alone(
    workers: Workers, tmp_path: Path, sections: dict[str, Any]
) -> None:
    for said in workers.run(2, "generator_cases:is_not_finite", folder=str(tmp_path), sections=sections):
        assert len(said) == 4
        for message, found in said:
            assert "the model's logits are NaN or infinite for prompt 1; the other 2 have a result" in message
            assert found == [0, 2]


def test_prompts_without_a_result_are_named_when_a_rank_dies(workers: Workers, tmp_path: Path) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5)) as pool:
        survivor, victim = pool.outcomes("generator_cases:loses_a_rank", timeout=30, folder=str(tmp_path))
    assert victim.error == "died"
    found = survivor.result
    assert "rank 1 is gone" in found["message"]
    assert found["found"], "results that came before are handed over"
    missing = [number for number in range(8) if number not in found["found"]]
    assert f"without one are {', '.join(map(str, missing))}" in found["message"]
    assert found["seconds"] < 8


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (2, {"zero": {"stage": 0}}),
        pytest.param(4, {"zero": {"stage": 3}, "parallel": {"replicate": 2}}, marks=pytest.mark.full),
        pytest.param(2, {"zero": {"stage": 0}, "parallel": {"tensor": 2}}, marks=pytest.mark.full),
        pytest.param(2, {"zero": {"stage": 0}, "parallel": {"pipeline": 2}}, marks=pytest.mark.full),
    ],
)
def test_a_flipped_bit_is_named(workers: Workers, tmp_path: Path, ranks: int, sections: dict[str, Any]) -> None:
    results = workers.run(ranks, "generator_cases:finds_flips", folder=str(tmp_path), sections=sections)
    flipped = results[-1]["flipped"]
    assert all(found["flipped"] == flipped for found in results)
    if "parallel" not in sections:
        assert len(flipped) == 28, "every parameter"
    if "tensor" in sections.get("parallel", {}):
        # What tensor ranks divide nobody else has.
        assert {"transformer.ln_f.weight", "transformer.h.0.attn.c_proj.bias"} <= set(flipped)
        assert "transformer.h.0.attn.c_attn.weight" not in flipped
    if "pipeline" in sections.get("parallel", {}):
        assert any("transformer.wte.weight" in name for name in flipped)
    for name, message in flipped.items():
        assert f"ranks hold other values of the same weights:\n{name}" in message
        assert f"rank {ranks - 1} has " in message
    assert flipped


@pytest.mark.parametrize(
    "sections", [{"zero": {"stage": 3}}, pytest.param({"parallel": {"pipeline": 2}}, marks=pytest.mark.full)]
)
def test_a_request_that_is_cancelled_at_once(workers: Workers, tmp_path: Path, sections: dict[str, Any]) -> None:
    ends = workers.run(2, "generator_cases:cancels", folder=str(tmp_path), sections=sections)[0]
    assert ends[1] == "cancelled after 0"
    assert ends[0].startswith("length after")
    assert ends[2].startswith("length after")
