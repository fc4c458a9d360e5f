"""Stages in one process: what a model is made of, what a stage leaves of it, and models that cannot be cut."""

import copy
import inspect
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.without_zero import PlainRunner, cut_model
from model_zoo.small_models import small_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.conformance import models
from tests.support.architectures import TINY_VOCABULARY as VOCABULARY
from tests.support.architectures import tiny
from tests.support.pipeline_cases import alone, batches, build, loss_of
from zeromesh.comm.point_to_point import Channels, MessageSpec
from zeromesh.errors import LayoutError, PhaseError
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.pipeline.deferred_weight_grad import WeightQueue, defer_weights
from zeromesh.pipeline.executor import Executor, timelines
from zeromesh.pipeline.schedule import make_schedule
from zeromesh.pipeline.stages.build import Stages, block_costs, plan_cut, stubs_removed
from zeromesh.pipeline.stages.model_anatomy import body_inputs, examine
from zeromesh.telemetry.status_board import StatusBoard, new_row
from zeromesh.telemetry.watchdog import Watchdog

EARLIER = "is computed from parameters of earlier stages"
WATCH = Watchdog(StatusBoard({0: new_row()}, 0), 0, 1.0, compare_events=True)
ALONE = ProcessSet(name="pipeline", ranks=(0,), index=0, watch=WATCH, groups=None, one_host=True, works=None)


def test_an_anatomy_needs_no_memory() -> None:
    with torch.device("meta"):
        model = build("gpt2", 3)
    anatomy = examine(model)
    assert (anatomy.body, anatomy.blocks, anatomy.count) == ("transformer", "transformer.h", 3)
    assert anatomy.before == ("transformer.wte", "transformer.wpe")
    assert set(anatomy.after) == {"transformer.ln_f", "lm_head"}
    assert not any("forward" in vars(module) for module in model.modules())
    blocks, first, last = block_costs(model, anatomy)
    assert first == (VOCABULARY + 32) * 32
    assert last == VOCABULARY * 32 + 64
    assert len(set(blocks)) == 1


def test_a_model_in_training_stays_in_training() -> None:
    model = build("llama", 2).train()
    model.model.norm.eval()
    examine(model)
    assert model.training
    assert model.model.layers[1].mlp.training
    assert not model.model.norm.training


def run_by(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    """A stack with another forward, whose blocks may take a factor of their input."""
    model = models.stack()
    for block in model.blocks:
        block.forward = lambda x, factor=1.0, run=block.forward: run(x * factor)
    model.forward = partial(forward, model)
    return model


def per_layer_inputs(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Every block takes something from the embedding."""
    x = model.embedding(input_ids)
    first = x.exp() + 1
    for block in model.blocks:
        x = block(x, first)
    return x


def skip(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """The head takes the embedding as well."""
    x = embedded = model.embedding(input_ids)
    for block in model.blocks:
        x = block(x)
    return model.head(model.norm(x + embedded))


def scaled(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    x = model.embedding(input_ids)
    for block in model.blocks:
        x = block(x) * 0.5
    return model.head(model.norm(x))


def own_parameter() -> Any:
    model = models.stack()
    model.scale = nn.Parameter(torch.ones(()))
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny("t5"), "every decoder block needs the encoder's output"),
        (lambda: tiny("opt", layerdrop=0.1), "leaves out blocks at random"),
        (lambda: run_by(per_layer_inputs), f"block 1 takes its argument 2, which {EARLIER}"),
        (lambda: run_by(skip), f"norm takes what {EARLIER}"),
        (lambda: run_by(scaled), "block 1 does not take what the block before it returns"),
        (own_parameter, "scale is a parameter of a module that runs blocks"),
        (models.reused, r"run in the order \[0, 1, 0\]"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "no list of modules"),
        (lambda: Halving(early=True), f"head takes what {EARLIER}"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(make: Any, reason: str) -> None:
    with pytest.raises(LayoutError, match=f"cannot be cut into pipeline stages: .*{reason}"):
        examine(make())


class Halving(nn.Module):
    """Each block returns half of the features that it gets; `early`: the head takes what the first one returns, too."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        self.embedding, self.early = nn.Embedding(VOCABULARY, 32), early
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32 >> each, 16 >> each)) for each in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        seen = []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return self.head(x + seen[0][..., :4]) if self.early else self.head(x)


