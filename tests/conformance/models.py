"""The models of the conformance tests: tiny, each with something of its own that an engine can get wrong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = Mapping[str, torch.Tensor]

VOCABULARY = 160
LENGTH = 8
CLASSES = 3
_IGNORED = -100
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    build: Callable[[], Any]
    batch: Callable[[torch.Generator, int], dict[str, torch.Tensor]]
    """Of so many samples."""
    loss_sum: Callable[[Any, Batch], torch.Tensor]
    count: Callable[[Batch], int]
    no_decay: tuple[str, ...] = ("*norm*", "*bias*")


def llama(**changes: Any) -> Any:
    """Grouped-query attention, an untied head."""
    settings = {**_SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2, "use_cache": False}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**settings, "tie_word_embeddings": False, **changes}))


def gpt2(dropout: float = 0.0, layers: int = 2) -> Any:
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
    none = {"bos_token_id": None, "eos_token_id": None}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, **rates, **none, use_cache=False))


def bert() -> Any:
    """An encoder with a classification head and padding."""
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = {name: value for name, value in _SMALL.items() if name not in ("bos_token_id", "eos_token_id")}
    config = tf.BertConfig(**{**settings, "pad_token_id": 0}, num_hidden_layers=2, num_labels=CLASSES, **rates)
    return tf.BertForSequenceClassification(config)


def moe(layers: int = 2) -> Any:
    """A mixture of experts, whose router picks two of four for each token; no auxiliary loss."""
    sizes = {"num_hidden_layers": layers, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = tf.MixtralConfig(**_SMALL, **sizes, output_router_logits=False, use_cache=False)
    config._experts_implementation = "eager"
    return tf.MixtralForCausalLM(config)


def qwen3(layers: int = 2) -> Any:
    return tf.Qwen3ForCausalLM(
        tf.Qwen3Config(**_SMALL, num_hidden_layers=layers, num_key_value_heads=2, head_dim=8, use_cache=False)
    )


def gemma(layers: int = 2) -> Any:
    return tf.GemmaForCausalLM(
        tf.GemmaConfig(**_SMALL, num_hidden_layers=layers, num_key_value_heads=2, head_dim=8, use_cache=False)
    )


def frozen() -> Any:
    """Frozen embedding, layer and norm; an unused head and an unused layer inside a block."""
    model = llama(num_hidden_layers=3)
    for part in (model.model.embed_tokens, model.model.layers[0], model.model.layers[2].input_layernorm):
        part.requires_grad_(False)
    model.unused_head = nn.Linear(32, 150)
    model.model.layers[1].unused = nn.Linear(32, 7)
    return model


class LowRank(nn.Module):
    """A frozen linear layer plus a trainable one of low rank (Hu et al., "LoRA", 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def lora(layers: int = 2) -> Any:
    """Units that mix frozen and trainable parameters, under a frozen embedding."""
    model = llama(num_hidden_layers=layers).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.mlp.down_proj = LowRank(layer.mlp.down_proj)
    return model


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x))))


class Convolutional(nn.Module):
    """A plain module without any library's conventions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, stride=2)
        self.blocks = nn.Sequential(*(Residual(24) for _ in range(3)))
        self.head = nn.Linear(24, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images.to(self.stem.weight.dtype))).mean(dim=(2, 3)))


class Feedforward(nn.Module):
    """A residual block of two linear layers; `recompute` checkpoints calls of it."""

    def __init__(self, size: int, inner: int, *, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, inner, bias=bias)
        self.down = nn.Linear(inner, size, bias=bias)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Embedding, blocks in an order that may repeat them, head. `recompute`: blocks are called through `checkpoint`."""

    def __init__(self, blocks: list[nn.Module], order: list[int], size: int) -> None:
        super().__init__()
        self.order = order
        self.recompute = False
        self.embedding = nn.Embedding(VOCABULARY, size)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for index in self.order:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def stack(layers: int = 3, size: int = 32) -> Stack:
    return Stack([Feedforward(size, 2 * size + 1) for _ in range(layers)], list(range(layers)), size)


