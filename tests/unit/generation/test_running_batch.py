"""A running batch gives every request what the model's own `generate` gives it alone, whoever joins and leaves meanwhile."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf

from zeromesh.trainer.generation.adapter_rows import AdapterRows
from zeromesh.trainer.generation.requests import Request
from zeromesh.trainer.generation.running_batch import ForwardKind, RunningBatch
from zeromesh.trainer.generation.settings import ModelSettings

SMALL: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 5,
}  # fmt: skip

ENDS = [5, 11, 23, 31, 44]


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    made: Any
    if kind == "sliding":
        made = tf.MistralForCausalLM(tf.MistralConfig(**SMALL, sliding_window=7, head_dim=8))
    else:
        made = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    return made.double().eval()


def _batch(model: Any, *, rows: int, prefill_tokens: int = 64, cache_tokens: int = 1 << 30) -> RunningBatch:
    sizes = {"rows": rows, "prefill_tokens": prefill_tokens, "cache_tokens": cache_tokens}
    mesh = SimpleNamespace(device=torch.device("cpu"))
    placed: Any = SimpleNamespace(module=model, adapters=AdapterRows(model), mesh=mesh)
    return RunningBatch(placed, **sizes)


def _add(batch: RunningBatch, request: Request) -> None:
    batch.add(request, ModelSettings(batch._module, None).for_request(request.fields, len(request.tokens)))


def _run(model: Any, batch: RunningBatch, all_: list[Request], *, eager: bool, draw: random.Random) -> dict[int, Any]:
    """Let requests come in at random times, and collect what is made of them."""
    coming, made = list(all_), {request.number: ([], [], None) for request in all_}
    most = 0
    while coming or batch.busy:
        while coming and draw.random() < 0.4:
            _add(batch, coming.pop(0))
        if batch.plan(eager=eager) is ForwardKind.IDLE:
            continue
        most = max(most, batch.shape()[0])
        with torch.no_grad():
            batch.append(batch.choose(model(**batch.inputs()).logits[:, -1]))
        batch.remove_ended()
        for progress in batch.progress():
            tokens, logprobs, _ = made[progress.number]
            made[progress.number] = (tokens + progress.tokens, logprobs + progress.logprobs, progress.finish)
    assert most > 1, "nothing ran together"
    return made


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_greedy_requests_are_as_if_alone(kind: str) -> None:
    model, draw = _model(kind), random.Random(1)
    requests = [
        Request(
            number=number,
            tokens=[draw.randrange(6, 48) for _ in range(draw.choice([1, 2, 3, 9, 17, 40]))],
            fields={"max_new_tokens": draw.choice([1, 2, 5, 30, 90]), "eos_token_id": ENDS},
        )
        for number in range(14)
    ]
    batch = _batch(model, rows=4, prefill_tokens=24)
    made = _run(model, batch, requests, eager=True, draw=draw)
    ends = set()
    for request in requests:
        ids = torch.tensor([request.tokens])
        with torch.no_grad():
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), **request.fields)[0, ids.shape[1] :]
            logits = model(torch.cat([ids[0], alone])[None]).logits[0, ids.shape[1] - 1 : -1]
        tokens, logprobs, finish = made[request.number]
        assert tokens == alone.tolist()
        wanted = logits.log_softmax(-1).gather(1, alone[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), wanted, rtol=0, atol=1e-12)
        assert finish == ("stop" if tokens[-1] in ENDS else "length")
        ends.add(finish)
    assert ends == {"stop", "length"}
    assert batch.computed == sum(len(request.tokens) - 1 + len(made[request.number][0]) for request in requests)


@pytest.mark.parametrize(
    "fields",
    [
        {"forced_eos_token_id": 9},
        {"encoder_repetition_penalty": 4.0},
        {"encoder_no_repeat_ngram_size": 1},
        {"repetition_penalty": 3.0},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 6, "eos_token_id": ENDS},
        {"min_length": 14, "eos_token_id": ENDS},
        {"exponential_decay_length_penalty": (2, 1.8)},
        {"begin_suppress_tokens": ENDS, "forced_bos_token_id": 7},
        {"max_new_tokens": None, "max_length": 13},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("of_the_model", [False, True])
def test_processors_see_what_they_see_of_a_prompt_alone(fields: dict[str, Any], of_the_model: bool) -> None:
    model, draw = _model("full"), random.Random(3)
    fields = {"max_new_tokens": 8, **fields}
    if of_the_model:
        model.generation_config.update(**fields)
    given = {} if of_the_model else fields
    requests = [Request(number=n, tokens=[*range(8, 10 + 3 * n)], fields=given) for n in range(4)]
    batch = _batch(model, rows=4, prefill_tokens=24)
    made = _run(model, batch, requests, eager=True, draw=draw)
    plain, differ = _model("full"), 0
    for request in requests:
        ids = torch.tensor([request.tokens])
        with torch.no_grad():
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), **given)[0, ids.shape[1] :]
            bare = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)[0, ids.shape[1] :]
        assert made[request.number][0] == alone.tolist()
        differ += alone.tolist() != bare.tolist()
    assert differ, "the fields change nothing"


def test_draws_do_not_depend_on_the_company() -> None:
    model = _model("full")
    fields = {"do_sample": True, "temperature": 1.4, "top_k": 20, "repetition_penalty": 1.3, "max_new_tokens": 25}
    requests = [Request(number=n, tokens=[7 + n, 9], fields=fields, seed=n % 3) for n in range(6)]
    found = []
    for rows, eager in ((6, True), (2, False)):
        batch = _batch(model, rows=rows)
        found.append(_run(model, batch, requests, eager=eager, draw=random.Random(rows)))
    assert {n: each[0] for n, each in found[0].items()} == {n: each[0] for n, each in found[1].items()}
    assert len({tuple(each[0]) for each in found[0].values()}) > 3


def test_a_request_leaves_when_it_is_cancelled() -> None:
    model = _model("full")
    batch = _batch(model, rows=2)
    for number in range(3):
        _add(batch, Request(number=number, tokens=[9 + number], fields={"max_new_tokens": 6, "eos_token_id": -1}))
    finishes = {}
    for turn in range(20):
        if turn == 3:
            batch.cancel([0, 7])
        if batch.plan(eager=True) is not ForwardKind.IDLE:
            with torch.no_grad():
                batch.append(batch.choose(model(**batch.inputs()).logits[:, -1]))
            batch.remove_ended()
        finishes |= {each.number: each.finish for each in batch.progress() if each.finish}
    assert finishes == {0: "cancelled", 1: "length", 2: "length"}
    assert not batch.busy


def test_the_cache_has_a_bound() -> None:
    model, draw = _model("full"), random.Random(2)
    requests = [Request(number=n, tokens=[8 + n] * 10, fields={"max_new_tokens": 10}) for n in range(6)]
    batch = _batch(model, rows=6, prefill_tokens=512, cache_tokens=45)
    made = _run(model, batch, requests, eager=True, draw=draw)
    assert all(finish for *_, finish in made.values())
    assert batch._cache.columns.width == 0, "all rows have left"


def test_what_cannot_join_a_running_batch_is_named() -> None:
    model = _model("full")
    known = ModelSettings(model, None)
    assert "beam_search" in known.why_unbatched(known.for_request({"num_beams": 2}, 3))
    mamba = tf.MambaForCausalLM(tf.MambaConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1))
    other = ModelSettings(mamba, None)
    assert "Mamba" in other.why_unbatched(other.for_request({}, 3))
    drawn = known.for_request({"do_sample": True}, 3)
    assert known.why_unbatched(drawn) == ""
    model.model.layers[0].self_attn.is_causal = False
    assert "later tokens" in ModelSettings(model, None).why_unbatched(drawn)


@pytest.mark.parametrize(
    ("lengths", "cache_tokens", "rows"),
    [
        ([10, 20, 5], 1 << 30, 3),
        ([10, 21, 4], 1 << 30, 1),
        ([10, 21, 20, 4, 5], 1 << 30, 3),
        ([10, 10, 10], 3 * 16, 3),
        ([10, 10, 10], 3 * 16 - 1, 2),
        ([10], 1, 1),
    ],
)
def test_prompts_up_to_twice_a_length_join_within_the_cache(lengths: list[int], cache_tokens: int, rows: int) -> None:
    batch = _batch(_model("full"), rows=8, prefill_tokens=1000, cache_tokens=cache_tokens)
    for number, length in enumerate(lengths):
        fields = {"max_new_tokens": 6, "eos_token_id": -1}
        _add(batch, Request(number=number, tokens=[9] * length, fields=fields))
    assert batch.plan(eager=True) is ForwardKind.PREFILL
    assert batch.shape()[0] == rows
    # Of each request 6 new tokens; of all prompts one forward, and one for each that does not share it.
    assert (batch.open_tokens, batch.most_forwards()) == (sum(lengths) + 6 * len(lengths), 7 * len(lengths) + 1)


@pytest.mark.parametrize(
    ("running", "waiting", "eager", "rows"), [(14, 3, False, 16), (15, 3, False, 15), (15, 3, True, 16), (15, 1, False, 16)]
)
def test_requests_join_when_an_eighth_of_the_rows_is_free(running: int, waiting: int, eager: bool, rows: int) -> None:
    batch = _batch(_model("full"), rows=16)
    for number in range(running + waiting):
        _add(batch, Request(number=number, tokens=[9], fields={"max_new_tokens": 6 + number, "eos_token_id": -1}))
        if number == running - 1:
            batch.plan(eager=True)
    batch.plan(eager=eager)
    assert batch.shape() == (rows, 1)
    assert (batch.steady_forwards(fewest=2), batch.steady_forwards(fewest=9)) == (6, 9)


def _forward(batch: RunningBatch, model: Any, *, eager: bool = True) -> ForwardKind:
    kind = batch.plan(eager=eager)
    with torch.no_grad():
        batch.append(batch.choose(model(**batch.inputs()).logits[:, -1]))
    return kind


def test_prefill_and_decode_alternate_while_a_long_prompt_joins() -> None:
    model = _model("full")
    batch = _batch(model, rows=2, prefill_tokens=4)
    _add(batch, Request(number=0, tokens=[9], fields={"max_new_tokens": 20, "eos_token_id": -1}))
    assert _forward(batch, model) is ForwardKind.DECODE
    _add(batch, Request(number=1, tokens=[9] * 10, fields={"max_new_tokens": 3, "eos_token_id": -1}))
    assert batch.progress()[0].tokens == batch._running[0].tokens[1:]
    kinds, computed, steady = [], [], []
    for _ in range(7):
        kinds.append(_forward(batch, model).value)
        computed.append(batch.computed)
        steady.append(batch.steady_forwards(fewest=3))
    assert kinds == ["prefill", "decode", "prefill", "decode", "prefill", "decode", "decode"]
    assert steady == [1, 1, 1, 1, 1, 3, 3]
    assert computed == [5, 6, 10, 11, 12, 14, 16]
    assert [(each.number, len(each.tokens), each.finish) for each in batch.progress()] == [(0, 4, None), (1, 2, None)]


@pytest.mark.parametrize(
    ("news", "tokens", "finish"),
    [
        ([(7, -1.0), (8, -2.0)], [7, 8], None),
        ([(7, -1.0), (8, -2.0), (9, -3.0), (7, -1.0)], [7, 8, 9], "length"),
        ([(7, -1.0), (5, -2.0), (9, -3.0)], [7, 5], "stop"),
        ([(7, -1.0), (8, -2.0), (6, -3.0)], [7, 8, 6], "stop"),
        ([(7, -1.0), (8, float("nan")), (9, -3.0)], [7], "not_finite"),
        ([(5, -1.0), (8, float("nan"))], [5], "stop"),
    ],
)
def test_a_row_ends_once(news: list[tuple[int, float]], tokens: list[int], finish: str | None) -> None:
    batch = _batch(_model("full"), rows=1)
    _add(batch, Request(number=3, tokens=[1], fields={"max_new_tokens": 3, "eos_token_id": [5, 6]}))
    batch.plan(eager=True)
    (row,) = batch._running
    for token, logprob in news:
        row.add(token, logprob)
    assert row.budget == (0 if finish else 3 - len(tokens))
    batch.remove_ended()
    assert batch.busy == (finish is None)
    (found,) = batch.progress()
    wanted = [logprob for _, logprob in news[: len(tokens)]]
    assert (found.number, found.tokens, found.logprobs, found.finish) == (3, tokens, wanted, finish)
    assert batch.progress() == []


def test_waiting_and_finished_requests_may_be_cancelled() -> None:
    batch = _batch(_model("full"), rows=2)
    for number in range(4):
        _add(batch, Request(number=number, tokens=[9], fields={"max_new_tokens": 9, "eos_token_id": 5}))
    batch.plan(eager=True)
    batch._running[0].add(5, -1.0)
    batch._running[1].add(8, -1.0)
    # The first row has ended, and its place counts no more.
    assert (batch.steady_forwards(fewest=2), batch.open_tokens, batch.most_forwards()) == (8, 28, 8 + 18 + 3)
    batch.cancel([0, 2])
    found = {each.number: (each.tokens, each.finish) for each in batch.progress()}
    assert found == {0: ([5], "stop"), 1: ([8], None), 2: ([], "cancelled")}
    batch.plan(eager=True)
    assert (batch.shape(), batch.open_tokens) == ((2, 1), 8 + 9)


def test_a_forward_asks_for_what_generation_needs() -> None:
    model = _model("full")
    batch = _batch(model, rows=2)
    idle = {"use_cache": False, "return_dict": True, "logits_to_keep": 1}
    batch.plan(eager=True)
    inputs = batch.inputs()
    assert {name: inputs[name] for name in inputs.keys() & idle.keys()} == idle
    assert [inputs[name].tolist() for name in ("input_ids", "attention_mask", "position_ids")] == [[[0]], [[1]], [[0]]]
    assert "past_key_values" not in inputs
    model.config.output_router_logits = True
    batch = _batch(model, rows=2)
    _add(batch, Request(number=0, tokens=[9, 8, 7], fields={"max_new_tokens": 2}))
    assert batch.plan(eager=True) is ForwardKind.PREFILL
    inputs = batch.inputs()
    assert (inputs["use_cache"], inputs["output_router_logits"], inputs["logits_to_keep"]) == (True, False, 1)
    assert [inputs[name].tolist() for name in ("input_ids", "position_ids")] == [[[9, 8]], [[0, 1]]]
    assert batch.choose(torch.ones(1, 48)).tolist() == [[0], [0]]


@pytest.mark.parametrize(
    ("running", "lengths", "cache_tokens", "rows"),
    [
        ([], [10, 20], 2 * 26, 2),
        ([], [10, 20], 2 * 26 - 1, 1),
        ([], [20, 10], 2 * 26 - 1, 1),
        ([20], [10], 2 * 26 - 2, 1),
        ([20], [10], 2 * 25 - 1, 0),
        ([], [10, 21, 21, 21, 10, 10], 1 << 30, 1),
        ([], [10, 21, 21, 10, 10, 10], 1 << 30, 2),
    ],
)
def test_joining_requests_fit_beside_running_ones(running: list[int], lengths: list[int], cache_tokens: int, rows: int) -> None:
    """Of a row's tokens in the cache and of those to come, times the rows; of twice as many as there are free rows."""
    model = _model("full")
    batch = _batch(model, rows=2, prefill_tokens=1000, cache_tokens=cache_tokens)
    for number, length in enumerate([*running, *lengths]):
        if number == len(running) and running:
            assert _forward(batch, model) is ForwardKind.PREFILL
            assert batch.plan(eager=True) is ForwardKind.DECODE
        _add(batch, Request(number=number, tokens=[9] * length, fields={"max_new_tokens": 6, "eos_token_id": -1}))
    batch.plan(eager=True)
    assert len(batch._joining) == rows
