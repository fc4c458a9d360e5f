"""Cases of optimizers by name that workers run: each beside its class in a plain loop, through a stop and a resumed run."""

import copy
import importlib
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import nn
from torch.optim import Optimizer

from tests.support.plain import after_steps, distance, error_of, fitted, plain_loop, sentence_loss, stacked, stopping
from tests.support.trainer_cases import digest, llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.errors import ConfigError, LayoutError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose, Tier
from zeromesh.trainer.data.sampler import SampleOrder
from zeromesh.trainer.inference.generator import layout_of
from zeromesh.zero.memory_model import MemoryModel

RATE, DECAY = 1e-2, 0.1
SIZES = {"hidden_size": 64, "intermediate_size": 128}
"""Matrices of 4096 elements and more, which 8-bit optimizers quantize."""
MODES = f"{__name__}:TwoModes"
Groups = list[dict[str, Any]]


def any_arguments(params: Any, lr: float, **others: Any) -> Optimizer:
    """RAdam, by a function that names only some of its arguments."""
    return torch.optim.RAdam(params, lr=lr, **others)


class TwoModes(Optimizer):
    """Defazio et al., "The Road Less Scheduled", 2024, with SGD: it evaluates other weights than it trains, and groups count."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta, "k": 0, "training": False})

    def train(self) -> None:
        self.move(training=True)

    def eval(self) -> None:
        self.move(training=False)

    @torch.no_grad()
    def move(self, *, training: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for each in group["params"] if group["training"] != training else ():
                if "z" in self.state[each]:
                    each.lerp_(self.state[each]["z"], weight)
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.clone())
                change = each.grad + group["weight_decay"] * each
                each.lerp_(z, 1 / group["k"]).sub_(change, alpha=group["lr"] * (1 - group["beta"]))
                z.sub_(change, alpha=group["lr"])


def muon(groups: Groups, model: Any) -> list[Optimizer]:
    """torch's two, over the matrices of layers and over the rest."""
    tables = {id(model.model.embed_tokens.weight), id(model.lm_head.weight)}
    parts: tuple[Groups, Groups] = ([], [])
    for group in groups:
        matrices = [each for each in group["params"] if each.dim() == 2 and id(each) not in tables]
        for part, listed in zip(
            parts, (matrices, [each for each in group["params"] if not any(each is m for m in matrices)]), strict=True
        ):
            part.extend([{**group, "params": listed}] if listed else [])
    first = torch.optim.Muon(parts[0], lr=RATE, adjust_lr_fn="match_rms_adamw")
    return [first, torch.optim.AdamW(parts[1], lr=RATE, betas=(0.9, 0.95))]


def of(module: str, name: str, **options: Any) -> Callable[..., list[Optimizer]]:
    def make(groups: Groups, _model: Any) -> list[Optimizer]:
        return [getattr(importlib.import_module(module), name)(groups, lr=RATE, **options)]

    return make


def in_8_bits(name: str) -> Callable[..., list[Optimizer]]:
    """As transformers' Trainer makes it: the states of embeddings are in 32 bits."""

    def make(groups: Groups, model: Any) -> list[Optimizer]:
        made: Any = of("bitsandbytes.optim", name, optim_bits=8)(groups, model)
        made[0].mng = copy.copy(made[0].mng)  # The class's own would know later parameters of the same id.
        made[0].mng.initialize()
        made[0].mng.override_config(model.model.embed_tokens.weight, "optim_bits", 32)
        return list(made)

    return make


def low_rank(module: str, name: str, **options: Any) -> Callable[..., list[Optimizer]]:
    """Transformers' groups: the weights of linear layers are projected."""

    def make(groups: Groups, model: Any) -> list[Optimizer]:
        linear = {id(each.weight) for each in model.modules() if isinstance(each, nn.Linear)}
        split = [
            {**group, "params": [each for each in group["params"] if (id(each) in linear) == projected], **more}
            for projected, more in ((False, {}), (True, options))
            for group in groups
        ]
        return of(module, name)([group for group in split if group["params"]], model)

    return make


