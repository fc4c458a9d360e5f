"""Cases on tensor parallelism without the engine: a model divided among ranks against the whole one, in float64."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import transformers as tf
from torch.nn import functional

from tests.support.architectures import TINY, tiny, tiny_without
from tests.support.plain import apart, distances, plain_fit
from tests.support.trainer_cases import LLAMA, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.comm.activation_collectives import Exchange, Pending, open_exchange
from zeromesh.flat.layout import part_of
from zeromesh.intervals import balanced
from zeromesh.kernels.chunked_head import UNCHANGED, LogitChange, chunked_cross_entropy
from zeromesh.losses import TokenScorer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.tensor import autograd_collectives
from zeromesh.tensor.parallelize_module import Parallelized
from zeromesh.tensor.plan.planner import plan_tensor
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.models.prepare import enable_activation_checkpointing
from zeromesh.trainer.models.small_copy import InFloat64
from zeromesh.trainer.models.tensor_trial import load_parts
from zeromesh.units.plan import block_modules

Tensors = dict[str, torch.Tensor]


class Centred(tf.LlamaForCausalLM):  # type: ignore[misc]  # transformers' types are skipped.
    """A user's own class, whose logits depend on each other."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / output.logits.std(-1, keepdim=True)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, output.logits.shape[-1])
        return output