def reused() -> Stack:
    return Stack([Feedforward(32, 65) for _ in range(2)], [0, 1, 0], 32)


@dataclass
class Hidden:
    hidden: torch.Tensor
    penalty: torch.Tensor


class Wrapping(Feedforward):
    """Returns an object, keeps a loss of its weights on itself, and is called by a stack that takes both."""

    def forward(self, x: torch.Tensor) -> Any:
        self.penalty = 1e-3 * self.up.weight.pow(2).sum()
        return Hidden(hidden=super().forward(x), penalty=1e-3 * self.down.weight.pow(2).sum())


class ObjectStack(Stack):
    """Blocks return objects; the first one's weight is read once more after all blocks."""

    def __init__(self) -> None:
        super().__init__([Wrapping(32, 65) for _ in range(3)], [0, 1, 2], 32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, penalties = self.embedding(input_ids), []
        for block in self.blocks:
            made = block(x)
            x = made.hidden
            penalties += [block.penalty, made.penalty]
        x = x + F.linear(F.linear(x, self.blocks[0].up.weight), self.blocks[0].down.weight)
        return self.head(self.norm(x)) * (1 + sum(penalties))


class Odd(nn.Module):
    """A block whose parameters no world size divides: a scalar, one element, none, primes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Feedforward(37, 61)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.zeros(1))
        self.nothing = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * (self.inner(x) - x) + self.shift * torch.tanh(x) + self.nothing.sum()


def odd() -> Stack:
    """Sizes that divide nothing, and a frozen bucket without elements."""
    model = Stack([Odd() for _ in range(3)], [0, 1, 2], 37)
    model.blocks[1].empty = nn.Parameter(torch.zeros(3, 0), requires_grad=False)
    return model


class Guided(nn.Module):
    """A frozen block of two inputs, the second a parameter: backward is done with it long before the first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = Feedforward(size, 2 * size)
        self.side = nn.Linear(size, size)

    def forward(self, x: torch.Tensor, guide: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.side(guide)


class GuidedStack(nn.Module):
    """Frozen blocks, each with a guide of its own; the first is called twice."""

    def __init__(self, size: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size)
        self.guides = nn.ParameterList(torch.randn(size) for _ in range(layers))
        self.blocks = nn.ModuleList(Guided(size) for _ in range(layers)).requires_grad_(False)
        self.head = nn.Linear(size, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for guide, block in zip(self.guides, self.blocks, strict=True):
            x = block(x, guide)
        return self.head(self.blocks[0](x, self.guides[1]))


class Detached(nn.Module):
    """A block that reads a weight without giving it a gradient, on the way to its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * size, size) * 0.1)
        self.side = nn.Linear(size, 2 * size)
        self.on_way_back: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(x @ self.weight.detach().T)
        if self.on_way_back is not None and first.requires_grad:
            first.register_hook(self.on_way_back)
        return x + torch.tanh(first + self.side(x)) @ self.weight


class Routed(nn.Module):
    """Each sample goes to the expert that its own values choose: in a small microbatch some experts get no gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.detach().abs().sum(dim=(1, 2)) * 1e3).long() % len(self.experts)
        normed, out = self.norm(x), x
        for index in chosen.unique().tolist():
            mask = (chosen == index)[:, None, None]
            out = out + mask * self.experts[index](normed)
        return out


def routed() -> Stack:
    """Experts as separate modules, of which different ranks use different ones."""
    return Stack([Routed(32) for _ in range(2)], [0, 1], 32)


class Single(nn.Module):
    """No repeated children: everything is the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(19, 83)
        self.activation = nn.Tanh()
        self.second = nn.Linear(83, CLASSES)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(self.activation(self.first(values.to(self.first.weight.dtype))))


def text_batch(generator: torch.Generator, samples: int) -> dict[str, torch.Tensor]:
    """Tokens and labels, some of which are masked, by another number in each sample."""
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    labels = ids.clone()
    masked = torch.randint(0, LENGTH - 2, (samples, 1), generator=generator)
    labels[torch.arange(LENGTH).expand_as(ids) < masked] = _IGNORED
    return {"input_ids": ids, "labels": labels}


def _text_loss(model: Any, batch: Batch) -> torch.Tensor:
    output = model(input_ids=batch["input_ids"])
    logits = output if isinstance(output, torch.Tensor) else output.logits
    targets = batch["labels"][:, 1:].reshape(-1)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=_IGNORED, reduction="sum")


def _text_count(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != _IGNORED).sum())


def _sentence_batch(generator: torch.Generator, samples: int) -> dict[str, torch.Tensor]:
    lengths = torch.randint(2, LENGTH + 1, (samples, 1), generator=generator)
    return {
        "input_ids": torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator),
        "attention_mask": (torch.arange(LENGTH).expand(samples, LENGTH) < lengths).long(),
        "classes": torch.randint(0, CLASSES, (samples,), generator=generator),
    }


def _sentence_loss(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["classes"], reduction="sum")


def _values_batch(*shape: int) -> Callable[[torch.Generator, int], dict[str, torch.Tensor]]:
    def draw(generator: torch.Generator, samples: int) -> dict[str, torch.Tensor]:
        values = torch.randn(samples, *shape, generator=generator, dtype=torch.float64)
        return {"values": values, "classes": torch.randint(0, CLASSES, (samples,), generator=generator)}

    return draw


def _values_loss(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["values"]), batch["classes"], reduction="sum")


def _samples(batch: Batch) -> int:
    return len(batch["classes"])


def _text(build: Callable[[], Any], **changes: Any) -> Subject:
    return Subject(build=build, batch=text_batch, loss_sum=_text_loss, count=_text_count, **changes)


def _values(build: Callable[[], Any], *shape: int) -> Subject:
    return Subject(build=build, batch=_values_batch(*shape), loss_sum=_values_loss, count=_samples, no_decay=("*bias",))


SUBJECTS: dict[str, Subject] = {
    "llama": _text(llama, no_decay=("*norm*",)),
    "gpt2": _text(gpt2, no_decay=("*ln_*", "*.bias")),
    "bert": Subject(build=bert, batch=_sentence_batch, loss_sum=_sentence_loss, count=_samples, no_decay=("*LayerNorm*", "*.bias")),
    "moe": _text(moe, no_decay=("*norm*",)),
    "frozen": _text(frozen, no_decay=("*norm*", "unused_head.*")),
    "conv": _values(Convolutional, 3, 9, 9),
    "lora": _text(lora, no_decay=("*.down",)),
    "stack": _text(stack),
    "reused": _text(reused),
    "objects": _text(ObjectStack),
    "odd": _text(odd, no_decay=("*bias", "*.scale")),
    "routed": _text(routed),
    "detached": _text(lambda: Stack([Detached(32) for _ in range(3)], [0, 1, 2], 32)),
    "guided": _text(GuidedStack),
    "single": _values(Single, 19),
}

_DEPTH = 8


def _divided() -> dict[str, Subject]:
    """Models that are there for tensor and pipeline parallelism alone; of each one with blocks for eight stages."""
    builds: dict[str, Callable[[int], Any]] = {
        "llama": lambda layers: llama(num_hidden_layers=layers),
        "llama-1kv": lambda layers: llama(num_key_value_heads=1, num_hidden_layers=layers),
        "qwen3": qwen3,
        "gemma": gemma,
        "gpt2": lambda layers: gpt2(layers=layers),
        "moe": moe,
    }

    def plain(name: str) -> tuple[str, ...]:
        return ("*ln_*",) if name == "gpt2" else ("*norm*",)

    found = {f"{name}-deep": _text(partial(build, _DEPTH), no_decay=plain(name)) for name, build in builds.items()}
    found["llama-odd"] = _text(lambda: llama(vocab_size=VOCABULARY + 3, tie_word_embeddings=True), no_decay=("*norm*",))
    return found | {name: _text(partial(builds[name], 2), no_decay=("*norm*",)) for name in ("llama-1kv", "qwen3", "gemma")}


MATRIX = tuple(SUBJECTS)
"""Models for data parallelism."""
SUBJECTS |= _divided()
