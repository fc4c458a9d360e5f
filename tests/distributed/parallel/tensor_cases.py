"""Cases on tensor parallelism without the engine: a model divided among ranks against the whole one, in float64."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import transformers as tf

from zeromesh.comm.activation_collectives import Exchange, Pending, open_exchange
from zeromesh.intervals import balanced
from zeromesh.kernels.chunked_cross_entropy import UNCHANGED, LogitChange, chunked_cross_entropy
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.tensor.parallelize_module import Parallelized
from zeromesh.tensor.plan.planner import plan_tensor
from zeromesh.trainer.models.prepare import enable_activation_checkpointing
from zeromesh.trainer.models.small_copy import InFloat64
from zeromesh.trainer.models.tensor_trial import load_parts
from zeromesh.units.plan import block_modules

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "vocab_size": 67,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
_GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 67,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_BIGCODE = {**_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_DISTILBERT = {
    "dim": 32, "hidden_dim": 44, "n_heads": 4, "n_layers": 2, "vocab_size": 67, "dropout": 0.0, "attention_dropout": 0.0,
    "pad_token_id": 0,
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_kv": 6, "d_ff": 44, "num_layers": 2, "num_heads": 4, "vocab_size": 67,
    "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _SMALL.items() if name not in names}


_OPT = {**_without("intermediate_size"), "pad_token_id": 1, "ffn_dim": 44}
_DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 22,
    "first_k_dense_replace": 1,
}  # fmt: skip
_FALCON = {**_without("head_dim", "num_key_value_heads", "intermediate_size"), "ffn_hidden_size": 44}


def made(kind: Any, values: dict[str, Any]) -> Any:
    """A model of a class of transformers with these values of its configuration."""
    config = kind.config_class(**values)
    if any("experts" in name for name in values):
        config._experts_implementation = "eager"
    return kind(config)


_PADDED = {**_SMALL, "pad_token_id": 0}
_QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (tf.LlamaForCausalLM, {**_SMALL, "attention_bias": True, "mlp_bias": True}),
    "llama-1kv": (tf.LlamaForCausalLM, {**_SMALL, "num_key_value_heads": 1}),
    "llama-9-3": (tf.LlamaForCausalLM, {**_SMALL, **_NINE_HEADS, "tie_word_embeddings": True}),
    "qwen3": (tf.Qwen3ForCausalLM, _SMALL),
    "gemma": (tf.GemmaForCausalLM, _SMALL),
    "gemma2": (
        tf.Gemma2ForCausalLM,
        {**_SMALL, "sliding_window": 4, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5},
    ),
    "gemma3": (tf.Gemma3ForCausalLM, {**_PADDED, "sliding_window": 4}),
    "gpt2": (tf.GPT2LMHeadModel, _BIGCODE),
    "opt": (tf.OPTForCausalLM, {**_OPT, "dropout": 0.0, "word_embed_proj_dim": 24}),
    "falcon": (
        tf.FalconForCausalLM,
        {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False, "bias": True},
    ),
    "falcon-mq": (
        tf.FalconForCausalLM,
        {**_FALCON, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "alibi": False},
    ),
    "falcon-alibi": (
        tf.FalconForCausalLM,
        {**_FALCON, "new_decoder_architecture": False, "multi_query": False, "alibi": True},
    ),
    "deepseek": (tf.DeepseekV3ForCausalLM, {**_without("head_dim", "num_key_value_heads"), **_DEEPSEEK}),
    "apertus": (tf.ApertusForCausalLM, _PADDED),
    "bloom": (tf.BloomForCausalLM, {**_without("num_attention_heads", "num_hidden_layers"), "n_head": 4, "n_layer": 2}),
    "bert": (
        tf.BertForMaskedLM,
        {**_PADDED, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": False},
    ),
    "openai-gpt": (tf.OpenAIGPTLMHeadModel, _BIGCODE),
    "bigcode": (tf.GPTBigCodeForCausalLM, {**_BIGCODE, "multi_query": True}),
    "bigcode-heads": (tf.GPTBigCodeForCausalLM, {**_BIGCODE, "multi_query": False}),
    "mpt": (tf.MptForCausalLM, {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "vocab_size": 67}),
    "gpt_neox_japanese": (
        tf.GPTNeoXJapaneseForCausalLM,
        {**_without("intermediate_size"), "intermediate_multiple_size": 2, **_QUIET},
    ),
    "distilbert": (tf.DistilBertForMaskedLM, _DISTILBERT),
    "t5": (tf.T5ForConditionalGeneration, {**_T5, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"}),
    "gpt_neox": (tf.GPTNeoXForCausalLM, {**_SMALL, **_QUIET}),
    "phi3": (tf.Phi3ForCausalLM, _PADDED),
    "phi3-1kv": (tf.Phi3ForCausalLM, {**_PADDED, "num_key_value_heads": 1}),
    "olmo2": (tf.Olmo2ForCausalLM, _SMALL),
    "mixtral": (
        tf.MixtralForCausalLM,
        {**_SMALL, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
    "qwen3_moe": (
        tf.Qwen3MoeForCausalLM,
        {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 22, "mlp_only_layers": [1]},
    ),
}
MODELS: dict[str, Callable[[], Any]] = {name: partial(made, *row) for name, row in _ROWS.items()}


class Counting:
    """An exchange that notes the most elements that one call was given or gave."""

    def __init__(self, inner: Exchange) -> None:
        self._inner = inner
        self.size, self.index = inner.size, inner.index
        self.most = 0
        self.calls: list[str] = []

    def _note(self, what: str, tensor: torch.Tensor, pending: Pending) -> Pending:
        self.calls.append(what)
        self.most = max(self.most, tensor.numel() * (self.size if what == "gather" else 1))
        return pending

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        return self._note("sum", tensor, self._inner.all_reduce_async(tensor))

    def all_gather_async(self, tensor: torch.Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        return self._note("gather", tensor, self._inner.all_gather_async(tensor, dim, sizes=sizes))

    def reduce_scatter_async(self, tensor: torch.Tensor, dim: int) -> Pending:
        return self._note("reduce_scatter_async", tensor, self._inner.reduce_scatter_async(tensor, dim))


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model whose biases and norms are random too."""
    torch.manual_seed(7)
    model = MODELS[name]().to(dtype)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.1)
    return model.train()


