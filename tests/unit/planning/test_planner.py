"""Plans: the fastest layout that fits stands first, none by hand beats it, and thousands of ranks take no more work than a few."""

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from model_zoo.small_models import small_model
from plan_bar import BARS, MODELS, tried
from torch import nn
from torch.utils.data import DataLoader

from tests.support.text_files import word_tokenizer
from tests.unit.planning.test_machine import MACHINE, MODEL, SMALL
from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError, DataError
from zeromesh.offload import Purpose, TierChoice
from zeromesh.optim.fused_optimizer import GroupRules
from zeromesh.telemetry.step_recorder import StepPhase
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.tokenizer import load_tokenizer
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.models.build import build_model
from zeromesh.trainer.planning import auto, estimate
from zeromesh.trainer.planning.auto import fixed_fields, plan_config, set_auto, subject_of
from zeromesh.trainer.planning.estimate import ACTIVATIONS, Estimator
from zeromesh.trainer.planning.layouts import FIELDS, Layout, with_layout
from zeromesh.trainer.planning.machine import Machine, find_machine
from zeromesh.trainer.planning.planner import Plan, Planner, memory_per_rank
from zeromesh.trainer.planning.report import plan_json, plan_lines
from zeromesh.trainer.planning.subject import Subject
from zeromesh.trainer.planning.tracing.trace import Tracer
from zeromesh.units.build import plan_layouts
from zeromesh.units.plan import ModelCuts, plan_model
from zeromesh.zero.memory_model import MemoryBytes, MemoryModel

_KEYS = (f"model.config={MODEL}", "data.sequence_length=32", "batch.global_size=8")
_HOST = TierChoice(tier="host")


def _config(*keys: str) -> TrainerConfig:
    return load_config(None, [*_KEYS, "precision.compute=float32", *keys])


def _on_card(*keys: str) -> Subject:
    return subject_of(load_config(None, [*_KEYS, *keys]), device="cuda")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(_config())


def test_a_tokenizer_of_the_hub_is_that_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found: list[int] = []
    (refs := tmp_path / "models--me--words/refs").mkdir(parents=True)
    (refs / "main").write_text("a" * 40)
    word_tokenizer(["a", "b", "<end>"], "a", eos_token="<end>").save_pretrained(refs.parent / "snapshots" / ("a" * 40))
    sizes = "model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2"
    for key, more in (("data.tokenizer=me/words", ""), ("data.tokenizer=bytes", ", vocab_size: 3")):
        found.append(subject_of(load_config(None, [f"model.config={{{sizes}{more}}}", key])).parameters)
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match="'me/other' is neither a directory here"):
        subject_of(load_config(None, [f"model.config={{{sizes}}}", "data.tokenizer=me/other"]))


@pytest.fixture(scope="module")
def on_card() -> Subject:
    return _on_card()


def _card(memory: float = 1 << 34, *, disk: bool = True) -> Machine:
    """A card with so much of the memory that a layout needs, on which libraries take none."""
    card = find_machine("a10", devices=2)
    device = card.device.model_copy(update={"memory_bytes": int(memory)})
    library = card.library.model_copy(update={"device": 0})
    return card.model_copy(update={"device": device, "library": library, "disk": card.disk if disk else None})


def _lines(plan: Plan) -> str:
    return "\n".join(plan_lines(plan))


def test_a_model_of_pictures_is_cut_as_its_own_data_show() -> None:
    small = small_model("vit", ("image_classification",))
    inputs = UserInputs(model=small.build(), train_dataset=small.samples)
    config = load_config(None, ["model.head=image_classification", "precision.compute=float32"])
    subject = subject_of(config, inputs, device="cpu")
    assert subject.mesh_refusal(pipeline=2) == ""
    assert subject.blocks == 4
    subject.close()


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (iter([1]), "a stream is not read before the run begins"),
        (DataLoader([1]), "train_dataset is a DataLoader, whose items are batches"),  # type: ignore[arg-type]
        ([], "train_dataset is empty"),
    ],
)
def test_a_plan_refuses_datasets_that_it_cannot_read_as_a_run_does(dataset: Any, words: str) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        subject_of(_config(), UserInputs(model=nn.Linear(1, 1), train_dataset=dataset, compute_loss=lambda *_: None))


