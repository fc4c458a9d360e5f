"""Trials on a small copy in float64: of the targets that a model's loss averages over, of the chunked head in its place, and of
packed documents, which are kept apart by masks, and mix in recurrence, convolution and masks that a model makes itself."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args
from weakref import WeakSet

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from zeromesh.errors import ConfigError, PhaseError, summary
from zeromesh.kernels.chunked_head import UNCHANGED, LogitChange
from zeromesh.trainer.attention.packed_attention import PackedAttention
from zeromesh.trainer.data.collate import count_targets, shifted
from zeromesh.trainer.losses.chunked_head import ChunkedHead, Route
from zeromesh.trainer.models import small_copy
from zeromesh.trainer.models.adapters import output_layer, pretrained_of
from zeromesh.trainer.weights.safetensors_source import quiet_library
from zeromesh.units.plan import embedding_of
from zeromesh.weight_init.weight_sources import seeded_cpu

_TOKENS = 24
_DOCUMENTS = ((0, 0, 11), (0, 11, 13), (1, 0, 9), (1, 9, 5), (1, 14, 10))
"""Row, start and length in tokens of each document in a batch of two rows of `_TOKENS`."""
_DOCUMENT_TOLERANCE = 1e-8  # relative, between a document's outputs alone and packed


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    causal: bool | None
    """True if the loss is a mean over shifted labels, False if over unshifted ones; None if neither was found."""
    route: Route | None = None
    """The route by which the chunked head replaces the loss; None with the `reason` why it cannot."""
    reason: str = ""
    change: LogitChange | None = None  # The change of the logits of its class; None if it was not found.
    auxiliary: bool = False
    """True if the loss has terms that are no mean over targets, such as auxiliary losses of experts."""
    sees_later: bool = False  # True if logits depend on the tokens that they are to predict.


@quiet_library()
def examine(model: Any, known: bool | None = None) -> Verdict:
    """Try a small copy of a Hugging Face language model. `known` tells if its class shifts labels, for want of a small copy."""
    if isinstance(small := small_copy.small_copy(model, lambda each: each(**_inputs(each)).loss), str):
        return Verdict(causal=known, reason="no small copy of it could be tried")
    auxiliary = bool(getattr(small.config, "output_router_logits", False))
    small.config.output_router_logits = False
    causal = next((shifted for shifted in (True, False) if _is_mean_over(small, shifted)), None)
    small.config.output_router_logits = auxiliary
    if causal is None:
        return Verdict(causal=None, reason="its loss is a mean over neither labels nor shifted labels")
    ids = _inputs(small).get("input_ids")
    both_ways = causal and getattr(small.config, "is_decoder", None) is False and not small.config.is_encoder_decoder
    if both_ways and ids is not None:
        other = ids.clone()
        other[:, -1] = torch.where(ids[:, -1] == 1, 2, 1)
        with small_copy.InFloat64(), torch.no_grad():
            one, two = (small(input_ids=each).logits[:, :-1] for each in (ids, other))
        if not torch.allclose(one, two, rtol=1e-9, atol=1e-9):  # Earlier logits depend on the last token.
            return Verdict(causal=True, reason="it sees the tokens that it is to predict", sees_later=True)
    auxiliary = auxiliary and not _is_mean_over(small, causal)
    reason = unlike = _unlike_its_class(model)
    for route in get_args(Route):
        if isinstance(found := _try_chunked_head(small, route, causal=causal), LogitChange):
            taken = None if unlike else route
            return Verdict(causal=causal, route=taken, reason=unlike, change=found, auxiliary=auxiliary)
        reason = reason or found  # The first route, the loss function, gives the reason.
    return Verdict(causal=causal, reason=reason, auxiliary=auxiliary)


def _unlike_its_class(model: Any) -> str:
    """Return the reason why logits may differ from those of a copy of the class; empty if none."""
    if type(head := output_layer(model)) is not nn.Linear:
        return f"its head is a {type(head).__module__}.{type(head).__name__}, and no nn.Linear"
    if "forward" in vars(model) or "forward" in vars(head):
        return "forward of the model or of its head was replaced"
    return "its head has hooks" if head._forward_hooks or head._forward_pre_hooks else ""


def _try_chunked_head(small: Any, route: Route, *, causal: bool) -> LogitChange | str:
    """Return the transformation of `small`'s logits if the chunked head gives the same loss and gradients, else why not."""
    if type(head := small.get_output_embeddings()) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a Linear"
    inputs = _inputs(small)
    count = count_targets(inputs["labels"], causal=causal)
    targets = shifted(inputs["labels"]) if causal else inputs["labels"]
    change = UNCHANGED
    small.train()
    try:
        with small_copy.InFloat64():
            own = _gradients(small, lambda: small(**inputs).loss * count)
            while True:
                chunked = ChunkedHead(model=small, route=route, chunk_tokens=3, change=change)
                run = partial(chunked.run, small, inputs, targets=targets, seed=1.0, count=count)
                try:
                    found = _gradients(small, run)
                    break
                except PhaseError:
                    if chunked.found in (None, change):
                        raise
                    change = chunked.found  # The first run has measured the change.
    except small_copy.ERRORS as error:
        return str(error) if isinstance(error, PhaseError) else summary(error)
    finally:
        small.eval()
    if (name := small_copy.differing_gradient(found, own, small_copy.LOSS_TOLERANCE)) is not None:
        return f"the {f'gradient of {name}' if name else 'loss'} differs"
    return change


