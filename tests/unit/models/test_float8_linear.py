"""Linear layers in float8: the layers that are changed, what they compute at every stage, and what is refused."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from tests.support.architectures import tiny
from zeromesh.errors import ConfigError
from zeromesh.offload import accelerator
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.models import prepare
from zeromesh.trainer.models.prepare import keep_attributes, use_float8_linear

CPU = torch.device("cpu")
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


def llama(hidden: int = 64) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 128, "vocab_size": 64}
    return tiny("llama", **sizes, use_cache=False).bfloat16().train()


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
    model, converted, plain = llama(), llama(), llama()
    for parent in [module for layer in converted.model.layers for module in layer.modules()]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                config = torchao.Float8LinearConfig(pad_inner_dim=True)
                setattr(parent, name, torchao.convert_to_float8_training(nn.ModuleList([child]), config=config)[0])
    names, put_back = list(model.state_dict()), keep_attributes(model)
    assert use_float8_linear(model, CPU) == "products: 14 of 15 linear layers multiply in float8, by torchao"
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
        model = llama()
        found.append(losses(*zeromesh.shard(model, sgd(model), stage=stage, precision={"linear": "float8"})))
    plain = llama()
    assert found[0] == found[1] != losses(*zeromesh.shard(plain, sgd(plain), stage=3))


@pytest.mark.usefixtures("torchao")
def test_a_model_without_layers_of_such_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision\.linear: Linear has no .* multiples of 16"):
        use_float8_linear(nn.Linear(20, 16), CPU)


def test_a_missing_package_is_named(torchao: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match="pip install torchao"):
        use_float8_linear(llama(), CPU)


def test_a_run_on_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="this run computes on the CPU"):
        zeromesh.shard(llama(), None, precision={"linear": "float8"})


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
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    given = {**settings, "precision": {"linear": "float8", **settings.get("precision", {})}}
    with pytest.raises(ConfigError, match=message):
        load_config(given)