def test_states_and_units_are_those_of_the_whole_model(subject: Subject) -> None:
    found = Estimator(subject, MACHINE, 2).estimate(Layout(shard=2, stage=2, micro=1, accumulation=4))
    options = replace(subject.zero, stage=2, accumulation=4)
    model = build_model(_config().model, 0, load_tokenizer("bytes")).model
    rules, compute = GroupRules(options.optimizer).group_of, options.precision.compute
    wanted = MemoryModel(plan_layouts(plan_model(model, compute, rules), 2), options, 2, "shared")
    for purpose in (Purpose.MASTER, Purpose.MOMENTS, Purpose.GRADIENTS, Purpose.GRADIENT_BUCKETS):
        # Small blocks are units of their own here, whose buckets are filled up each.
        assert found.device.get(purpose.value, 0) == pytest.approx(wanted.terms.get(purpose, 0), rel=0.02)
    # Each microbatch copies gradients to buckets, reduces them and adds its shard to sums; shared memory spreads the weights.
    number, units = subject.parameters, len(wanted.units)
    assert found.phases[StepPhase.OPTIMIZER] == pytest.approx(
        MACHINE.update_seconds(number / 2, ranks_on_host=2) + MACHINE.moved_seconds(2 * number, ranks_on_host=2), rel=0.02
    )
    reduced = units * MACHINE.collective_seconds("reduce-scatter", 4 * number / units, ranks=2, ranks_on_host=2)
    moved = MACHINE.moved_seconds(8 * number + 8 * number / 2, ranks_on_host=2)
    assert found.phases[StepPhase.COMMUNICATION] == pytest.approx(4 * (reduced + moved), rel=0.02)
    # Units that are gathered ahead are there together: a head stands after the blocks, and not beside the embedding.
    whole = plan_model(model, compute, rules, ModelCuts(chunks=2))
    assert [unit.module for unit in subject.units(1)] == [unit.module for unit in whole]


def test_a_plan_has_the_fastest_layout_first(subject: Subject) -> None:
    plan = Planner(subject, MACHINE).plan(2)
    places = [(float(f"{row.seconds:.3g}"), row.device_bytes) for row in plan.rows if row.fits]
    assert places[:40] == sorted(places)[:40]  # Schedules of later ones are not simulated.
    layouts = [row.layout for row in plan.rows]
    assert {(each.shard, each.tensor, each.pipeline) for each in layouts} == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}
    assert {each.schedule for each in layouts} == {"1f1b", "zero_bubble", "interleaved"}
    assert all(each.ranks == 2 for each in layouts)
    assert "the keys of the first row: parallel.pipeline=" in _lines(plan)
    assert len(plan_json(plan)) == len(plan.rows)


def test_a_budget_of_tokens_is_a_microbatch_of_as_many_full_samples() -> None:
    length = _config().data.sequence_length
    batch = ("batch.global_size=32", "zero.stage=1", "model.activation_checkpointing=none")
    fixed = {"stage": 1, "recompute": "none", "tensor": 1, "pipeline": 1, "replicate": 1}
    found = []
    for keys in ((f"batch.tokens={4 * length + 1}",), ("batch.micro_size=4",)):
        with closing(subject_of(_config(*batch, *keys))) as subject:
            given = {"micro": 4} if "micro" in keys[0] else {}
            best = Planner(subject, MACHINE, fixed=fixed | given).plan(2).rows[0]
            found.append((best.layout.micro, best.layout.accumulation, best.device[ACTIVATIONS]))
    assert [each[:2] for each in found] == [(1, 4), (4, 4)]
    assert found[0][2] == pytest.approx(found[1][2], rel=0.02)


def test_ranks_share_a_host_and_lose_a_twentieth_of_a_card() -> None:
    assert memory_per_rank(MACHINE, 2) == MemoryBytes(device=0, host=1 << 33, disk=1 << 42)
    card = memory_per_rank(_card(1000, disk=False), 2)
    assert card == MemoryBytes(device=950, host=64 << 30, disk=0)