def test_blocks_that_change_the_shape_are_cut() -> None:
    torch.manual_seed(0)
    model = Halving()
    whole, anatomy = copy.deepcopy(model), examine(model)
    assert anatomy.reshapes
    assert not examine(build("llama", 2)).reshapes
    stages = Stages(model, anatomy, (1, 1, 1), [1])
    ids = torch.arange(4)[None]
    received = whole.blocks[0](whole.embedding(ids))
    with torch.no_grad():
        (sent,) = stages.forward(0, {"input_ids": ids}, [received])
    assert torch.equal(sent, whole.blocks[1](received))


class Embeddings(nn.Module):
    """Words, and their norm, which others take apart."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


class TakenApart(nn.Module):
    """It runs a list of layers before its blocks, and the words of its embeddings without these."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.early = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(self.embeddings.words(input_ids))
        for block in (*self.early, *self.blocks):
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_modules_whose_parts_run_without_them_are_taken_apart() -> None:
    torch.manual_seed(0)
    model = TakenApart()
    whole, anatomy = copy.deepcopy(model), examine(model)
    assert set(anatomy.before) == {"early.0", "early.1", "embeddings.words", "embeddings.norm"}
    stages = Stages(model, anatomy, (1, 2), [1])
    ids = torch.arange(4)[None]
    x = whole.embeddings(whole.embeddings.words(ids))
    with torch.no_grad(), stages.chunk(0, [whole.blocks[0](whole.early[1](whole.early[0](x)))]):
        assert torch.equal(model(ids), whole(ids))
    model = TakenApart()
    model.embeddings.register_parameter("scale", nn.Parameter(torch.ones(8)))
    said = r"embeddings\.scale is a parameter of a module of which parts run without it"
    with pytest.raises(LayoutError, match=said):
        examine(model)


def test_the_towers_of_a_model_run_before_the_blocks_of_its_decoder() -> None:
    small = small_model("llava", ("image_text_to_text",))
    batch = {name: torch.stack([row[name] for row in small.samples[:2]]) for name in small.samples[0]}
    anatomy = examine(small.build(), batch)
    assert anatomy.blocks == "model.language_model.layers"
    before = {"model.vision_tower", "model.multi_modal_projector", "model.language_model.embed_tokens"}
    assert (set(anatomy.before), anatomy.idle) == (before, ())


def test_a_tower_that_no_batch_has_shown_is_refused_when_it_is_to_run() -> None:
    small = small_model("llava", ("image_text_to_text",))
    model = small.build()
    anatomy = examine(model)
    assert "model.vision_tower" in anatomy.idle
    stages = Stages(model, anatomy, (2, 2), [0])
    batch = {name: values[None] for name, values in small.samples[0].items()}
    with pytest.raises(LayoutError, match=r"model\.vision_tower did not run for the first batch"):
        stages.forward(0, batch)
    stages.restore()
    assert "forward" not in vars(model.model.vision_tower)


def test_a_stage_holds_its_own_parameters_alone_until_it_is_restored() -> None:
    whole = build("gpt2", 4)
    model = copy.deepcopy(whole)
    stages = Stages(model, examine(model), (1, 2, 1), [1])
    names = [name for name, _ in model.named_parameters()]
    assert {name.split(".")[2] for name in names} == {"1", "2"}
    assert len(names) == 2 * 12
    assert model.transformer.h[0].attn.embed_dim == 32, "stubs keep plain attributes"
    assert stages.stage_of("transformer.h.3.ln_1.weight") == 2
    assert stages.stage_of("transformer.wte.weight") == 0
    with pytest.raises(LayoutError, match=r"no stage has a parameter transformer\.bias"):
        stages.stage_of("transformer.bias")
    with torch.no_grad():
        (sent,) = stages.forward(0, batches(1)[0], [torch.zeros(1, 4, 32, dtype=torch.float64)])
    assert sent.isfinite().all()
    with stubs_removed(model):
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    stages.restore()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert model.lm_head.weight is model.transformer.wte.weight
    assert {p.device.type for p in model.transformer.h[3].parameters()} == {"meta"}
    assert torch.equal(model.transformer.h[2].mlp.c_fc.weight, whole.transformer.h[2].mlp.c_fc.weight)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_tie_is_whole_again_with_the_copy_that_the_stage_had(stage: int) -> None:
    model = build("gpt2", 2)
    weight = model.lm_head.weight
    stages = Stages(model, examine(model), (1, 1), [stage])
    names = [name for name, each in model.named_parameters() if each is weight]
    assert names == [held[stage] for held in stages.ties.values()]
    stages.restore()
    assert model.lm_head.weight is model.transformer.wte.weight is weight