_RANKS = {"rank": 8, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
PLAIN: dict[str, Callable[..., list[Optimizer]]] = {
    "nadam": of("torch.optim", "NAdam"),
    "rmsprop": of("torch.optim", "RMSprop"),
    f"{__name__}:any_arguments": of("torch.optim", "RAdam"),
    "radam": of("torch.optim", "RAdam"),
    "adadelta": of("torch.optim", "Adadelta"),
    "lion": of("bitsandbytes.optim", "Lion"),
    "adamw_torch_fp8": of("torchao.optim", "AdamWFp8"),
    "torch.optim:Adamax": of("torch.optim", "Adamax"),
    "adamw": of("torch.optim", "AdamW", betas=(0.9, 0.95), amsgrad=True),
    "adamw_torch": of("torch.optim", "AdamW"),
    "adafactor": of("transformers", "Adafactor", relative_step=False, scale_parameter=False),
    "muon": muon,
    "lamb": of("bitsandbytes.optim", "LAMB"),
    "lion_32bit": of("bitsandbytes.optim", "Lion", betas=(0.9, 0.999)),
    "adamw_8bit": in_8_bits("AdamW"),
    "ademamix_8bit": in_8_bits("AdEMAMix"),
    MODES: of(__name__, "TwoModes"),
    "adamw_torch_8bit": of("torchao.optim", "AdamW8bit"),
    "adamw_torch_4bit": of("torchao.optim", "AdamW4bit", block_size=256),
    "galore_adamw": low_rank("galore_torch", "GaLoreAdamW", **_RANKS),
    "apollo_adamw": low_rank("apollo_torch", "APOLLOAdamW", **{**_RANKS, "proj": "random", "scale_type": "channel", "eps": 1e-8}),
    "stable_adamw": of("optimi", "StableAdamW", betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY),
    "schedule_free_adamw": of("schedulefree", "AdamWScheduleFree"),
    "schedule_free_sgd": of("schedulefree", "SGDScheduleFree"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"amsgrad": True}, "galore_adamw": {"rank": 8, "update_proj_gap": 2},
    "apollo_adamw": {"rank": 8, "update_proj_gap": 2, "scale": 0.25},
}  # fmt: skip


def factor(step: int) -> float:
    """The linear schedule of `settings`, with one step of warm-up, as transformers has it."""
    return float(step) if step < 1 else max(0.0, (4 - step) / 3)


def plain_weights(name: str, build: Any) -> tuple[dict[str, torch.Tensor], float, int]:
    """The weights after four steps of the class, the loss of an evaluation, and the bytes of its states."""
    model, data = seeded(build).double(), sentences()
    named = dict(model.named_parameters())
    groups: Groups = [
        {"params": [each for key, each in named.items() if "norm" not in key], "weight_decay": DECAY},
        {"params": [each for key, each in named.items() if "norm" in key], "weight_decay": 0.0},
    ]
    optimizers = PLAIN[name](groups, model)

    class All(Optimizer):
        """One call for all parts, each at the rate of the schedule."""

        def __init__(self) -> None:
            super().__init__(model.parameters(), {})
            self.steps = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for each in optimizers:
                for group in each.param_groups:
                    rate = RATE * factor(self.steps)
                    group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate
                each.step()
            self.steps += 1

    def mean(model: Any, batch: Any) -> torch.Tensor:
        total, count = sentence_loss(model, batch)
        return total / count

    call_all(optimizers, "train")
    order = SampleOrder(length=len(data), seed=5)
    rows = [[order.dataset_index(8 * step + each) for each in range(8)] for step in range(4)]
    plain_loop(model.train(), (stacked(data, each) for each in rows), mean, All(), clip_norm=0.5)
    call_all(optimizers, "eval")
    with torch.no_grad():
        loss = float(mean(model.eval(), stacked(data, range(8))))
    states = [value for each in optimizers for state in each.state.values() for value in state.values()]
    nbytes = sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.dim())
    return {key: each.detach() for key, each in named.items()}, loss, nbytes


def call_all(optimizers: Iterable[Any], mode: str) -> None:
    for each in optimizers:
        getattr(each, mode, dict)()