_, _PADDED = TINY["apertus"]
HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "granite": (tf.GraniteForCausalLM, {**_PADDED, "logits_scaling": 8.0}),
    "cohere": (tf.CohereForCausalLM, {**_PADDED, "logit_scale": 0.3}),
    "modernbert": (
        tf.ModernBertForMaskedLM,
        {
            **tiny_without("head_dim", "num_key_value_heads"),
            "pad_token_id": 0,
            "global_attn_every_n_layers": 2,
            "local_attention": 4,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "centred": (Centred, _PADDED),
}
"""Beside those of `TINY`: models whose logits change on their way to the loss."""
RULES = {"modernbert": {"*.mlp.Wi": "packed_colwise", "*.mlp.Wo": "rowwise"}}


class Counting(Exchange):
    """An exchange that notes what it was asked for, and the most elements that one call was given or gave."""

    def __init__(self, mesh: Mesh) -> None:
        self._inner = open_exchange(mesh.shard, mesh.device, "auto")
        self.size, self.index = self._inner.size, self._inner.index
        self.most = 0
        self.calls: list[str] = []

    def _start(self, kind: Collective, tensor: torch.Tensor, dim: int = -1, lengths: tuple[int, ...] = ()) -> Pending:
        self.calls.append(kind.value)
        self.most = max(self.most, tensor.numel() * (self.size if kind is Collective.ALL_GATHER else 1))
        return self._inner._start(kind, tensor, dim, lengths)


def build(name: str, **changes: Any) -> Any:
    """A model in float64 whose biases and norms are random too."""
    torch.manual_seed(7)
    kind, values = HEADS.get(name, (None, {}))
    model = (tiny(name, **changes) if kind is None else kind(kind.config_class(**values))).double()
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model.train()


def batch(length: int = 8) -> Tensors:
    generator = torch.Generator().manual_seed(9)
    ids, labels = (torch.randint(2, 67, (2, length), generator=generator) for _ in range(2))
    labels[0, :3] = -100
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    labels[1, -2:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def divided(model: Any, exchange: Exchange, *, sequence: bool = False, rules: Mapping[str, str] = {}) -> Parallelized:
    """Leave this rank's part of a model in it."""
    whole = {key: value.detach().clone() for key, value in model.named_parameters()}
    parallel = Parallelized(model, exchange, plan_tensor(model, exchange.size, rules), sequence=sequence)
    load_parts(model, parallel.parts, whole)
    return parallel


def gradients(model: Any, parallel: Parallelized | None = None, exchange: Exchange | None = None) -> Tensors:
    """Every whole gradient, zeros where there is none. One that is in `parts` is put together from all ranks, all others are
    this rank's."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        part = None if parallel is None else parallel.parts.get(name)
        if part is not None and exchange is not None:
            whole = found[name].new_zeros(part.region.shape)
            if part.partial or part.holders[0] == exchange.index:
                index = torch.arange(whole.numel()).view(whole.shape)
                whole.view(-1)[part_of(index, part.region).reshape(-1)] = found[name].reshape(-1)
            found[name] = exchange.all_reduce_async(whole).wait()
    return found


def unlike(found: Tensors, wanted: Tensors, bound: float = 1e-9) -> dict[str, float]:
    """The differences above a bound."""
    assert found.keys() == wanted.keys()
    return {name: each for name, each in distances(found, wanted).items() if not each <= bound}


def equals(mesh: Mesh, models: list[str], sequence: bool = False, checkpointing: bool = False) -> None:
    """Loss, logits and every gradient of the divided models against the whole ones."""
    exchange, inputs = open_exchange(mesh.shard, mesh.device, "auto"), batch()
    wrong: dict[str, Any] = {}
    for name in models:
        with InFloat64():
            whole, model = build(name), build(name)
            parallel = divided(model, exchange, sequence=sequence)
            if checkpointing and model.supports_gradient_checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": lambda: (nullcontext(), InFloat64())})
            found, wanted = (one_pass(each, inputs) for each in (model, whole))
        wrong[name] = unlike(found, wanted) | unlike(gradients(model, parallel, exchange), gradients(whole))
    assert not any(wrong.values()), wrong


def one_pass(model: Any, inputs: Tensors) -> Tensors:
    """Loss and logits of a model, after its backward."""
    output = model(**inputs)
    output.loss.backward()
    return {"loss": output.loss.detach(), "logits": output.logits.detach()}


def learns_in_chunks(mesh: Mesh, name: str, sequence: bool = False) -> None:
    """The sum of the losses by the divided head in chunks, and every gradient; and how much was exchanged at once."""
    exchange, inputs = Counting(mesh), batch()
    targets = functional.pad(inputs["labels"], (0, 1), value=-100)[..., 1:].reshape(-1)
    count = int((targets != -100).sum())
    with InFloat64():
        whole, model = build(name), build(name)
        expected = whole(**inputs).loss * count
        expected.backward()
        parallel = divided(model, exchange, sequence=sequence)
        hidden = model.base_model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        exchange.calls.clear()
        head = model.get_output_embeddings()
        how: dict[str, Any] = {"seed": 1.0, "chunk_tokens": 3, "sizes": head.sizes, "exchange": exchange}
        found = chunked_cross_entropy(hidden.flatten(0, 1), head.weight, head.bias, targets, **how)
        assert exchange.calls == ["all-gather", "all-reduce"] * -(-count // 3)
        found.backward()
    # Logits of 16 tokens would be more: 67 of each, where hidden states are 32.
    assert exchange.most <= hidden.numel()
    problems = unlike(gradients(model, parallel, exchange), gradients(whole))
    assert not problems | unlike({"loss": found.detach()}, {"loss": expected.detach()}), problems


def learns(mesh: Mesh, name: str, note: str) -> None:
    """The loss of a model whose output embedding is divided, as the trainer computes it, against one process."""
    with InFloat64():
        _learns(mesh, name, note)


def _learns(mesh: Mesh, name: str, note: str) -> None:
    exchange, whole, model, inputs = Counting(mesh), build(name), build(name), batch()
    wanted = one_pass(whole, inputs)["loss"]
    loss = make_loss(model)
    parallel = divided(model, exchange, rules=RULES.get(name, {}))
    before = [set(vars(module)) for module in model.modules()]
    assert loss.kind == "labels", loss.notes
    assert loss.notes[0].startswith(note)
    count = loss.count(inputs)
    found = loss(model, inputs, seed=1 / count) / count
    found.backward()
    most = exchange.most
    with torch.no_grad():
        evaluated = loss(model, inputs, seed=0.0) / count
        nothing = loss(model, {**inputs, "labels": torch.full_like(inputs["labels"], -100)}, seed=0.0)
    assert before == [set(vars(module)) for module in model.modules()]
    wrong = unlike(gradients(model, parallel, exchange), gradients(whole))
    parallel.restore()
    load_parts(model, {}, dict(whole.named_parameters()))
    with torch.no_grad():
        restored = loss(model, inputs, seed=0.0) / count
    results = {"loss": found.detach(), "again": evaluated, "restored": restored}
    wrong |= unlike(results, dict.fromkeys(results, wanted))
    assert not wrong, wrong
    assert float(nothing) == 0
    # Logits of 16 tokens are more than their hidden states: 67 of each, and those are 32.
    assert (most > inputs["input_ids"].numel() * 32) == (name == "centred")


def trains(mesh: Mesh, folder: str, parallel: dict[str, int]) -> None:
    """A run and its evaluations against a plain loop; nothing was gathered that has the logits' form."""
    sizes = {**LLAMA, "head_dim": 8, "pad_token_id": 0, "vocab_size": 67}
    capped = tf.Gemma2Config(**sizes, final_logit_softcapping=0.5, attn_implementation="eager")
    config = settings(folder, parallel={"timeout_seconds": 30, **parallel}, run={"max_steps": 2})
    plain = plain_fit(seeded(lambda: tf.Gemma2ForCausalLM(capped)), sentences(), config)
    widths: list[int] = []
    plainly = autograd_collectives.all_gather

    def noting(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        found = plainly(tensor, *arguments)
        widths.append(found.shape[-1])
        return found

    noted = patch.object(autograd_collectives, "all_gather", noting)
    model = seeded(lambda: tf.Gemma2ForCausalLM(capped))
    with Trainer(model, config, train_dataset=sentences(), eval_dataset=sentences(5)) as trainer, noted:
        _ = trainer.run  # What the trial of the plan gathers on its small copy is not counted.
        widths.clear()
        before = trainer.evaluate()["eval_loss"]
        report = trainer.fit()
        assert trainer.engine is None
        after = trainer.evaluate()["eval_loss"]
    assert apart(report.losses, plain.losses) < 1e-6  # Norms of Gemma compute in fp32.
    assert 67 not in widths
    assert before > report.eval_loss
    assert apart([after], [report.eval_loss]) < 1e-6


def losses_of_halves(mesh: Mesh, dtype: str, chunk_tokens: int, bound: float) -> None:
    """The loss and its gradients against those of the whole head, with an odd vocabulary and masked targets, of logits that are
    changed or not."""
    exchange = open_exchange(mesh.shard, mesh.device, "auto")
    shares = balanced(51, exchange.size)
    own = slice(shares[exchange.index].start, shares[exchange.index].end)
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(*shape, generator=generator).to(getattr(torch, dtype)) for shape in ((29, 16), (51, 16), (51,))]
    targets = torch.randint(0, 51, (29,), generator=generator)
    targets[[0, 7]] = -100
    for change in (UNCHANGED, LogitChange(scale=0.3), LogitChange(scale=1.5, cap=2.0)):
        wholes = [tensor.clone().requires_grad_() for tensor in given]
        halves = [tensor.clone().requires_grad_() for tensor in (given[0], given[1][own], given[2][own])]
        how: dict[str, Any] = {"seed": 2.0, "chunk_tokens": chunk_tokens, "change": change}
        wanted = chunked_cross_entropy(*wholes, targets, **how)
        (wanted * 2.0).backward()
        how |= {"sizes": [one.length for one in shares], "exchange": exchange}
        found = chunked_cross_entropy(*halves, targets, **how)
        (found * 2.0).backward()
        with torch.no_grad():
            quiet = chunked_cross_entropy(*halves, targets, **how)
        hidden, weight, bias = (tensor.grad for tensor in wholes)
        for a, b in zip(
            (found, quiet, *(each.grad for each in halves)), (wanted, found, hidden, weight[own], bias[own]), strict=True
        ):
            assert float((a.double() - b.double()).abs().max() / b.double().abs().max()) <= bound


def scores(mesh: Mesh, name: str, sequence: bool = False) -> None:
    """What `TokenScorer` finds with a divided head, and every gradient of it, against whole logits of one process."""
    exchange, inputs = Counting(mesh), batch()
    targets = functional.pad(inputs["labels"], (0, 1), value=-100)[..., 1:]
    seeds = torch.randn(2, *targets.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with InFloat64():
        whole, model = build(name), build(name)
        logs = whole(**inputs).logits.div(0.7).log_softmax(-1)
        chosen = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        wanted = [each.masked_fill(targets == -100, 0) for each in (chosen, -(logs.exp() * logs).sum(-1))]
        top = (logs.argmax(-1) == targets) & (targets != -100)
        sum((each * seed).sum() for each, seed in zip(wanted, seeds, strict=True)).backward()  # type: ignore[union-attr]
        scorer = TokenScorer(model)
        parallel = divided(model, exchange, sequence=sequence)
        found = scorer(model, inputs, temperature=0.7)
        sum((each * seed).sum() for each, seed in zip(found[:2], seeds, strict=True)).backward()  # type: ignore[union-attr]
    assert torch.equal(found.is_top1 > 0, top)
    problems = unlike(gradients(model, parallel, exchange), gradients(whole))
    names = ("log_probs", "entropy")
    assert not problems | unlike(dict(zip(names, found, strict=False)), dict(zip(names, wanted, strict=True))), problems


def generates(mesh: Mesh, names: list[str], sequence: bool = False) -> None:
    """Greedy generation with a cache against the whole model."""
    exchange, ids = open_exchange(mesh.shard, mesh.device, "auto"), batch(5)["input_ids"]
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    for name in names:
        whole, model = build(name).eval(), build(name).eval()
        divided(model, exchange, sequence=sequence)
        assert torch.equal(model.generate(ids, **how), whole.generate(ids, **how)), name


def drops_out(mesh: Mesh, sequence: bool) -> dict[str, Any]:
    """Masks of dropout by shape; loss and gradients, with and without recomputation."""
    exchange = open_exchange(mesh.shard, mesh.device, "auto")
    masks: list[tuple[list[int], int]] = []
    plain = functional.dropout

    def noting(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = plain(x, *args, **kwargs)
        masks.append((list(out.shape), hash(tuple((out == 0).flatten().tolist()))))
        return out

    results, seen, after = [], [], []
    for checkpointing in (False, True, False):
        torch.manual_seed(1)
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.3)
        model = tiny("gpt2", **rates, attn_implementation="eager").double().train()
        parallel = divided(model, exchange, sequence=sequence)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        with patch.object(functional, "dropout", noting):
            loss = model(**batch()).loss
            seen.append(list(masks))
            after.append(torch.get_rng_state().sum().item())
            loss.backward()
        masks.clear()
        results.append({"loss": loss.detach(), **gradients(model, parallel, exchange)})
    same = [unlike(other, results[0]) for other in results[1:]]
    loss = results[0]["loss"].item()
    return {"masks": seen[0], "again": seen[0] == seen[2], "differs": same, "loss": loss, "after": after[-1]}


def frozen_and_restored(mesh: Mesh) -> None:
    """A frozen embedding and frozen keys; then the model is whole again."""
    exchange, inputs = open_exchange(mesh.shard, mesh.device, "auto"), batch()
    whole, model = build("llama"), build("llama")
    for each in (whole, model):
        for part in (each.model.embed_tokens, each.model.layers[0].self_attn.k_proj, each.model.layers[1].mlp):
            part.requires_grad_(False)
    with InFloat64():
        wanted = one_pass(whole, inputs)
        parallel = divided(model, exchange)
        one_pass(model, inputs)
    assert not [name for name, p in model.named_parameters() if not p.requires_grad and p.grad is not None]
    assert unlike(gradients(model, parallel, exchange), gradients(whole)) == {}
    parallel.restore()
    assert [type(module) for module in model.modules()] == [type(module) for module in whole.modules()]
    assert [p.shape for p in model.parameters()] == [p.shape for p in whole.parameters()]
    load_parts(model, {}, dict(whole.named_parameters()))
    with InFloat64():
        assert unlike(one_pass(model, inputs), wanted) == {}


def narrow(mesh: Mesh, name: str, sequence: bool) -> None:
    """In bfloat16: the relative distance of the gradient from that of float64."""
    exchange = open_exchange(mesh.shard, mesh.device, "auto")
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        model = build(name).to(dtype)
        parallel = divided(model, exchange, sequence=sequence)
        one_pass(model, batch())
        found.append(torch.cat([g.flatten().double() for g in gradients(model, parallel, exchange).values()]))
    assert 1e-4 < float((found[1] - found[0]).norm() / found[0].norm()) < 0.05


def counts_exchanges(mesh: Mesh, name: str, sequence: bool) -> list[list[str]]:
    """What is exchanged in forward and in backward of a model without its head."""
    exchange, model = Counting(mesh), build(name)
    divided(model, exchange, sequence=sequence)
    hidden = model.base_model(batch()["input_ids"]).last_hidden_state
    forward = list(exchange.calls)
    exchange.calls.clear()
    hidden.sum().backward()
    return [forward, exchange.calls]


def computes_otherwise(mesh: Mesh, name: str, sequence: bool, how: str) -> None:
    """Nothing differs when activations are recomputed or kept selectively, or blocks compiled."""
    exchange = open_exchange(mesh.shard, mesh.device, "auto")
    found = []
    for way in ("none", how):
        model = build(name)
        parallel = divided(model, exchange, sequence=sequence)
        if way == "compile":
            for block in block_modules(model):
                block.forward = torch.compile(block.forward, backend="aot_eager")
        else:
            enable_activation_checkpointing(model, way)
        found.append(one_pass(model, batch()) | gradients(model, parallel, exchange))
    assert unlike(found[1], found[0], 1e-4) == {}  # Norms compute in fp32 here.