@pytest.mark.parametrize("stage", [0, 1])
def test_a_module_that_stages_share_has_its_weights_in_each_and_is_one_again_afterwards(stage: int) -> None:
    model = build("shared", 2)
    shared, weight = model.model.layers[0].mlp, model.model.layers[0].mlp.up_proj.weight
    stages = Stages(model, examine(model), (1, 1), [stage])
    assert model.get_parameter(f"model.layers.{stage}.mlp.up_proj.weight") is weight
    with stubs_removed(model):
        assert model.get_parameter(f"model.layers.{1 - stage}.mlp.up_proj.weight").is_meta
    stages.restore()
    assert model.model.layers[0].mlp is model.model.layers[1].mlp is shared
    assert shared.up_proj.weight is weight


def test_a_balance_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral", 2)
    monkeypatch.delitem(inspect.unwrap(type(model).forward).__globals__, "load_balancing_loss_func")
    with pytest.raises(LayoutError, match="not known how it balances its experts"):
        cut_model(model, ranks=2, index=0)


@pytest.mark.parametrize(("name", "dtype"), [("gemma", torch.float64), ("mixtral", torch.float64), ("llama", torch.bfloat16)])
def test_all_stages_in_one_process(name: str, dtype: torch.dtype) -> None:
    """One rank with several chunks sends to itself; the same operators run, whatever the dtype."""
    whole = build(name, 4).to(dtype)
    model = copy.deepcopy(whole)
    stages = cut_model(model, ranks=1, index=0, chunks=3, counts=[1, 1, 2])
    data = batches(3)
    runner = PlainRunner(stages, data, loss_of)
    executor = Executor(Channels(ALONE, torch.device("cpu")))
    executor.run(make_schedule("interleaved", ranks=1, microbatches=3, chunks=3), runner)
    losses, wanted = alone(whole, data, 1.0)
    assert torch.equal(runner.losses.float(), losses)
    for parameter_name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if any(parameter_name in names for names in stages.ties):  # both ends add to it, in another order
            assert torch.allclose(grad, wanted[parameter_name], rtol=1e-9, atol=1e-12), parameter_name
        else:
            assert torch.equal(grad, wanted[parameter_name]), parameter_name


def test_what_an_action_has_received_is_freed_before_its_outputs_are_sent() -> None:
    received: list[weakref.ref[torch.Tensor]] = []
    held: list[list[bool]] = []

    def receive(*_: Any) -> Any:
        tensors = [torch.zeros(2), torch.zeros(2)]
        received.extend(map(weakref.ref, tensors))
        specs = [MessageSpec.of(each) for each in tensors]
        return SimpleNamespace(wait=lambda: ([tensors.pop(0), tensors.pop(0)], specs))

    group: Any = SimpleNamespace(size=3, index=1, watch=WATCH, on_stream=False, require_same=lambda *_, **__: None)
    channels: Any = SimpleNamespace(device=torch.device("cpu"), group=group, receive=receive)
    channels.advance = channels.wait_for_sends = lambda: None
    channels.send = lambda *_: held.append([each() is not None for each in received])
    runner: Any = SimpleNamespace(signature=lambda number: number, run=lambda action, given: [torch.ones(2)])
    Executor(channels).run(make_schedule("gpipe", ranks=3, microbatches=1), runner)
    assert held == [[False] * 2, [False] * 4]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "mixtral"])
