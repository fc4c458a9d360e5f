"""Cases of tensor and pipeline parallelism in the trainer that workers run: each trains something tiny and says what it saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from trainer_cases import (
    LLAMA,
    LENGTH,
    VOCABULARY,
    distance,
    gpt2,
    lines_of,
    llama,
    seeded,
    sentence_loss,
    sentences,
    settings,
)

from zeromesh import Callback, Trainer
from zeromesh.mesh.groups import Mesh

MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "use_cache": False}


def _deep(**changes: Any) -> Any:
    return llama(num_hidden_layers=4, **changes)


def _mixtral() -> Any:
    config = tf.MixtralConfig(**MIXTRAL, output_router_logits=True, router_aux_loss_coef=0.1)
    config._experts_implementation = "eager"
    return tf.MixtralForCausalLM(config)


def _bert() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return tf.BertForSequenceClassification(tf.BertConfig(**sizes, **rates, vocab_size=VOCABULARY, num_labels=3))


def _dropout() -> Any:
    return gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)


def _frozen() -> Any:
    model = _deep()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name and "embed" not in name and "q_proj" not in name)
    return model


KINDS = {
    "llama": _deep,
    "gpt2": lambda: gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "mixtral": _mixtral,
    "bert": _bert,
    "dropout": _dropout,
    "frozen": _frozen,
}


def labelled(count: int) -> list[dict[str, torch.Tensor]]:
    """Sentences with a class each."""
    return [
        {"input_ids": each["input_ids"], "labels": torch.tensor(index % 3)}
        for index, each in enumerate(sentences(count))
    ]


class Look(Callback):
    """Looks at everything that may be read from inside a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        if step == 2:
            for name in trained_names(trainer):
                gradient = trainer.gradient(name)
                if gradient is not None:
                    self.gradients[name] = gradient.clone()

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        if step == 2:
            self.state = {name: tensor.clone() for name, tensor in trainer.state_dict()}
            trainer.save(self.folder / "during")
            names = [name for name in self.state if name.endswith(("norm.weight", "up_proj.weight", "wte.weight"))]
            with trainer.gathered(names):
                found = {name: trainer.model.get_parameter(name).detach().clone() for name in names}
            dtype = found[names[0]].dtype if names else None
            self.gathered = distance(found, {name: self.state[name].to(dtype) for name in names}) if names else 0.0


def trained_names(trainer: Trainer) -> list[str]:
    return [name for name, _ in trainer.state_dict()]


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
        logits = model.eval()(input_ids=ids).logits
        implementation = {"experts_implementation": "eager"} if kind == "mixtral" else {}
        loaded = type(model).from_pretrained(Path(folder) / "after", dtype=logits.dtype, **implementation)
        theirs = loaded.eval()(input_ids=ids).logits
    lines = lines_of(Path(folder) / "run")
    if mesh.rank == 0:
        torch.save(
            {"gradients": seen.gradients, "during": getattr(seen, "state", {}), "after": state}, f"{folder}/seen.pt"
        )
    return {
        "losses": list(report.losses),
        "norms": [line["grad_norm"] for line in lines],
        "tokens": report.tokens,
        "skipped": report.skipped_steps,
        "evaluations": [report.eval_loss, before.loss, after.loss],
        "targets": [before.targets, after.targets],
        "logits": float((logits - theirs).abs().max()),
        "whole": distance(whole, state),
        "gathered": getattr(seen, "gathered", 0.0),
        "left": left_in(model),
    }


def left_in(model: torch.nn.Module) -> list[str]:
    """What of a run is still in a model."""
    found = [
        f"hooks in {name}"
        for name, module in model.named_modules()
        if any(
            each.__module__.startswith("zeromesh")
            for each in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )
    ]
    found += [f"forward of {name}" for name, module in model.named_modules() if "forward" in vars(module)]
    found += [
        f"{name} is {type(module).__module__}"
        for name, module in model.named_modules()
        if type(module).__module__.startswith("zeromesh")
    ]
    return found