def named(
    mesh: Mesh,
    folder: str,
    name: str,
    stage: int,
    whole: bool = False,
    tier: str = "none",
    within: float = 1e-9,
    stages: int = 1,
) -> None:
    """A run that stops after two steps and is resumed has the weights of the class, evaluates and saves them. The bytes of states
    are as predicted, and with `whole` those of the class. In `stages`, the first and the last have a weight in common."""
    build = partial(llama, **SIZES, tie_word_embeddings=stages > 1)
    with torch.compiler.set_stance("force_eager"):  # Compiled kernels round otherwise, and take seconds for each shape.
        wanted, loss, nbytes = plain_weights(name, build)
    config = settings(
        folder,
        optimizer={"name": name, "lr": RATE, "exempt": "biases_and_norms", "options": OPTIONS.get(name, {})},
        zero={"stage": stage},
        parallel={"pipeline": stages},
        offload={"optimizer": tier, "directory": folder},
        checkpoint={"every_steps": 2},
    )
    data, held, predicted = sentences(), list[int](), list[int]()

    def count(trainer: Any, step: int) -> None:
        trainer.check_weights()  # A rank without elements of a parameter does not count its steps.
        engine, ranks = trainer.engine, mesh.shard.size
        held.append(sum(engine.ledger.by_purpose(each).get(Purpose.MOMENTS, 0) for each in Tier))
        layouts = [[bucket.layout for bucket in unit.buckets] for unit in engine.units]
        found = MemoryModel(layouts, engine.options, ranks, engine.groups[0].transport.name, mesh.device)
        terms = found.terms, found.host_terms, found.files
        predicted.append(sum(each.get(Purpose.MOMENTS, 0) for each in terms))

    given: Any = {"callbacks": [after_steps(count)]}
    with torch.compiler.set_stance("force_eager"):
        with Trainer(seeded(build), config, data, data[:8], callbacks=[stopping(2)]) as trainer:
            trainer.fit()
        with Trainer(seeded(build), config, data, data[:8], **given) as trainer:
            trainer.fit()
            assert math.isclose(trainer.evaluate()["eval_loss"], loss, rel_tol=within)
            assert distance({key: each.clone() for key, each in trainer.state_dict()}, wanted) <= within
            trainer.save(Path(folder) / "saved")
    saved = tf.AutoModelForCausalLM.from_pretrained(Path(folder) / "saved", dtype=torch.float64)
    assert distance(dict(saved.named_parameters()), wanted) <= within
    rows = mesh.world.gather_integers([held[0], predicted[0]])
    assert not whole or sum(row[0] for row in rows) == nbytes
    assert stages > 1 or {max(row[0] for row in rows)} == {row[1] for row in rows}
    unread = error_of(lambda: layout_of(Path(folder) / "run", None, {}))
    assert ("evaluates other weights than it trains" in unread) == (name == MODES or name.startswith("schedule_free"))
    refused = error_of(lambda: Trainer(seeded(llama), settings(folder, optimizer={"name": name, "options": {"x": 1}})))
    assert "optimizer.options" in refused or name.count(":")


def refused(mesh: Mesh, folder: str, name: str, **sections: Any) -> str:
    def run() -> None:
        with Trainer(seeded(llama), settings(folder, optimizer={"name": name}, **sections), sentences()) as trainer:
            trainer.fit()

    return error_of(run, ConfigError)


def narrow(mesh: Mesh, folder: str, precision: dict[str, str], *, stop: bool, tier: str, **optimizer: str) -> str:
    """Stop a run with `optimizer` and `precision`, or resume it; returns a digest of the weights."""
    roles = {"compute": "bfloat16", "master": "float32", "reduce": "float32", **precision}
    config = settings(folder, optimizer=optimizer, precision=roles, zero={"stage": 3}, checkpoint={"every_steps": 2})
    config["offload"] = {"optimizer": tier, "directory": f"{folder}/swap"}
    # Microbatches of one sample each are summed in one order by any number of ranks; the norm is not.
    config |= {"batch": {"global_size": 8, "micro_size": 1}, "run": {**config["run"], "clip_norm": 0.0}}
    made = seeded(lambda: llama(**SIZES))
    if not stop:
        return digest(fitted(made, config, sentences()))
    with Trainer(made, config, sentences(), callbacks=[stopping(2)]) as trainer:
        trainer.fit()
    return ""


def other_masters(mesh: Mesh, folder: str, then: str, now: str) -> str:
    """The error of a run that goes on with other master weights than it had."""
    common: dict[str, Any] = {"folder": folder, "tier": "none"}
    narrow(mesh, precision={"master": then}, stop=True, **common)
    return error_of(lambda: narrow(mesh, precision={"master": now}, stop=False, **common), LayoutError)