def test_multiplications_are_those_that_torch_counts(name: str) -> None:
    model, tokens = build(name, 4).float(), torch.randint(0, 30, (1, 6))
    anatomy = examine(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=tokens)
    counts = counter.get_flop_counts()

    def counted(module: str) -> float:
        found = {str(operator): n for operator, n in counts.get(f"{type(model).__name__}.{module}", {}).items()}
        return sum(n for name, n in found.items() if "mm" in name and "bmm" not in name) / (2 * tokens.numel())

    blocks, before, after = block_costs(model, anatomy, "flops")
    assert blocks == [counted(f"{anatomy.blocks}.{index}") for index in range(anatomy.count)]
    assert before == 0.0
    assert after == sum(map(counted, anatomy.after)) > 0.0


def test_a_large_head_has_fewer_blocks_beside_it() -> None:
    with torch.device("meta"):
        model = tiny("llama", num_hidden_layers=6, vocab_size=2000)
    anatomy = examine(model)
    costs = block_costs(model, anatomy)
    assert plan_cut(costs, 2) == (3, 3)
    assert plan_cut(costs, 2, [1, 5]) == (1, 5)
    for counts, text in (([2, 1], "has 3 of them, the model 6"), ([1, 1, 4], "has 3 stages"), ([6, 0], "at least 1")):
        with pytest.raises(LayoutError, match=text):
            plan_cut(costs, 2, counts)
    assert plan_cut(block_costs(model, anatomy, "flops"), 2) == (5, 1)


def test_a_cut_of_a_model_is_refused_where_it_does_not_fit() -> None:
    with pytest.raises(LayoutError, match="4 blocks cannot be cut into 6 pipeline stages"):
        cut_model(build("llama", 4), ranks=3, index=0, chunks=2)
    with pytest.raises(LayoutError, match="has 3 of them, the model 4"):
        cut_model(build("llama", 4), ranks=2, index=0, counts=[1, 2])


def test_only_the_names_that_a_body_takes_are_given_to_it() -> None:
    model = build("llama", 1)
    batch = {"input_ids": 1, "labels": 2, "logits_to_keep": 3, "cu_seq_lens_q": 4}
    assert body_inputs(model, model.model, batch) == {"input_ids": 1, "cu_seq_lens_q": 4}
    assert body_inputs(model, model, batch) == {name: value for name, value in batch.items() if name != "labels"}
    halving = Halving()
    assert body_inputs(halving, halving, {"input_ids": 1}) == {"input_ids": 1}


class Twice(nn.Module):
    """A layer used twice, one whose weight is shared, one whose input has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.tied, self.other = (nn.Linear(4, 4) for _ in range(4))
        self.other.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.again(torch.tanh(self.again(x))))
        return self.other(torch.tanh(self.tied(x))).square().sum()


def test_deferred_weights_are_the_same_and_arrive_once() -> None:
    torch.manual_seed(0)
    whole = Twice().double()
    model = copy.deepcopy(whole)
    queue = WeightQueue()
    put_back = defer_weights(model, [model], queue)
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _p, name=name: arrived.append(name))
    x = torch.randn(3, 4, dtype=torch.float64)
    whole(x).backward()
    with queue.deferring(5):
        model(x).backward()
    at_once = set(arrived)
    queue.run(5)
    assert "again.weight" not in at_once
    assert {"first.weight", "tied.weight", "again.bias"} <= at_once
    assert sorted(arrived) == sorted(name for name, _ in model.named_parameters())
    for (name, found), (_, wanted) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.allclose(found.grad, wanted.grad, rtol=1e-12), name
    with pytest.raises(PhaseError, match="its backward has not run"):
        queue.run(5)
    with pytest.raises(PhaseError, match="outside of `deferring`"):
        model(x).backward()
    put_back()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_measured_bubble() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    late = 3.0
    times = [
        [0, 1, 1, 2, 3 + late, 5 + late, 6 + late, 8 + late],
        [1 + late, 2 + late, 2 + late, 4 + late, 4 + late, 5 + late, 5 + late, 7 + late],
    ]
    predicted, measured = timelines(schedule, times)
    assert predicted.bubble == pytest.approx(1 / 3)
    assert measured.duration == 11
    assert measured.bubble == pytest.approx(1 - 6 / 11)