def batch(length: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(2, 67, (2, length), generator=generator)
    labels = torch.randint(2, 67, (2, length), generator=generator)
    labels[0, :3] = -100
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    labels[1, -2:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def divided(
    name: str, exchange: Exchange, *, sequence: bool = False, model: Any = None, rules: dict[str, str] | None = None
) -> tuple[Any, Parallelized]:
    """The model with this rank's part of it."""
    model = model or build(name)
    whole = {key: value.detach().clone() for key, value in model.named_parameters()}
    parallel = Parallelized(model, exchange, plan_tensor(model, exchange.size, rules), sequence=sequence)
    load_parts(model, parallel.parts, whole)
    return model, parallel


def assembled(model: Any, parallel: Parallelized, exchange: Exchange) -> dict[str, torch.Tensor]:
    """Every whole gradient. One that is in `parts` is put together from all ranks, all others are this rank's."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        part = parallel.parts.get(name)
        if part is None:
            found[name] = gradient
            continue
        whole = gradient.new_zeros(part.region.shape)
        if part.partial or part.holders[0] == exchange.index:
            index = torch.arange(whole.numel()).view(whole.shape)
            for dim, intervals in enumerate(part.region.dims):
                index = torch.cat([index.narrow(dim, one.start, one.length) for one in intervals], dim)
            whole.view(-1)[index.reshape(-1)] = gradient.reshape(-1)
        found[name] = exchange.all_reduce_async(whole).wait()
    return found


def gradients(whole: Any) -> dict[str, torch.Tensor]:
    """By name; zeros where there is none."""
    named = dict(whole.named_parameters())
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest relative difference of each tensor, where it is above the tolerance; NaN counts as one."""
    assert expected.keys() == found.keys()
    result = {}
    for name, tensor in expected.items():
        error = float((found[name] - tensor).abs().max()) / max(1e-3, float(tensor.abs().max()))
        if not error <= 1e-9:
            result[name] = error
    return result


def equals(mesh: Mesh, models: list[str], sequence: bool = False, checkpointing: bool = False) -> dict[str, Any]:
    """Loss, logits and every gradient of the divided models against the whole ones; what differs, by model."""
    exchange = open_exchange(mesh.shard, mesh.device, "auto")
    wrong: dict[str, Any] = {}
    for name in models:
        inputs = batch()
        with InFloat64():
            whole = build(name)
            expected = whole(**inputs)
            expected.loss.backward()
            model, parallel = divided(name, exchange, sequence=sequence)
            if checkpointing:
                model.gradient_checkpointing_enable(
                    {"use_reentrant": False, "context_fn": lambda: (nullcontext(), InFloat64())}
                )
            found = model(**inputs)
            found.loss.backward()
        reference = gradients(whole)
        problems = differences(reference, assembled(model, parallel, exchange))
        problems |= differences(
            {"loss": expected.loss, "logits": expected.logits}, {"loss": found.loss, "logits": found.logits}
        )
        if problems:
            wrong[name] = problems
    return wrong


def learns_in_chunks(mesh: Mesh, name: str, sequence: bool = False) -> dict[str, Any]:
    """The sum of the losses by the divided head in chunks, and every gradient; and how much was exchanged at once."""
    exchange = Counting(open_exchange(mesh.shard, mesh.device, "auto"))
    inputs = batch()
    targets = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[..., 1:].reshape(-1)
    count = int((targets != -100).sum())
    with InFloat64():
        whole = build(name)
        expected = whole(**inputs).loss * count
        expected.backward()
        model, parallel = divided(name, exchange, sequence=sequence)
        hidden = model.base_model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        exchange.calls.clear()
        head = model.get_output_embeddings()
        found = chunked_cross_entropy(
            hidden.flatten(0, 1),
            head.weight,
            head.bias,
            targets,
            seed=1.0,
            chunk_tokens=3,
            sizes=head.sizes,
            exchange=exchange,
        )
        calls = list(exchange.calls)
        found.backward()
        most = exchange.most
    problems = differences(gradients(whole), assembled(model, parallel, exchange))
    problems |= differences({"loss": expected}, {"loss": found})
    return {"wrong": problems, "most": most, "hidden": hidden.numel(), "calls": calls, "kept": count}


def losses_of_halves(mesh: Mesh, dtype: str, chunk_tokens: int) -> list[float]:
    changes = (UNCHANGED, LogitChange(scale=0.3), LogitChange(scale=1.5, cap=2.0))
    return [each for change in changes for each in _losses_of_halves(mesh, dtype, chunk_tokens, change)]


def _losses_of_halves(mesh: Mesh, dtype: str, chunk_tokens: int, change: LogitChange) -> list[float]:
    """Differences of the loss and its gradients from those of the whole head, with an odd vocabulary and masked targets, of
    logits that are changed or not."""
    exchange = open_exchange(mesh.shard, mesh.device, "auto")
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        (torch.randn(*shape, generator=generator) * scale).to(kind)
        for shape, scale in (((29, 16), 1.0), ((51, 16), 1.0), ((51,), 1.0))
    )
    targets = torch.randint(0, 51, (29,), generator=generator)
    targets[[0, 7]] = -100
    wholes = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = chunked_cross_entropy(*wholes, targets, seed=2.0, chunk_tokens=chunk_tokens, change=change)
    (expected * 2.0).backward()
    sizes = [one.length for one in balanced(51, exchange.size)]
    own = balanced(51, exchange.size)[exchange.index]
    halves = [
        tensor.clone().requires_grad_() for tensor in (hidden, weight[own.start : own.end], bias[own.start : own.end])
    ]
    settings: dict[str, Any] = {
        "sizes": sizes, "exchange": exchange, "seed": 2.0, "chunk_tokens": chunk_tokens, "change": change
    }  # fmt: skip
    found = chunked_cross_entropy(*halves, targets, **settings)
    (found * 2.0).backward()
    with torch.no_grad():
        quiet = chunked_cross_entropy(*halves, targets, **settings)
    of = [tensor.grad for tensor in wholes]
    pairs = [(found, expected), (quiet, found), (halves[0].grad, of[0])]
    pairs += [(halves[number].grad, of[number][own.start : own.end]) for number in (1, 2)]
    return [float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs]


def generates(mesh: Mesh, names: list[str], sequence: bool = False) -> dict[str, Any]:
    """Greedy generation with a cache against the whole model; what differs, by model."""
    exchange = open_exchange(mesh.shard, mesh.device, "auto")
    wrong = {}
    for name in names:
        ids = batch(5)["input_ids"]
        whole = build(name).eval()
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        expected = whole.generate(ids, **settings)
        model, _ = divided(name, exchange, sequence=sequence)
        found = model.eval().generate(ids, **settings)
        if found.tolist() != expected.tolist():
            wrong[name] = [expected.tolist(), found.tolist()]
    return wrong


def drops_out(mesh: Mesh, sequence: bool) -> dict[str, Any]:
    """Masks of dropout by shape; loss and gradients, with and without recomputation."""
    exchange = open_exchange(mesh.shard, mesh.device, "auto")
    masks: list[tuple[list[int], int]] = []
    plain = torch.nn.functional.dropout

    def noting(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = plain(x, *args, **kwargs)
        masks.append((list(out.shape), hash(tuple((out == 0).flatten().tolist()))))
        return out

    config = tf.GPT2Config(**_GPT2, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3, attn_implementation="eager")
    results, seen = [], []
    for checkpointing in (False, True, False):
        torch.manual_seed(1)
        model, parallel = divided(
            "gpt2", exchange, sequence=sequence, model=tf.GPT2LMHeadModel(config).double().train()
        )
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        torch.nn.functional.dropout = noting
        try:
            loss = model(**batch()).loss
            seen.append(list(masks))
            after = torch.get_rng_state().sum().item()
            loss.backward()
        finally:
            torch.nn.functional.dropout = plain
            masks.clear()
        results.append({"loss": loss.detach(), **assembled(model, parallel, exchange)})
    same = [differences(results[0], other) for other in results[1:]]
    return {
        "masks": seen[0],
        "again": seen[0] == seen[2],
        "differs": same,
        "loss": results[0]["loss"].item(),
        "after": after,
    }


def frozen_and_restored(mesh: Mesh) -> list[Any]:
    """A frozen embedding and frozen keys; then the model is whole again."""
    exchange = open_exchange(mesh.shard, mesh.device, "auto")
    inputs = batch()

    def freeze(model: Any) -> Any:
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].self_attn.k_proj.requires_grad_(False)
        model.model.layers[1].mlp.requires_grad_(False)
        return model

    with InFloat64():
        whole = freeze(build("llama"))
        whole(**inputs).loss.backward()
        model, parallel = divided("llama", exchange, model=freeze(build("llama")))
        model(**inputs).loss.backward()
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad and p.grad is not None]
    problems = differences(gradients(whole), assembled(model, parallel, exchange))
    parallel.restore()
    kinds = {type(module).__name__ for module in model.modules()} - {
        type(module).__name__ for module in whole.modules()
    }
    shapes = [list(p.shape) for p in model.parameters()] == [list(p.shape) for p in whole.parameters()]
    load_parts(model, {}, dict(whole.named_parameters()))
    with InFloat64():
        again = differences({"loss": whole(**inputs).loss}, {"loss": model(**inputs).loss})
    return [frozen, problems, sorted(kinds), shapes, again]