def _gradients(small: Any, evaluate: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    with seeded_cpu(0, "trial"), torch.enable_grad():
        return small_copy.gradients_of(small, evaluate())


def _inputs(small: Any, sequences: slice = slice(None)) -> dict[str, Any]:
    """Return two sequences with 4 and 6 labels, of which 4 and 5 are targets when shifted, or one of them. The decoder of a model
    of pictures or sound gets random encoder outputs, as its loss depends on labels alone."""
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
    """Return True if mean loss x targets of a batch of two sequences is the sum of the values of each sequence alone."""
    parts = [_inputs(small, sequences) for sequences in (slice(None), slice(0, 1), slice(1, 2))]
    try:
        with small_copy.InFloat64(), torch.no_grad():
            sums = [float(small(**part).loss) * count_targets(part["labels"], causal=causal) for part in parts]
    except small_copy.ERRORS:
        return False
    return abs(sums[1] + sums[2] - sums[0]) <= 1e-9 * abs(sums[0])


_SEPARATE: WeakSet[nn.Module] = WeakSet()  # Models whose documents were found to stay apart.


def packed_batch(small: Any) -> dict[str, torch.Tensor]:
    """Return token ids and positions of the packed documents of trials, `[2, tokens]`."""
    embedding = embedding_of(small, "input")
    vocabulary = small.config.get_text_config().vocab_size if embedding is None else len(embedding.weight)
    ids = torch.randint(min(5, vocabulary - 1), vocabulary, (2, _TOKENS), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for *_, length in _DOCUMENTS]).view(2, _TOKENS)
    return {"input_ids": ids, "position_ids": positions}


def require_separate_documents(model: nn.Module) -> None:
    """Raise `ConfigError` with the module that mixes tokens of packed documents in a small copy, or if that cannot be tried."""
    if model not in _SEPARATE and (found := _difference(pretrained_of(model))):
        apart = "data.packing: false, which gives each a sequence of its own"
        cure = f"set it to false, or for conversations and pairs {apart}, and leave out a dataset's own position_ids that restart"
        raise ConfigError(f"{type(pretrained_of(model) or model).__name__} {found}; {cure}", where="data.separate_documents")
    _SEPARATE.add(model)


def _difference(model: Any | None) -> str:
    """Return the reason why documents mix or the trial is impossible; empty if they stay apart."""
    passes: list[small_copy.Pass] = []

    def run(small: Any) -> torch.Tensor:
        small_copy.perturb(small)
        passes[:] = [_pass(small), *(_pass(small, number) for number in range(len(_DOCUMENTS)))]
        return passes[0].gradients[""]

    small = "no model of transformers" if model is None else small_copy.small_copy(model, run)
    if isinstance(small, str):
        return f"cannot be tried with packed documents, as no small copy of it runs with them ({small})"
    together, *alone = passes
    sums = {name: torch.stack([each.gradients[name] for each in alone]).sum(0) for name in together.gradients}
    parts = [(each.outputs, partial(_document, *place)) for each, place in zip(alone, _DOCUMENTS, strict=True)]
    found = small_copy.pass_difference(small, sums, parts, together, _DOCUMENT_TOLERANCE)
    return found and f"computes something else for a document beside another one, {found}, in a trial on a small copy"


def _pass(small: Any, document: int | None = None) -> small_copy.Pass:
    """Run a document alone, as a user would, or all packed; the loss is a weighted sum of logits or, for no head, hidden states."""
    packed = packed_batch(small)
    ids, positions = packed["input_ids"], packed["position_ids"]
    takes = inspect.signature(type(small).forward).parameters
    given: dict[str, Any] = {}
    context: AbstractContextManager[None] = nullcontext()
    place = slice(None), slice(None)
    if document is None:
        context = PackedAttention({"position_ids": positions}).in_force()
        given |= {"position_ids": positions} if "position_ids" in takes else {}
    else:
        row, begin, length = _DOCUMENTS[document]
        place = slice(row, row + 1), slice(begin, begin + length)

    def loss() -> torch.Tensor:
        found = small(input_ids=ids[place], **given)
        logits = getattr(found, "logits", None)
        result: torch.Tensor = found[0] if logits is None else logits
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(2, _TOKENS, result.shape[-1], generator=generator, dtype=result.dtype)[place]
        # Logits of tokens that are none are the lowest finite number.
        return (result.masked_fill(result.abs() >= 1e30, 0.0) * weights).sum()

    with context:
        return small_copy.run_pass(small, loss)


def _document(row: int, begin: int, length: int, together: torch.Tensor, alone: torch.Tensor) -> torch.Tensor | None:
    """Return one document of a tensor of all; None for unexpected shapes."""
    changed = small_copy.changed_dims(together, alone)
    if [(together.shape[dim], alone.shape[dim]) for dim in changed] != [(2, 1), (_TOKENS, length)]:
        return None
    return together.narrow(changed[0], row, 1).narrow(changed[1], begin, length)
