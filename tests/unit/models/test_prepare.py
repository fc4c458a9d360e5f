"""Changes of a model before training: how attention is computed, and products in float8.

Flash attention has no CPU kernel: a stand-in has transformers' own function call it, and computes what such a kernel does.
"""

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import zeromesh
from tests.support.architectures import small_model
from tests.support.text_files import one_rank
from zeromesh.errors import ConfigError
from zeromesh.offload import accelerator
from zeromesh.trainer.attention.packed_attention import PackedAttention
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.models import prepare

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
STAND_IN = "stand_in_for_flash"
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7]])


def llama(**fields: Any) -> Any:
    torch.manual_seed(0)
    return small_model("llama", hidden_size=16, num_attention_heads=2, vocab_size=32, use_cache=False, **fields)


@pytest.mark.parametrize(
    ("name", "device", "compute", "packages", "words"),
    [
        ("flash_attention_2", CPU, torch.bfloat16, True, "this run on CPU; take sdpa"),
        ("flash_attention_2", GPU, torch.float32, True, "precision.compute is float32"),
        ("flash_attention_2", GPU, torch.bfloat16, False, "pip install flash-attn"),
        ("flash_attention_3", GPU, torch.bfloat16, False, "pip install flash-attn-3"),
        ("flex_attention", CPU, torch.bfloat16, True, "no backward on CPUs"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: Any, device: torch.device, compute: torch.dtype, packages: bool, words: str
) -> None:
    monkeypatch.setattr(prepare, "is_kernels_available", lambda: packages)
    with pytest.raises(ConfigError, match=words):
        prepare.use_attention(llama(), name, compute, device)


def test_the_choice_is_made_and_undone() -> None:
    model = llama()
    undo = prepare.use_attention(model, "eager", torch.float32, CPU)
    assert model.model.layers[0].self_attn.config._attn_implementation == "eager"
    undo()
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ConfigError, match="no model of transformers"):
        prepare.use_attention(torch.nn.Linear(2, 2), "eager", torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"allowed .*eager.*sdpa.*flash_attention_2.*flash_attention_3.*flex"):
        load_config({"model": {"attention": "fast"}})


def test_flex_attention_gets_a_mask_of_blocks_by_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.masking_utils.create_block_mask", lambda mask_mod, **_: SimpleNamespace(mask_mod=mask_mod))
    made = create_causal_mask(
        config=llama(attn_implementation="flex_attention").config,
        inputs_embeds=torch.zeros(2, 8, 16),
        attention_mask=None,
        past_key_values=None,
        position_ids=POSITIONS,
    )
    at = torch.arange(8)
    for row, expected in enumerate(([1, 2, 3, 1, 2, 3, 4, 1], [1, 2, 3, 4, 5, 6, 7, 8])):
        seen = made.mask_mod(torch.tensor(row), torch.tensor(0), at[:, None], at[None, :])
        assert seen.sum(1).tolist() == expected


def by_documents(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **told: Any) -> tuple[Any, None]:
    """What flash attention computes of sequences, or of the documents that it is told of."""
    assert mask is None
    rows, heads, length, size = q.shape
    ends = told["cu_seq_lens_q"] if "cu_seq_lens_q" in told else length * torch.arange(rows + 1)
    if "cu_seq_lens_q" in told:
        assert ends.dtype == torch.int32
        assert told["max_length_q"] == told["max_length_k"] == int(ends.diff().max())
        SEEN.append(len(ends) - 1)
    flat = [each.transpose(1, 2).reshape(rows * length, -1, size).transpose(0, 1) for each in (q, k, v)]
    cut = [[each[None, :, start:end] for each in flat] for start, end in pairwise(ends.tolist())]
    parts = [nn.functional.scaled_dot_product_attention(*each, is_causal=True, scale=scaling) for each in cut]
    return torch.cat(parts, dim=2)[0].transpose(0, 1).reshape(rows, length, heads, size), None


SEEN: list[int] = []
"""The documents of each call that was told of them."""


@pytest.fixture
def stand_in() -> Iterator[None]:
    tf.AttentionInterface.register(STAND_IN, by_documents)
    tf.AttentionMaskInterface.register(STAND_IN, flash_attention_mask)
    yield
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        functions._global_mapping.pop(STAND_IN)
    SEEN.clear()


@pytest.mark.usefixtures("stand_in")
def test_flash_attention_trains_on_packed_documents_as_sdpa_does(tmp_path: Path) -> None:
    ids = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": each, "labels": each, "position_ids": POSITIONS[n % 2]} for n, each in enumerate(ids)]
    losses = {}
    for name in ("sdpa", STAND_IN):
        sections = {"batch": {"global_size": 4}, "run": {"name": name}, "data": {"shuffle": False}}
        model = llama()
        model.config._attn_implementation_internal = name  # transformers would import a package of the name.
        with one_rank(tmp_path, model, data, precision={"compute": "float32"}, **sections) as trainer:
            losses[name] = trainer.fit().losses
    # Each layer, microbatch and step: three documents in one sequence, one in the other.
    assert SEEN == [4] * (2 * 2 * 2)
    assert losses[STAND_IN] == pytest.approx(losses["sdpa"], rel=1e-6)


def test_batches_without_packed_documents_stay_as_they_are() -> None:
    flash = SimpleNamespace(_attn_implementation="flash_attention_2")
    model = llama()
    batch = {"position_ids": POSITIONS}
    told = lambda batch: PackedAttention(batch, model).told()  # noqa: E731
    assert told(batch) is batch  # sdpa
    object.__setattr__(model, "config", flash)
    for other in ({"input_ids": POSITIONS}, {"position_ids": POSITIONS[1:]}, {"position_ids": POSITIONS.expand(3, 2, 8)}):
        assert told(other) is other
    assert told(batch)["cu_seq_lens_q"].tolist() == [0, 3, 7, 8, 16]
    padded = told({**batch, "attention_mask": (torch.arange(16).view(2, 8) < 14).long()})
    assert padded["cu_seq_lens_q"].tolist() == [0, 3, 7, 8, 14, 16]
    assert "attention_mask" not in padded
    assert told({"position_ids": POSITIONS + 5})["cu_seq_lens_k"].tolist() == [0, 3, 7, 8, 16]


def test_attention_that_documents_do_not_reach_is_refused() -> None:
    model = llama()
    object.__setattr__(model, "config", SimpleNamespace(_attn_implementation="somebodys_own"))
    batch = {"position_ids": POSITIONS}
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM\.forward hands nothing on to somebodys_own"):
        PackedAttention(batch, model).told()


def test_selective_recomputation_keeps_results_of_flash_attention() -> None:
    assert {"flash_attn::_flash_attn_varlen_forward", "flash_attn_3::_flash_attn_forward"} <= set(prepare._KEPT_OPERATORS)


IDS = torch.arange(44).reshape(2, 22) % 64


class RoundedLinear(nn.Linear):
    """Multiplies what float8 can represent."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kept = [each + (each.to(torch.float8_e4m3fn).to(each.dtype) - each).detach() for each in (input, self.weight)]
        return nn.functional.linear(*kept, self.bias)


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """torchao, or as much of it as is used here, which multiplies in float8 on a CPU."""
    try:
        import torchao.float8 as package
    except ImportError:
        package = ModuleType("torchao.float8")

        def convert(module: nn.ModuleList, *, config: Any) -> nn.ModuleList:
            assert config == {"pad_inner_dim": True}
            for index, layer in enumerate(module):
                module[index] = RoundedLinear(layer.in_features, layer.out_features, device="meta")
                module[index].weight, module[index].bias = layer.weight, layer.bias
            return module

        vars(package).update(Float8LinearConfig=dict, convert_to_float8_training=convert)
        monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
        monkeypatch.setitem(sys.modules, "torchao.float8", package)
    else:
        config = package.Float8LinearConfig
        monkeypatch.setattr(package, "Float8LinearConfig", lambda **given: config(emulate=True, **given))
    monkeypatch.setattr(prepare, "multiplies_float8", lambda device: True)
    return package


def wide_llama(hidden: int = 64) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 128, "vocab_size": 64}
    return small_model("llama", **sizes, use_cache=False).bfloat16().train()


def losses(model: Any, optimizer: Any) -> list[float]:
    found = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def test_layers_compute_as_those_of_torchao_and_keep_their_names(torchao: ModuleType) -> None:
    model, converted, plain = wide_llama(), wide_llama(), wide_llama()
    for parent in [module for layer in converted.model.layers for module in layer.modules()]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                config = torchao.Float8LinearConfig(pad_inner_dim=True)
                setattr(parent, name, torchao.convert_to_float8_training(nn.ModuleList([child]), config=config)[0])
    names, put_back = list(model.state_dict()), prepare.keep_attributes(model)
    assert prepare.use_float8_linear(model, CPU) == "products: 14 of 15 linear layers multiply in float8, by torchao"
    assert list(model.state_dict()) == names
    assert "forward" not in vars(model.lm_head)
    found = losses(model, sgd(model))
    assert found == losses(converted, sgd(converted))
    assert found != losses(plain, sgd(plain))
    put_back()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.usefixtures("torchao")
def test_stages_compute_alike() -> None:
    found = []
    for stage in (0, 3):
        model = wide_llama()
        found.append(losses(*zeromesh.shard(model, sgd(model), stage=stage, precision={"linear": "float8"})))
    plain = wide_llama()
    assert found[0] == found[1] != losses(*zeromesh.shard(plain, sgd(plain), stage=3))


class Unnamed(tf.LlamaForCausalLM):
    """It names neither of its embeddings, as some models of transformers do not."""

    def get_input_embeddings(self) -> Any:
        raise NotImplementedError

    get_output_embeddings = get_input_embeddings


@pytest.mark.usefixtures("torchao")
def test_a_model_that_names_no_embeddings_is_trained(tmp_path: Path) -> None:
    """On packed documents, which a trial tells apart, and by an optimizer that treats embeddings apart."""
    model, ids = Unnamed(llama().config), torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": each, "labels": each, "position_ids": POSITIONS[n % 2]} for n, each in enumerate(ids)]
    precision = {"compute": "bfloat16", "linear": "float8"}
    sections = {"batch": {"global_size": 8}, "optimizer": {"name": "muon"}, "precision": precision}
    with one_rank(tmp_path, model, data, **sections) as trainer:
        first, second = trainer.fit().losses
    assert second < first


@pytest.mark.usefixtures("torchao")
def test_a_model_without_layers_of_such_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision\.linear: Linear has no .* multiples of 16"):
        prepare.use_float8_linear(nn.Linear(20, 16), CPU)


def test_a_missing_package_is_named(torchao: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match="pip install torchao"):
        prepare.use_float8_linear(wide_llama(), CPU)


def test_a_run_on_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="this run computes on the CPU"):
        zeromesh.shard(wide_llama(), None, precision={"linear": "float8"})


@pytest.mark.parametrize(
    ("kind", "able"),
    [("sm_80", False), ("sm_86", False), ("sm_89", True), ("sm_90", True), ("sm_120", True)]
    + [("gfx90a", False), ("gfx942", True), ("gfx1100", False), ("gfx1201", True), ("", False)],
)
def test_devices_that_multiply_float8(monkeypatch: pytest.MonkeyPatch, kind: str, able: bool) -> None:
    monkeypatch.setattr(accelerator, "architecture", lambda device: kind)
    assert accelerator.multiplies_float8(torch.device("cuda", 0)) is able


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": {"compute": "float32"}}, "is for precision.compute bfloat16, not float32"),
        ({"parallel": {"tensor": 2}}, "parallel.tensor 2 divides them"),
        ({"parallel": {"pipeline": 2, "schedule": "zero_bubble"}}, "does not go with parallel.schedule zero_bubble"),
    ],
)
def test_what_float8_does_not_go_with_is_refused(settings: dict[str, Any], message: str) -> None:
    given = {**settings, "precision": {"linear": "float8", **settings.get("precision", {})}}
    with pytest.raises(ConfigError, match=message):
        load_config(given)