def narrow(mesh: Mesh, name: str, sequence: bool) -> float:
    """In bfloat16: the relative distance of the gradient from that of float64."""
    exchange = open_exchange(mesh.shard, mesh.device, "auto")
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        model, parallel = divided(name, exchange, sequence=sequence, model=build(name).to(dtype))
        model(**batch()).loss.backward()
        found.append(torch.cat([g.flatten().double() for g in assembled(model, parallel, exchange).values()]))
    return float((found[1] - found[0]).norm() / found[0].norm())


def counts_exchanges(mesh: Mesh, name: str, sequence: bool) -> list[list[str]]:
    """What is exchanged in forward and in backward of a model without its head."""
    exchange = Counting(open_exchange(mesh.shard, mesh.device, "auto"))
    model, _ = divided(name, exchange, sequence=sequence)
    hidden = model.base_model(batch()["input_ids"]).last_hidden_state
    forward = list(exchange.calls)
    exchange.calls.clear()
    hidden.sum().backward()
    return [forward, exchange.calls]


def computes_otherwise(mesh: Mesh, name: str, sequence: bool, how: str) -> dict[str, float]:
    """What differs when activations are recomputed or kept selectively, or blocks compiled."""
    exchange = open_exchange(mesh.shard, mesh.device, "auto")
    found = []
    for way in ("none", how):
        model, parallel = divided(name, exchange, sequence=sequence)
        if way == "compile":
            for block in block_modules(model):
                block.forward = torch.compile(block.forward, backend="aot_eager")
        else:
            enable_activation_checkpointing(model, way)
        loss = model(**batch()).loss
        loss.backward()
        found.append({"loss": loss.detach(), **assembled(model, parallel, exchange)})
    # Norms compute in fp32 here.
    return {key: error for key, error in differences(*found).items() if not error <= 1e-4}
