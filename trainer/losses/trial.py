"""The trial, on a small copy, of what a model's loss is the mean of, and of whether the chunked head may stand for it.

The copy has the model's own class and configuration with fewer and smaller layers, in float64 throughout, on CPU. The
model itself is not run, and need not have any memory yet.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, get_args

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput

from zeromesh.errors import PhaseError, summary
from zeromesh.kernels.chunked_cross_entropy import UNCHANGED, LogitChange
from zeromesh.overrides import override
from zeromesh.trainer.data.collate import count_targets
from zeromesh.trainer.losses.chunked_head import ChunkedHead, Route
from zeromesh.trainer.models.adapters import output_layer
from zeromesh.weight_init.weight_sources import INITIALISER_ERRORS, seeded_cpu

_LARGEST_COPY = 30_000_000  # parameters: 240 MB in float64, and as much for gradients
_TOLERANCE = 1e-10  # relative; two orders of the same float64 sums differ by less than 1e-13
ERRORS = (*INITIALISER_ERRORS, PhaseError, NotImplementedError, OSError, AssertionError)
# Sizes of a small copy, and of the configurations inside it. A value that is smaller already stays.
_SMALL = {
    "d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_layers": 2, "decoder_layers": 2, "max_target_positions": 64,
    "hidden_size": 32, "intermediate_size": 48, "ffn_dim": 48, "ffn_hidden_size": 48, "n_inner": 48, "d_ff": 48,
    "vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "word_embed_proj_dim": 32,
    "embedding_size": 32, "rotary_dim": 4, "max_position_embeddings": 64, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "chunk_size": 16, "mamba_chunk_size": 16,
    "n_group": 2, "topk_group": 1, "num_kv_shared_layers": 0,
}  # fmt: skip
_WIDTHS = {name: _SMALL[name] for name in ("vocab_size", "num_experts", "num_local_experts", "num_experts_per_tok")}
# Tried in turn: sizes depend on each other in ways that differ between architectures; hybrids need several layers.
_REDUCTIONS: tuple[tuple[Mapping[str, int], int], ...] = (
    ({**_SMALL, "head_dim": 8}, 2),
    (_SMALL, 2),
    ({**_SMALL, "head_dim": 8}, 8),
    ({**_SMALL, "head_dim": 8, "num_key_value_heads": 4}, 2),
    (_WIDTHS, 2),
    ({}, 2),
    ({}, 10**6),
)
_SPECIAL_IDS = (
    "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
)  # fmt: skip
_TRIAL = "trial"


class InFloat64(TorchFunctionMode):
    """Casts to fp32, which models and losses do by name, become casts to float64: nothing is rounded to less."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].to(torch.float64)
        if not any(arg is torch.float32 for arg in chain(args, kwargs.values())):
            return func(*args, **kwargs)
        widened = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        named = {name: torch.float64 if arg is torch.float32 else arg for name, arg in kwargs.items()}
        return func(*widened, **named)


@contextmanager
def whole_passes_in_float64() -> Iterator[None]:
    """Inside the block `InFloat64` holds for what backward computes again too: torch calls backward outside of its modes."""
    own = vars(torch.autograd)["_engine_run_backward"]

    def run_backward(*arguments: Any, **named: Any) -> Any:
        with InFloat64():
            return own(*arguments, **named)

    put_back = override(torch.autograd, "_engine_run_backward", run_backward)
    try:
        with InFloat64():
            yield
    finally:
        put_back()


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The findings of the trial."""

    causal: bool | None
    """True if the loss is a mean over shifted labels; None if over neither labels nor shifted labels, as far as is known."""
    route: Route | None = None
    """How the chunked head replaces the model's loss, or None with the `reason` why it cannot."""
    reason: str = ""
    change: LogitChange = UNCHANGED
    """The change that the model makes to its logits before its loss."""
    auxiliary: bool = False
    """True if the loss has terms that are no mean over targets (auxiliary losses of experts)."""


def examine(model: Any, known: bool | None = None) -> Verdict:
    """Try a small copy of a Hugging Face language model, whose batch has `input_ids` and `labels` of one shape.

    `known`: whether its class is known to shift labels, which stands where no small copy can be made.
    """
    small = small_copy(model, lambda each: each(**_inputs(each)).loss)
    if isinstance(small, str):
        return Verdict(causal=known, reason="no small copy of it could be tried")
    auxiliary = bool(getattr(small.config, "output_router_logits", False))
    small.config.output_router_logits = False
    causal = next((shifted for shifted in (True, False) if _is_mean_over(small, shifted)), None)
    small.config.output_router_logits = auxiliary
    if causal is None:
        return Verdict(causal=None, reason="its loss is a mean over neither labels nor shifted labels")
    if auxiliary:
        auxiliary = not _is_mean_over(small, causal)
    unlike = _unlike_its_class(model)
    if unlike:
        return Verdict(causal=causal, reason=unlike, auxiliary=auxiliary)
    reason = ""
    for route in get_args(Route):
        found = _try_chunked_head(small, route, causal=causal)
        if isinstance(found, LogitChange):
            return Verdict(causal=causal, route=route, change=found, auxiliary=auxiliary)
        reason = reason or found  # The trial of the loss function, which is the first, says why.
    return Verdict(causal=causal, reason=reason, auxiliary=auxiliary)


def _unlike_its_class(model: Any) -> str:
    """Why logits of `model` may be others than those of a copy of its class; empty where they are not."""
    head = output_layer(model)
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__module__}.{type(head).__name__}, and no nn.Linear"
    if "forward" in vars(model) or "forward" in vars(head):
        return "forward of the model or of its head was replaced"
    return "its head has hooks" if head._forward_hooks or head._forward_pre_hooks else ""


