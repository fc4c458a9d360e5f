"""Frozen experts that are kept encoded, on the host or in files, beside plain ones with the values that they have."""

from collections.abc import Mapping
from typing import Any

import peft
import torch
import transformers as tf

from tests.distributed.trainer.expert_cases import KINDS
from tests.support.architecture_cases import differences
from tests.support.trainer_cases import seeded, sentences
from zeromesh.flat.codec import CODECS, Codec
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.settings.keys import CodecName

TARGETS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "experts": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}


def adapted(kind: str, targets: str) -> Any:
    model = seeded(KINDS[kind])
    torch.manual_seed(13)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **TARGETS[targets]))


def rounded(model: Any, name: CodecName | None) -> Any:
    """The model with the values of a codec in the frozen matrices of its linear layers and experts, but the head's."""
    for key, parameter in model.named_parameters() if name is not None else ():
        module = model.get_submodule(key.rpartition(".")[0])
        linear = hasattr(module, "in_features") and key.endswith("weight") and "lm_head" not in key
        experts = parameter.dim() == 3 and "bias" not in key
        if not parameter.requires_grad and (linear or experts):
            codec = Codec(name=name, block=CODECS[name].block, nested=name != "fp8")
            parameter.data = codec.rounded(parameter.data)
    return model


def trained(
    mesh: Mesh,
    folder: str,
    kind: str = "qwen",
    targets: str = "experts",
    stage: int = 3,
    weights: CodecName | None = "nf4",
    **sections: Mapping[str, Any],
) -> None:
    """Losses, gradients' norms, adapters and evaluation, as of a plain loop over the decoded values."""
    pair = adapted(kind, targets), rounded(adapted(kind, targets), weights)
    given = {"zero": {"stage": stage, "gathered_budget": 0}, "model": {"weights": weights}}
    found = differences(folder, "fetched", pair, sentences(), **(given | sections))
    bound = 1e-6 if kind == "biased" else 1e-9  # It chooses experts in float32.
    assert all(value <= bound for value in found.values()), found


class _Reads(Callback):
    """Which experts were read in each step, of each module, and that none was gathered whole."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[str, tuple[int, ...]]]] = [[]]
        self.bytes = 0

    def watch(self) -> Callable[[], None]:
        load = fetch._Group._load

        def watched(group: Any) -> Any:
            found = load(group)
            self.steps[-1].append((group._owner._buckets[0].spec.experts, tuple(group.chosen)))
            return found

        return override(vars_of(fetch._Group), "_load", watched)

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        engine = trainer.engine
        assert engine is not None
        fetched = {unit.index for unit in engine.units if unit.is_fetched}
        assert len(fetched) == 2
        assert not fetched & {index for order in engine._passes._orders.values() for index in order}
        self.steps.append([])