def test_layouts_that_do_not_fit_say_what_they_lack(subject: Subject, on_card: Subject) -> None:
    host: Any = SMALL["host"] | {"memory_bytes": 2 << 20}  # type: ignore[operator]
    plan = Planner(subject, Machine.model_validate({**SMALL, "host": host, "disk": None})).plan(2)
    assert plan.best is None
    assert all("of 1.0 MiB, most of it" in row.why_not for row in plan.rows)
    assert "nothing fits" in _lines(plan)
    without = _lines(Planner(on_card, _card(disk=False)).plan(1))
    assert "states on files: not possible: the machine has no disk; add disk with read" in without
    assert "no disk" not in _lines(Planner(on_card, _card()).plan(1))


def test_more_samples_do_not_take_more_operations_but_where_a_loop_is_over_them() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 300, "n_positions": 128}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    keys = (f"model.config={config | ends}", "data.sequence_length=64", "batch.global_size=32")
    with closing(subject_of(load_config(None, [*keys, "precision.compute=float32"]), device="cpu")) as small:
        two, eight = (small.trace(1, micro, False, "none").segments[1].backward for micro in (2, 8))
    # Products of equal sizes follow each other with two samples, and not with one: that is no loop.
    assert eight.operations < 1.5 * two.operations
    of_two, of_eight = (sum(product.flops for product in each.products) for each in (two, eight))
    assert of_eight == 4 * of_two


