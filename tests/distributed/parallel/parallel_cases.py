"""Cases of tensor and pipeline parallelism in the trainer that workers run: each trains something tiny and says what it saw."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests.support import fault_injection
from tests.support.plain import calling, distance, error_of, fitted, sentence_loss
from tests.support.trainer_cases import (
    LLAMA,
    VOCABULARY,
    Pictures,
    digest,
    gpt2,
    lines_of,
    llama,
    pictures,
    seeded,
    sentences,
    settings,
)
from zeromesh import Callback, Trainer
from zeromesh.errors import PhaseError, ZeromeshError
from zeromesh.mesh.process_mesh import Mesh

_RATES = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "use_cache": False}


def _deep() -> Any:
    return llama(num_hidden_layers=4)


def _mixtral() -> Any:
    config = tf.MixtralConfig(**MIXTRAL, output_router_logits=True, router_aux_loss_coef=0.1)
    config._experts_implementation = "eager"
    return tf.MixtralForCausalLM(config)


def _bert() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return tf.BertForSequenceClassification(tf.BertConfig(**sizes, **rates, vocab_size=VOCABULARY, num_labels=3))


def _frozen() -> Any:
    model = _deep()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name and "embed" not in name and "q_proj" not in name)
    return model


class OwnBase(tf.LlamaForCausalLM):  # type: ignore[misc]  # transformers' types are skipped.
    """A model that has no module of the name that its base model should have, and is therefore its own."""

    base_model_prefix = "none"


KINDS = {
    "own base": lambda: OwnBase(tf.LlamaConfig(**{**LLAMA, "num_hidden_layers": 4})),
    "llama": _deep,
    "gpt2": lambda: gpt2(**dict.fromkeys(_RATES, 0.0)),
    "mixtral": _mixtral,
    "bert": _bert,
    "dropout": lambda: gpt2(**dict.fromkeys(_RATES, 0.1)),
    "frozen": _frozen,
    "two heads": lambda: llama(num_attention_heads=2, num_key_value_heads=2),
}


def labelled(count: int) -> list[dict[str, torch.Tensor]]:
    """Sentences with a class each."""
    return [each | {"labels": torch.tensor(index % 3)} for index, each in enumerate(sentences(count))]


class Look(Callback):
    """Looks at everything that may be read from inside a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        if step == 2:
            found = {name: trainer.gradient(name) for name, _ in trainer.state_dict()}
            self.gradients = {name: each.clone() for name, each in found.items() if each is not None}

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        if step == 2:
            self.state = {name: tensor.clone() for name, tensor in trainer.state_dict()}
            trainer.save(self.folder / "during")
            names = [name for name in self.state if name.endswith(("norm.weight", "up_proj.weight", "wte.weight"))]
            with trainer.gathered(names):
                found = {name: trainer.model.get_parameter(name).detach().clone() for name in names}
            dtype = found[names[0]].dtype if names else None
            self.gathered = distance(found, {name: self.state[name].to(dtype) for name in names}) if names else 0.0


def fit(
    mesh: Mesh,
    *,
    folder: str,
    kind: str = "llama",
    sections: Mapping[str, Mapping[str, Any]] = {},
    look: bool = True,
    own_loss: bool = False,
) -> dict[str, Any]:
    """A run, with what it did; its gradients and states are in files of rank 0."""
    data = labelled(23) if kind == "bert" else sentences()
    held = labelled(7) if kind == "bert" else sentences(7, seed=4)
    run = {"eval_every": 2, "log_every": 1, **sections.get("run", {})}
    config = settings(folder, **{**sections, "run": run})
    seen = Look(Path(folder))
    model = seeded(KINDS[kind])
    loss = sentence_loss if own_loss else None
    with Trainer(model, config, data, held, compute_loss=loss, callbacks=[seen] if look else []) as trainer:
        before = trainer.evaluate()
        report = trainer.fit()
        after = trainer.evaluate()
        trainer.save(Path(folder) / "after")
        state = {name: tensor.clone() for name, tensor in trainer.state_dict()}
        if trainer.engine is not None:  # It stays partitioned.
            model = type(model).from_pretrained(Path(folder) / "after", dtype=state["lm_head.weight"].dtype)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        ids = sentences()[1]["input_ids"][None]
        logits = model.eval().cpu()(input_ids=ids).logits
        implementation = {"experts_implementation": "eager"} if kind == "mixtral" else {}
        loaded = type(model).from_pretrained(Path(folder) / "after", dtype=logits.dtype, **implementation)
        theirs = loaded.eval()(input_ids=ids).logits
    lines = lines_of(Path(folder) / "run")
    if mesh.rank == 0:
        torch.save({"gradients": seen.gradients, "during": getattr(seen, "state", {}), "after": state}, f"{folder}/seen.pt")
    return {
        "losses": list(report.losses),
        "norms": [line["grad_norm"] for line in lines],
        "tokens": report.tokens,
        "skipped": report.skipped_steps,
        "evaluations": [report.eval_loss, before["eval_loss"], after["eval_loss"]],
        "logits": float((logits - theirs).abs().max()),
        "whole": distance(whole, state),
        "gathered": getattr(seen, "gathered", 0.0),
        "left": left_in(model),
        "told": {axis: sorted(rows) for axis, rows in lines[-1].get("communication", {}).items()},
        "bubble": lines[-1].get("bubble"),
    }


