"""Packed documents: the trial, on a small copy, that they do not affect each other, and the boundaries that flash attention gets.

Restarting position ids separate documents only in models that derive masks from them. Other models mix the tokens:
their masks ignore positions, or recurrence or convolution mixes tokens. The separation costs

    eager, sdpa       a mask of [batch, 1, sequence, sequence], with which sdpa takes a kernel that is slower than flash attention
    flex_attention    a mask of blocks, which transformers derives from the position ids
    flash_attention   nothing, as the kernel takes document boundaries. transformers derives them for a batch of one sequence
                      only, and synchronises the device in every layer; here they come from position ids on the CPU
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import ConfigError
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.trainer.models.small_copy import small_copy, vary
from zeromesh.trainer.models.user_model import ForwardInputs
from zeromesh.zero.hooks import tensors_in, watch_outputs

_TOKENS = 24
_DOCUMENTS = ((0, 0, 11), (0, 11, 13), (1, 0, 9), (1, 9, 5), (1, 14, 10))
"""Row, start and length in tokens of each document in a batch of two rows of `_TOKENS`."""
_TOLERANCE = 1e-8
_Calls = list[tuple[str, Sequence[Tensor]]]
"""Module names with copies of their outputs, in the order in which the calls ended."""


def require_separate_documents(model: nn.Module) -> None:
    """Run documents packed and alone through a small copy of a model; outputs must agree.

    Raises `ConfigError` with the module that mixes tokens, or if the trial is impossible.
    """
    inside = pretrained_of(model)
    if "position_ids" not in ForwardInputs.of(model, users_loss=False).named:
        found = "takes no position_ids, which separate documents"
    else:
        found = _difference(inside)
    if found:
        raise ConfigError(
            f"{type(model if inside is None else inside).__name__} {found}; set it to false, or for conversations and pairs "
            "data.packing: false, which gives each a sequence of its own",
            where="data.separate_documents",
        )


def _difference(model: Any | None) -> str:
    """Return the reason why documents mix or the trial is impossible; empty if they stay apart."""
    found: list[_Calls] = []

    def run(small: Any) -> Tensor:
        vary(small)
        with torch.no_grad():
            found[:] = [_calls(small), *(_calls(small, number) for number in range(len(_DOCUMENTS)))]
        return found[0][-1][1][0]

    small = "no model of transformers" if model is None else small_copy(model, run)
    if isinstance(small, str):
        return f"cannot be tried with packed documents, as no small copy of it runs with them ({small})"
    together, *alone = found
    pairs = list(zip(alone, _DOCUMENTS, strict=True))
    if not any(_differ(together[-1][1], calls[-1][1], *where) for calls, where in pairs):
        return ""
    name = next(filter(None, (_first_mixing_module(together, calls, *where) for calls, where in pairs)), "")
    module = small.get_submodule(name)
    if not any(True for _ in module.children()) and not isinstance(module, nn.Conv1d | nn.RNNBase):
        name = name.rpartition(".")[0]  # A leaf that acts on single tokens only ends the mixing module.
    by = f"by {name or 'the model'}, a {type(small.get_submodule(name)).__name__}"
    return f"gives a document other values beside another one than alone ({by}, in a trial on a small copy)"


def _calls(small: Any, document: int | None = None) -> _Calls:
    """Run one document alone, or all of them packed; the last entry is the logits or, without a head, the hidden states."""
    vocabulary = small.get_input_embeddings().weight.shape[0]
    ids = torch.randint(min(5, vocabulary - 1), vocabulary, (2, _TOKENS), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for *_, length in _DOCUMENTS]).view(2, _TOKENS)
    if document is not None:
        row, begin, length = _DOCUMENTS[document]
        ids, positions = (each[row : row + 1, begin : begin + length] for each in (ids, positions))
    made: _Calls = []
    end = watch_outputs(
        small.named_modules(), lambda name, found: made.append((name, [each.clone() for each in tensors_in(found)]))
    )
    try:
        given = {"use_cache": False} if "use_cache" in inspect.signature(type(small).forward).parameters else {}
        found = small(input_ids=ids, position_ids=positions, **given)
    finally:
        end()
    logits = getattr(found, "logits", None)
    return [*made, ("", [found[0] if logits is None else logits])]


def _first_mixing_module(together: _Calls, alone: _Calls, row: int, begin: int, length: int) -> str:
    """Return the first module whose outputs differ beside another document."""
    left: dict[str, list[Sequence[Tensor]]] = {}
    for name, found in alone:
        left.setdefault(name, []).append(found)
    for name, found in together:
        if left.get(name) and _differ(found, left[name].pop(0), row, begin, length):
            return name
    return ""


def _differ(together: Sequence[Tensor], alone: Sequence[Tensor], row: int, begin: int, length: int) -> bool:
    """Return True if a tensor of all documents differs at one document from that document's tensor alone. Tensors of unexpected
    shapes, such as the tokens of one expert, are skipped."""
    for one, other in zip(together, alone, strict=False):
        changed = [dim for dim, sizes in enumerate(zip(one.shape, other.shape, strict=False)) if sizes[0] != sizes[1]]
        if [(one.shape[dim], other.shape[dim]) for dim in changed] == [(2, 1), (_TOKENS, length)]:
            part = one.narrow(changed[0], row, 1).narrow(changed[1], begin, length)
            if not torch.allclose(part.double(), other.double(), rtol=_TOLERANCE, atol=_TOLERANCE):
                return True
    return False


def with_documents(model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the document boundaries of packed sequences to a batch, if `model` uses flash attention.

    For `position_ids` `[batch, sequence]` that restart inside a sequence, these are `cu_seq_lens_q` and `cu_seq_lens_k`, the starts
    of documents in the flat batch and its end, int32 `[documents + 1]`, and `max_length_q` and `max_length_k`, the tokens of the
    longest. Other batches are unchanged. Raises `ConfigError` for a model whose forward takes no further keywords.
    """
    inside, positions = pretrained_of(model), batch.get("position_ids")
    if inside is None or "flash" not in str(getattr(inside.config, "_attn_implementation", None)):
        return batch
    if not isinstance(positions, Tensor) or positions.dim() != 2 or "cu_seq_lens_q" in batch:
        return batch
    if batch.get("attention_mask") is not None:
        return batch
    begins = nn.functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True)
    starts = begins.flatten().nonzero().flatten()
    if len(starts) == len(positions):
        return batch
    kinds = {each.kind for each in inspect.signature(type(inside).forward).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError(
            f"{type(inside).__name__}.forward hands nothing on to flash attention, which would see the documents of a "
            "sequence as one; set data.separate_documents: false, or model.attention: sdpa"
        )
    ends = nn.functional.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)
    longest = int(ends.diff().max())
    return {**batch, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