def test_more_microbatches_keep_less(subject: Subject) -> None:
    estimator = Estimator(subject, MACHINE, 2)
    one, many = (estimator.estimate(Layout(micro=micro, accumulation=8 // micro, stage=1)) for micro in (1, 8))
    assert 7 < many.device[ACTIVATIONS] / one.device[ACTIVATIONS] < 9
    recomputed = estimator.estimate(Layout(micro=8, stage=1, recompute="block"))
    assert recomputed.device[ACTIVATIONS] < many.device[ACTIVATIONS] / 2
    assert recomputed.seconds > many.seconds


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_estimate_does_not_depend_on_those_before(subject: Subject, stage: int) -> None:
    used = Estimator(subject, MACHINE, 2)
    for layout in (Layout(shard=2, stage=stage, micro=micro, accumulation=n) for micro in (1, 2) for n in (1, 4)):
        assert used.estimate(layout) == Estimator(subject, MACHINE, 2).estimate(layout)


def test_parameters_on_the_host_come_for_forward_and_again_for_backward(on_card: Subject) -> None:
    card = _card()
    assert card.device.copies is not None
    layout = Layout(shard=2, prefetch=0, optimizer=_HOST, parameters=_HOST)
    one, two = (Estimator(on_card, card, 2).estimate(replace(layout, accumulation=count)) for count in (1, 2))
    further = two.phases[StepPhase.OFFLOAD_WAIT] - one.phases[StepPhase.OFFLOAD_WAIT]
    assert further * card.device.copies.to_device == pytest.approx(2 * one.host[Purpose.PARAMETERS.value], rel=1e-3)


def test_rows_that_a_plan_cannot_tell_apart_are_one(on_card: Subject) -> None:
    lines = plan_lines(Planner(on_card, find_machine("h100")).plan(2))
    steps = [line.split(" ms")[0].split()[-1] for line in lines[3:] if " ms" in line]
    assert len(set(steps)) >= len(steps) - 1  # The row with the least memory may have the time of another.
    assert "0.9" not in "\n".join(line for line in lines if "times as fast" in line)


@pytest.mark.parametrize(
    ("ranks", "fixed", "said"),
    [
        (3, {}, "3 ranks do not fill hosts of 2"),
        (2, {"tensor": 3}, "no layout has 2 ranks with tensor 3"),
        (2, {"replicate": 2, "shard": 2}, "no layout has 2 ranks with replicate 2, shard 2"),
    ],
)
def test_ranks_that_nothing_divides_are_one_error(subject: Subject, ranks: int, fixed: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Planner(subject, MACHINE, fixed=fixed).plan(ranks)


def test_given_keys_stay_as_they_are(subject: Subject) -> None:
    config = load_config(None, ["parallel.pipeline=2", "zero.stage=1", *_KEYS])
    fixed = fixed_fields(config, ["parallel.pipeline=2", "zero.stage", "run.seed"])
    assert fixed == {"pipeline": 2, "stage": 1}
    below = ["offload.optimizer.tier=file", "offload.optimizer.fraction=0.5", "offload.parameters.tier=host"]
    kept = fixed_fields(load_config(None, [*below, *_KEYS]), below)
    assert kept == {"optimizer": TierChoice(tier="file", fraction=0.5), "parameters": TierChoice(tier="host")}
    plan = Planner(subject, MACHINE, fixed=fixed).plan(2)
    assert {(row.layout.pipeline, row.layout.stage) for row in plan.rows} == {(2, 1)}
    for shard, replicas in ((1, 2), (2, 1)):
        plan = Planner(subject, MACHINE, fixed={"shard": shard, "tensor": 1, "pipeline": 1, "micro": 1}).plan(2)
        assert {row.layout.replicate for row in plan.rows} == {replicas}


def test_a_plan_holds_what_a_run_takes_alone() -> None:
    """Keys that a configuration joins to others leave layouts out."""

    def values(field: str, keys: tuple[str, ...], ranks: int = 2, memory: int = 1 << 34) -> set[Any]:
        rows = Planner(_on_card(*keys), _card(memory), fixed={"micro": 1}).plan(ranks).rows
        return {getattr(row.layout, field) for row in rows}

    assert {tier.tier for tier in values("activations", ("model.compile=true",), 1, 1 << 18)} == {"none"}
    inside = ("optimizer.in_backward=true", "run.clip_norm=0", "run.on_nonfinite=stop")
    assert "zero_bubble" not in values("schedule", inside)
    assert values("tensor", ("precision.linear=float8",)) == {1}


@pytest.mark.parametrize(
    ("keys", "given", "replicas"),
    [
        (("parallel.sync_every=10",), {"replicate": 2}, {(0, "whole"), (1, "whole"), (2, "whole"), (3, "whole")}),
        (("parallel.sync_every=10",), {"stage": 3}, {(3, "whole")}),
        (
            ("parallel.wire=int8", "zero.replicas=divided"),
            {"replicas": "divided"},
            {(1, "divided"), (2, "divided"), (3, "divided")},
        ),
    ],
)
def test_keys_about_replicas_leave_layouts_with_replicas(keys: tuple[str, ...], given: dict[str, Any], replicas: set[Any]) -> None:
    """Whatever is refused for a single replica is not so for several."""
    with closing(subject_of(_config("parallel.auto=[parallel]", "parallel.replicate=2", *keys))) as subject:
        rows = Planner(subject, MACHINE, fixed={"micro": 1, "tensor": 1, "pipeline": 1, **given}).plan(4).rows
    assert {row.layout.replicate for row in rows} == {2}
    assert {(row.layout.stage, row.layout.replicas) for row in rows} == replicas


def test_keys_of_a_layout_make_a_configuration() -> None:
    layout = Layout(pipeline=2, tensor=2, sequence=True, schedule="zero_bubble", stage=1, micro=2)
    config = load_config(None, ["parallel=auto", *_KEYS])
    assert config.parallel.auto == ("parallel",)
    settled = with_layout(config, layout, set(FIELDS))
    assert settled.parallel.auto == ()
    assert (settled.parallel.tensor, settled.parallel.schedule, settled.batch.micro_size) == (2, "zero_bubble", 2)
    moved = with_layout(config, Layout(optimizer=_HOST, parameters=TierChoice(tier="host", fraction=0.5))).offload
    assert moved.parameters.fraction == 0.5
    assert load_config(None, [*_KEYS, "zero.stage=3", "offload.optimizer=host"]).offload.optimizer == moved.optimizer


def test_auto_is_short_for_a_place_in_a_list() -> None:
    config = load_config(None, ["batch.micro_size=auto", "zero.stage=auto"])
    assert config.parallel.auto == ("batch.micro_size", "zero.stage")
    with pytest.raises(ConfigError, match=r"parallel\.auto"):
        load_config(None, ["parallel.auto=[run.seed]"])


def test_auto_takes_other_keys_where_nothing_else_fits(on_card: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, [*_KEYS, "parallel=auto", "batch.micro_size=8"])
    layout = Layout(stage=1, micro=8, recompute="block")
    needed = Planner(on_card, _card(1 << 40))._estimator.estimate(layout).device_bytes
    monkeypatch.setattr(auto, "machine_here", lambda *_: _card(needed / 0.95 + 64))
    settled, _ = set_auto(config, UserInputs(), read_environment())
    assert settled.batch.micro_size == 8
    assert settled.model.activation_checkpointing != "none"


@pytest.mark.parametrize(("ranks", "more"), [(1, 2), (2, 4)])
def test_what_more_would_bring_is_a_rank_or_where_hosts_are_full_a_host(
    monkeypatch: pytest.MonkeyPatch, ranks: int, more: int
) -> None:
    monkeypatch.setattr(auto, "machine_here", lambda *_: _card())
    fixed = ["zero.stage=3", "batch.micro_size=1", "model.activation_checkpointing=none"]
    plan, after = plan_config(load_config(None, [*_KEYS, *fixed]), fixed, ranks=ranks, more=True)
    assert after is not None
    assert (plan.ranks, after.ranks) == (ranks, more)


# States on a file beside parameters on the host; the others take too long here.
@pytest.mark.parametrize(
    "bar", [BARS[8], pytest.param(BARS[9], marks=pytest.mark.full)], ids=["8B on 16GB", "8B on 16GB with adapters"]
)
def test_a_plan_is_no_slower_than_a_layout_by_hand(bar: object) -> None:
    result = tried(bar)  # type: ignore[arg-type]
    assert not result.why_not
    assert not result.beaten


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_and_parameters_leave_one_card_as_they_leave_many(on_card: Subject, ranks: int) -> None:
    layout = Layout(shard=ranks, stage=3, accumulation=8 // ranks, recompute="block", optimizer=_HOST, parameters=_HOST)
    needed = Planner(on_card, _card(1 << 40))._estimator.estimate(layout)
    plan = Planner(on_card, _card(needed.device_bytes / 0.95 + 64)).plan(ranks)
    assert plan.best is not None
    assert plan.best.seconds <= needed.seconds
    assert plan.least.device_bytes == min(row.device_bytes for row in plan.rows if row.fits)
    assert str(plan.least.layout) in _lines(plan)


# Many ranks: traces, simulations and sums are counted, not timed.


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the dear parts of a plan are called."""
    found: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return call(*args, **kwargs)

        return counted

    parts = ((Tracer, "trace"), (Estimator, "_chunk"), (estimate, "MemoryModel"), (estimate, "simulate"))
    for owner, name in parts:
        monkeypatch.setattr(owner, name, counting(name, getattr(owner, name)))
    return found


@pytest.mark.parametrize(
    ("layers", "ranks", "fixed", "traces"),
    [
        # For 1, 2, 4 and 8 tensor ranks 1 and 2 samples, and once whether blocks can be recomputed.
        pytest.param(8, 8, {"recompute": "none"}, 4 * 2 + 1, id="8 layers", marks=pytest.mark.full),
        # For 1, 2, 4 and 8 tensor ranks: nothing, some or all recomputed; 1 and 2 samples.
        pytest.param(80, 512, {}, 4 * 3 * 2, id="80 layers", marks=pytest.mark.full),
    ],
)
def test_ranks_add_no_traces(calls: Counter[str], layers: int, ranks: int, fixed: dict[str, Any], traces: int) -> None:
    keys = ["data.sequence_length=4096", "batch.global_size=2048", "precision.compute=bfloat16"]
    model = {**MODELS["70B"], "num_hidden_layers": layers}
    planner = Planner(
        subject_of(load_config(None, [f"model.config={model}", *keys]), device="cuda"), find_machine("h100"), fixed=fixed
    )
    some = planner.plan(ranks)
    assert calls["trace"] == traces
    calls.clear()
    many = planner.plan(4096)
    assert calls["trace"] == 0
    assert many.best is not None
    assert many.best.layout.ranks == 4096
    assert len(many.rows) < 4096 / ranks * len(some.rows)
    # Few schedules are simulated, and what ranks and stages of many layouts have in common is worked out once.
    layouts = [row.layout for row in many.rows]
    assert 0 < calls["simulate"] <= 48
    assert calls["MemoryModel"] < sum(min(each.pipeline, 5) for each in layouts) / 4
    assert calls["_chunk"] < sum(each.pipeline * each.chunks for each in layouts) / 50
    if layers == 80:
        assert min(len(some.rows), len(many.rows)) > 5000


def test_no_tensor_is_divided_where_the_optimizer_needs_whole_ones() -> None:
    subject = subject_of(_config("optimizer.name=muon"))
    assert [subject.mesh_refusal(tensor=each) for each in (1, 2)] == ["", "muon needs whole tensors"]
    found = Estimator(subject, MACHINE, 2).estimate(Layout(shard=2, stage=2, micro=1, accumulation=4))
    # One state of matrices, and two of embedding and head.
    assert subject.parameters * 4 / 2 < found.device[Purpose.MOMENTS.value] < subject.parameters * 8 / 2
    subject.close()


@pytest.mark.parametrize(
    ("keys", "layout", "why"),
    [
        (["parallel.expert=2"], {"expert": 2}, "2 ranks cannot have equally many of no experts"),
        (["optimizer.name=muon", "experts"], {"expert": 2}, "muon needs whole tensors"),
        (["experts"], {"expert": 4, "shard": 4}, "4 ranks cannot have equally many of model.layers.0.mlp.experts"),
        (["experts"], {"expert": 2}, ""),
        (["recovery.audit_steps=10", "experts"], {"expert": 2}, "recovery.audit_steps compares data ranks"),
        (["recovery.audit_steps=10"], {"shard": 1}, "recovery.audit_steps compares data ranks"),
        (["recovery.audit_steps=10"], {}, ""),
        (["batch.balance=[3,1]"], {"shard": 4}, "batch.balance has 2 numbers, one for each data rank"),
        (["batch.balance=[3,1]"], {}, ""),
    ],
)
def test_what_a_run_refuses_for_its_experts_or_data_ranks_is_no_layout(keys: list[str], layout: dict[str, int], why: str) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    given = [f"model.config={ {**MODEL, **experts} }" if each == "experts" else each for each in keys]
    with closing(subject_of(_config(*given))) as subject:
        assert why in (found := subject.refusal(Layout(**{"shard": 2, "stage": 2, "micro": 2, **layout})))
        assert bool(found) == bool(why), found


def test_a_layout_that_cannot_be_traced_is_refused_alone() -> None:
    """Products of experts take rows of 16 bytes, which a width of 16 over 4 ranks has not in bfloat16."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = {**MODEL, **experts, "model_type": "qwen3_moe", "num_hidden_layers": 2}
    fixed = {"pipeline": 1, "stage": 1, "micro": 1, "recompute": "none", "prefetch": 1}
    keys = (f"model.config={model}", "data.sequence_length=32", "precision.compute=bfloat16")
    with closing(subject_of(load_config(None, [*keys]), device="cuda")) as moe:
        plan = Planner(moe, find_machine("a100"), fixed=fixed).plan(4)
        assert {row.layout.tensor for row in plan.rows} == {1, 2}
        (refused,) = (each for reason, each in plan.refused.items() if "multiple of 16 bytes" in reason)
        assert refused.startswith("tensor 4, ")


@pytest.mark.full
def test_experts_are_spread_where_tokens_take_fewer_bytes_than_their_weights() -> None:
    """Two gathers and a reduction of N experts' 3 f h weights against four ways of the rows of T tokens to k of them."""
    experts, chosen, width = 32, 2, 1024
    sizes = {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": width, "head_dim": 8}
    model = {**MODEL, **sizes, "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 2}
    turn = 9 * experts * width // (4 * chosen)
    found = {}
    for length in (turn // 64, 4 * turn):
        keys = (f"model.config={model}", f"data.sequence_length={length}", "batch.global_size=2")
        with closing(subject_of(load_config(None, [*keys]), device="cuda")) as moe:
            assert moe.expert_sizes(4) == [1, 2, 4]
            fixed = {"stage": 3, "micro": 1, "tensor": 1, "pipeline": 1, "recompute": "none"}
            rows = Planner(moe, _card(), fixed=fixed).plan(2).rows
            assert {row.layout.context for row in rows} == ({1, 2} if length > turn else {1})
            spread, whole = (next(row for row in rows if row.layout.expert == size) for size in (2, 1))
            found[length] = spread.phases[StepPhase.COMMUNICATION] < whole.phases[StepPhase.COMMUNICATION]
            assert spread.device[Purpose.MASTER.value] == pytest.approx(whole.device[Purpose.MASTER.value], rel=0.05)
            assert spread.device[estimate.GATHERED] < whole.device[estimate.GATHERED]
    assert list(found.values()) == [True, False]
