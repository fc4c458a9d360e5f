"""Frozen experts that are kept encoded, on the host or in files, beside plain ones with the values that they have."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import torch

from tests.distributed.trainer.encoded_cases import Peak
from tests.distributed.trainer.expert_cases import KINDS
from tests.support.architecture_cases import differences
from tests.support.plain import calling, compare, plain_fit
from tests.support.trainer_cases import seeded, sentences, settings
from zeromesh import Callback, Generator, Trainer
from zeromesh.experts import fetch
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
    most: int = fetch.GROUP_BYTES,
    kept: str = "none",
    **sections: Mapping[str, Any],
) -> None:
    """Losses, gradients' norms, adapters and evaluation, as of a plain loop over the decoded values."""
    pair = adapted(kind, targets), rounded(adapted(kind, targets), weights)
    model = {"weights": weights, "activation_checkpointing": kept}
    with patch.object(fetch, "GROUP_BYTES", most):
        zero = {"stage": stage, "gathered_budget": 0}
        found = differences(folder, "fetched", pair, sentences(), zero=zero, model=model, **sections)
    bound = 1e-6 if kind == "biased" else 1e-9  # It chooses experts in float32.
    assert all(value <= bound for value in found.values()), found


@contextmanager
def watched() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Yield what is brought inside the block, in order: modules, and the numbers of their experts."""
    found: list[tuple[str, tuple[int, ...]]] = []
    load = fetch._Group._load

    def watch(group: Any) -> Any:
        found.append((group._owner._buckets[0].spec.experts, tuple(group.chosen)))
        return load(group)

    with patch.object(fetch._Group, "_load", watch):
        yield found


class _Gathered(Callback):
    """None of the units that are fetched is gathered."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        engine = trainer.engine
        assert engine is not None
        fetched = {unit.index for unit in engine.units if unit.is_fetched}
        assert len(fetched) == 2
        assert not fetched & {index for order in engine._passes._orders.values() for index in order}


def brought(mesh: Mesh, folder: str, kept: str, most: int, times: int) -> None:
    """Only the experts that tokens chose are read, in each pass once; each alone where no more fit. All tokens choose two."""
    config = settings(
        folder,
        model={"weights": "nf4", "activation_checkpointing": kept},
        offload={"parameters": "file"},
        zero={"stage": 3},
        run={"max_steps": 2},
        batch={"global_size": 4, "micro_size": 2},
    )
    model = adapted("skewed", "experts")
    trainer = Trainer(model, config, sentences(), callbacks=[_Gathered()])
    with watched() as found, patch.object(fetch, "GROUP_BYTES", most), trainer:
        assert trainer.fit().losses
    groups = [(2,), (3,)] if most == 1 else [(2, 3)]  # Those that the router takes of equal ones.
    assert {chosen for _, chosen in found} == set(groups), found
    assert len(found) == 2 * 2 * 2 * times, (len(found), found)  # steps, microbatches and layers


def thawed(mesh: Mesh, folder: str, targets: str) -> None:
    """Experts on files that are trained from the second step on, and a copy of the model that is called in between."""
    config = settings(folder, offload={"parameters": "file"}, zero={"stage": 3})

    def thaw(model: Any, step: int) -> None:
        if step == 2:
            for name, parameter in model.named_parameters():
                if "layers.1" in name and name.endswith(("gate_up_proj", "down_proj")):
                    parameter.requires_grad_(True)

    copies = []

    def begin(trainer: Trainer, step: int) -> None:
        ids = sentences()[0]["input_ids"][None]
        with torch.no_grad():
            copies.append(abs(copy.deepcopy(trainer.model)(input_ids=ids).logits - trainer.model(input_ids=ids).logits))
        thaw(trainer.model, step)

    plain = plain_fit(adapted("qwen", targets), sentences(), config, before_step=thaw)
    seen = [calling(on_step_begin=begin)]
    found, _ = compare(adapted("qwen", targets), config, sentences(), plain, callbacks=seen, gradients=False, losses=True)
    assert all(value <= 1e-9 for value in found.values()), found
    assert float(torch.stack(copies).max()) <= 1e-12


def _written(mesh: Mesh, folder: str) -> Path:
    path = Path(folder) / "base"
    if mesh.rank == 0 and not path.exists():
        seeded(KINDS["qwen"]).save_pretrained(path)
    mesh.world.barrier("base")
    return path


def moved(mesh: Mesh, folder: str, steps: int, **sections: Mapping[str, Any]) -> list[float]:
    """The losses of a run over a directory in four bits, on from the last checkpoint of another layout."""
    adapter = {"peft_type": "LORA", "r": 2, "init_lora_weights": False, **TARGETS["experts"]}
    config = settings(
        folder,
        model={
            "source": str(_written(mesh, folder)),
            "weights": {"codec": "nf4", "cache": f"{folder}/cache"},
            "adapters": {"default": adapter},
            "config": {"experts_implementation": "eager"},
        },
        run={"name": "moved", "max_steps": steps},
        schedule={"name": "constant_with_warmup"},
        checkpoint={"every_steps": 2, "resume": "auto"},
        **sections,
    )
    with Trainer(None, config, sentences()) as trainer:
        return list(trainer.fit().losses)


def generated(mesh: Mesh, folder: str, **sections: Mapping[str, Any]) -> None:
    """What a directory in four bits generates, by chosen experts of its cache, as the decoded model in one process."""
    base, prompt = _written(mesh, folder), [3, 7, 11, 5]
    words = ["model.weights.codec=nf4", f"model.weights.cache={folder}/cache", "precision.compute=float64"]
    words += ["model.config.experts_implementation=eager"]
    with watched() as found, Generator(base, overrides=words, **sections) as made:
        (result,) = made.generate([prompt], max_new_tokens=6, eos_token_id=None)
    assert found
    assert all(len(chosen) <= 2 for _, chosen in found[2:]), found  # After the prompt.
    model = rounded(seeded(KINDS["qwen"]).double().requires_grad_(False), "nf4").eval()
    tokens = list(prompt)
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    assert result.tokens == tokens[4:]


def counted(mesh: Mesh, folder: str, most: int, **sections: Mapping[str, Any]) -> None:
    """What is brought is in the ledger as it was predicted."""
    config = settings(folder, model={"weights": "nf4"}, run={"max_steps": 3}, **sections)
    trainer = Trainer(adapted("qwen", "experts"), config, sentences(), callbacks=[Peak()])
    with patch.object(fetch, "GROUP_BYTES", most), trainer:
        assert trainer.fit().losses
