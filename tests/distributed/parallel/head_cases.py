"""Cases on the loss of models whose output embedding is divided: as the trainer computes it, against one process."""

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import transformers as tf

from tests.distributed.parallel import tensor_cases as cases
from tests.support.plain import apart, plain_fit
from tests.support.trainer_cases import LLAMA, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.comm.activation_collectives import open_exchange
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.tensor import autograd_collectives
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.models.small_copy import InFloat64

_MODERN = {
    **cases._without("head_dim", "num_key_value_heads"), "pad_token_id": 0, "global_attn_every_n_layers": 2,
    "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip

_RULES = {"modernbert": {"*.mlp.Wi": "packed_colwise", "*.mlp.Wo": "rowwise"}}


class Centred(tf.LlamaForCausalLM):
    """A user's own class, whose logits depend on each other."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / output.logits.std(-1, keepdim=True)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, output.logits.shape[-1])
        return output


_PADDED = {**cases._SMALL, "pad_token_id": 0}
cases.MODELS |= {
    "granite": partial(cases.made, tf.GraniteForCausalLM, {**cases._SMALL, "logits_scaling": 8.0}),
    "cohere": partial(cases.made, tf.CohereForCausalLM, {**_PADDED, "logit_scale": 0.3}),
    "modernbert": partial(cases.made, tf.ModernBertForMaskedLM, _MODERN),
    "centred": partial(cases.made, Centred, cases._SMALL),
}


def learns(mesh: Mesh, names: list[str]) -> dict[str, Any]:
    """By model: what differs from one process, the notes, and the most that was exchanged at once."""
    return {name: _learns(mesh, name) for name in names}


def _learns(mesh: Mesh, name: str) -> dict[str, Any]:
    exchange = cases.Counting(open_exchange(mesh.shard, mesh.device, "auto"))
    inputs = cases.batch()
    with InFloat64():
        whole = cases.build(name)
        expected = whole(**inputs).loss
        expected.backward()
        model = cases.build(name)
        loss = make_loss(model)
        model, parallel = cases.divided(name, exchange, model=model, rules=_RULES.get(name))
        before = [set(vars(module)) for module in model.modules()]
        assert loss.kind == "labels", loss.notes
        count = loss.count(inputs)
        found = loss(model, inputs, seed=1 / count) / count
        found.backward()
        most = exchange.most
        with torch.no_grad():
            evaluated = loss(model, inputs, seed=0.0) / count
            inputs["labels"] = torch.full_like(inputs["labels"], -100)
            nothing = loss(model, inputs, seed=0.0)
    assert before == [set(vars(module)) for module in model.modules()]
    wrong = cases.differences(cases.gradients(whole), cases.assembled(model, parallel, exchange))
    parallel.restore()
    cases.load_parts(model, {}, dict(whole.named_parameters()))
    with InFloat64(), torch.no_grad():
        restored = loss(model, cases.batch(), seed=0.0) / count
    results = {"loss": found, "again": evaluated, "restored": restored}
    wrong |= cases.differences(dict.fromkeys(results, expected), results)
    hidden = inputs["input_ids"].numel() * 32
    return {"wrong": wrong, "notes": loss.notes, "gathered": most > hidden, "nothing": float(nothing)}


def _capped() -> Any:
    sizes = {**LLAMA, "head_dim": 8, "pad_token_id": 0, "vocab_size": 67}
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes, final_logit_softcapping=0.5, attn_implementation="eager"))


def trains(mesh: Mesh, folder: str, parallel: dict[str, int]) -> dict[str, Any]:
    """A run and its evaluations; what differs from a plain loop, and what was gathered that has the logits' form."""
    config = settings(folder, parallel={"timeout_seconds": 30, **parallel}, run={"max_steps": 2})
    plain = plain_fit(seeded(_capped), sentences(), config)
    widths: list[int] = []
    plainly = autograd_collectives.all_gather

    def noting(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        found = plainly(tensor, *arguments)
        widths.append(found.shape[-1])
        return found

    noted = patch.object(autograd_collectives, "all_gather", noting)
    with Trainer(seeded(_capped), config, train_dataset=sentences(), eval_dataset=sentences(5)) as trainer, noted:
        _ = trainer.run  # What the trial of the plan gathers on its small copy is not counted.
        widths.clear()
        before = trainer.evaluate()["eval_loss"]
        report = trainer.fit()
        whole = trainer.engine is None
        after = trainer.evaluate()["eval_loss"]
    losses = apart(report.losses, plain.losses)
    return {"losses": losses, "gathered": 67 in widths, "evaluated": [before, report.eval_loss, after], "whole": whole}