def _try_chunked_head(small: Any, route: Route, *, causal: bool) -> LogitChange | str:
    """Return how `small` changes its logits, where the chunked head then gives the loss and every gradient of its own loss; else
    why it does not.

    Both run in training mode with the same random numbers, so dropout is no difference.
    """
    head = small.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a Linear"
    inputs = _inputs(small)
    count = count_targets(inputs["labels"], causal=causal)
    targets = shifted(inputs["labels"]) if causal else inputs["labels"]
    change = UNCHANGED
    small.train()
    try:
        with InFloat64():
            own = _gradients(small, lambda: small(**inputs).loss * count)
            while True:
                chunked = ChunkedHead(small, route=route, chunk_tokens=3, change=change)
                run = partial(chunked.run, small, inputs, targets=targets, seed=1.0, count=count)
                try:
                    found = _gradients(small, run)
                    break
                except PhaseError:
                    if chunked.found in (None, change):
                        raise
                    change = chunked.found  # The first run has shown it.
    except ERRORS as error:
        return str(error) if isinstance(error, PhaseError) else summary(error)
    finally:
        small.eval()
    # Some gradients are zero but for rounding (attention does not see a bias of its keys).
    rounding = 1e-4 * max(float(gradient.norm()) for gradient in own.values())
    for name, gradient in own.items():
        difference = float((found[name] - gradient).norm())
        if not difference <= _TOLERANCE * (float(gradient.norm()) + rounding):
            return f"the {'loss' if name == '' else 'gradient of ' + name} differs"
    return change


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Return labels `[batch, sequence]` moved so that position i holds the label of i + 1; the last has none (-100)."""
    return nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]


def _gradients(small: Any, evaluate: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the loss under the empty name, and the gradient of every parameter that has one (Whisper's positions have none)."""
    named = {name: parameter for name, parameter in small.named_parameters() if parameter.requires_grad}
    with seeded_cpu(0, _TRIAL), torch.enable_grad():
        loss = evaluate()
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(named.items(), gradients, strict=True)
    return {"": loss.detach(), **{name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}}


def _inputs(small: Any, sequences: slice = slice(None)) -> dict[str, Any]:
    """Two sequences with 4 and 6 labels, of which 4 and 5 are targets when shifted, or one of them.

    A decoder that reads pictures or sound is given what an encoder would have made of them: its loss is about labels alone.
    """
    vocab = small.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocab, (2, 8), generator=generator)
    labels = ids.roll(3, dims=1).clone()
    labels[0, :4] = -100
    labels[1, 6:] = -100
    if not small.config.is_encoder_decoder or small.main_input_name == "input_ids":
        return {"input_ids": ids[sequences], "labels": labels[sequences]}
    width = getattr(small.config, "encoder", small.config).hidden_size
    hidden = torch.randn(2, 6, width, generator=generator, dtype=torch.float64)
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=hidden[sequences]), "labels": labels[sequences]}


def _is_mean_over(small: Any, causal: bool) -> bool:
    """Return True if mean x count is a sum: for two sequences together it is that of the one plus that of the other."""
    parts = [_inputs(small, sequences) for sequences in (slice(None), slice(0, 1), slice(1, 2))]
    try:
        with InFloat64(), torch.no_grad():
            sums = [float(small(**part).loss) * count_targets(part["labels"], causal=causal) for part in parts]
    except ERRORS:
        return False
    return abs(sums[1] + sums[2] - sums[0]) <= 1e-9 * abs(sums[0])


def small_copy(model: Any, run: Callable[[Any], torch.Tensor]) -> Any | str:
    """The first small copy, in float64, that can be built and of which `run` gives finite numbers; else why there is none."""
    reason = "none of them is small"
    for sizes, layers in _REDUCTIONS:
        try:
            config = smaller(model.config, sizes, layers)
            with torch.device("meta"):
                size = sum(p.numel() for p in type(model)(copy.deepcopy(config)).parameters())
            if size > _LARGEST_COPY:
                continue
            with seeded_cpu(0, "small copy"), torch.enable_grad():
                small = type(model)(config).double().eval()
                with InFloat64():
                    finite = bool(torch.isfinite(run(small)).all())
        except ERRORS as error:
            reason = summary(error)
            continue
        if finite:
            return small
        reason = "its numbers are not finite"
    return reason


def smaller(config: Any, sizes: Mapping[str, int], layers: int) -> Any:
    """A copy with at most `layers` layers, or up to 8 where that takes one of each kind that the configuration lists, and with
    sizes reduced to `sizes`; so are the configurations inside it."""
    small = copy.deepcopy(config)
    for name, inside in list(vars(small).items()):
        if isinstance(inside, PreTrainedConfig):
            setattr(small, name, smaller(inside, sizes, layers))
    before = getattr(small, "num_hidden_layers", None)
    if isinstance(before, int):
        lists = {name: each for name, each in vars(small).items() if isinstance(each, list) and len(each) == before > 0}
        layers = max(layers, *(min(8, 1 + max(map(each.index, each))) for each in lists.values()), 0)
        for name, each in lists.items():
            setattr(small, name, each[:layers])
        small.num_hidden_layers = min(before, layers)
    for name, size in sizes.items():
        try:
            value = getattr(small, name, None)
        except ERRORS:  # Layers have one each.
            continue
        if isinstance(value, int) and value > size:
            setattr(small, name, size)
    for name in _SPECIAL_IDS:
        value = getattr(small, name, None)
        if isinstance(value, int) and value >= getattr(small, "vocab_size", value + 1):
            setattr(small, name, 0)
    # Fused implementations have no float64.
    if str(getattr(small, "_attn_implementation", "sdpa")) not in ("sdpa", "eager"):
        small._attn_implementation = "eager"
    small._experts_implementation = "eager"
    return small