def left_in(model: torch.nn.Module) -> list[str]:
    """The modules of a model in which something of a run still is: a hook, a forward, or the module itself."""
    return [
        name
        for name, module in model.named_modules()
        if "forward" in vars(module)
        or any(
            each.__module__.startswith("zeromesh")
            for each in (type(module), *module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )
    ]


def poisoned(mesh: Mesh, *, folder: str, rank: int, axes: Mapping[str, Any]) -> dict[str, Any]:
    """One rank's gradients are not finite in one step."""
    config = settings(folder, parallel=axes, run={"log_every": 1})
    model = seeded(_deep)

    def poison(trainer: Any, step: int) -> None:
        if mesh.rank == rank and step == 2:
            trainer.engine.units[-1].trainable[0].grad[0] = float("inf")

    with Trainer(model, config, sentences(), callbacks=[calling(on_pre_optimizer_step=poison)]) as trainer:
        report = trainer.fit()
    lines = lines_of(Path(folder) / "run")
    weights = digest({name: parameter.detach() for name, parameter in model.named_parameters()})
    return {"skipped": report.skipped_steps, "lines": lines, "weights": weights}


def signalled(mesh: Mesh, *, folder: str, rank: int, number: int, axes: Mapping[str, Any]) -> str:
    """A run of which one rank is told to stop in its second step; how it ended."""

    def kill(trainer: Trainer, step: int) -> None:
        if step == 2 and mesh.rank == rank:
            os.kill(os.getpid(), number)

    config = settings(folder, parallel=axes, checkpoint={"every_steps": 50})
    try:
        fitted(seeded(_deep), config, sentences(), callbacks=[calling(on_step_begin=kill)])
    except (SystemExit, KeyboardInterrupt) as end:
        return f"{type(end).__name__} {getattr(end, 'code', '')}".strip()
    return ""


def given(mesh: Mesh, *, folder: str, axes: Mapping[str, Any]) -> dict[str, str]:
    """Bits of the initial weights of models given in every way, and of one that two runs have trained."""
    config = settings(folder, parallel=axes)
    shape = {"model_type": "llama", **LLAMA, "num_hidden_layers": 4, "tie_word_embeddings": False}
    named = settings(folder, parallel=axes, model={"config": shape})
    with torch.device("meta"):
        bare = _deep()
    source = Path(folder) / f"source-{mesh.world_size}"
    if mesh.rank == 0:
        seeded(_deep).save_pretrained(source)
    mesh.world.barrier("a model to start from")
    stored = settings(folder, parallel=axes, model={"source": str(source)})
    ways = {
        "built": (seeded(_deep), config),
        "config": (None, named),
        "callable": (_deep, config),
        "meta": (bare, config),
        "source": (None, stored),
    }
    found = {}
    for name, (model, settled) in ways.items():
        with Trainer(model, settled, sentences()) as trainer:
            found[name] = digest({key: tensor.clone() for key, tensor in trainer.state_dict()})
    return found


def again(mesh: Mesh, *, folder: str, axes: Mapping[str, Any]) -> list[float]:
    """Losses of two runs one after the other of one model, under two Trainers; and what a model in stages says when called."""
    model, losses = seeded(_deep), []
    for name in ("first", "second"):
        with Trainer(model, settings(folder, parallel=axes, run={"name": name}), sentences()) as trainer:
            losses += list(trainer.fit().losses)
            assert list(trainer.fit().losses) == losses[-4:]
    return losses


def refused(mesh: Mesh, *, folder: str, axes: Mapping[str, Any], kind: str = "llama", own: bool = False, length: int = 0) -> str:
    """What is said before the first step, and by whom: a run that cannot be."""
    model = Pictures(loss=True) if kind == "pictures" else seeded(KINDS[kind])
    data: Any = pictures() if kind == "pictures" else sentences()
    if own and mesh.rank == 1:
        data = data[::-1]
    if length:
        data = [{name: value[:length] for name, value in each.items()} for each in data]
    steps: list[int] = []
    count = calling(on_step_begin=lambda trainer, step: steps.append(step))
    said = error_of(partial(fitted, model, settings(folder, parallel=axes), data, callbacks=[count]), ZeromeshError)
    return f"{len(steps)} {said}"


def killed(mesh: Mesh, *, folder: str, rank: int, count: int, axes: Mapping[str, Any], stage: int) -> None:
    """One rank is killed as it comes to a unit's forward for the `count`-th time; says when."""
    fault_injection.install(f"kill@forward:{rank}:{count}", mesh.rank)
    fitted(seeded(_deep), settings(folder, parallel=axes, zero={"stage": stage}), sentences())


def called(mesh: Mesh, *, folder: str, axes: Mapping[str, Any], refused: bool) -> None:
    """A model may be called after a step, and generate, or it is refused."""
    steps: list[int] = []

    def call(trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        if step != 2:
            return
        whole = _deep().double().to(mesh.device)
        whole.load_state_dict({name: tensor.clone() for name, tensor in trainer.state_dict()})
        ids = sentences()[1]["input_ids"][None].to(mesh.device)
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        steps.append(step)
        said = "^the model was called by itself, and this rank has but some stages of it"
        with torch.no_grad(), pytest.raises(PhaseError, match=said) if refused else nullcontext():
            assert (trainer.model(input_ids=ids).logits - whole(input_ids=ids).logits).abs().max() < 1e-12
            tokens = [model.eval().generate(ids, **options).tolist() for model in (trainer.model, whole)]
            assert tokens[0] == tokens[1]
            trainer.model.train()

    with Trainer(seeded(_deep), settings(folder, parallel=axes), sentences(), callbacks=[calling(on_step_end=call)]) as trainer:
        trainer.fit()
    assert steps == [2]
