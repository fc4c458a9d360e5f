"""The trial, on a small copy, that packed documents do not affect each other.

Restarting position ids separate documents only in models that derive masks from them. Other models mix the tokens:
their masks ignore positions, or recurrence or convolution mixes tokens.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import ConfigError
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.trainer.models.small_copy import Outputs, apart, recorded, shown_module, small_copy, vary
from zeromesh.trainer.models.user_model import ForwardInputs

_TOKENS = 24
_DOCUMENTS = ((0, 0, 11), (0, 11, 13), (1, 0, 9), (1, 9, 5), (1, 14, 10))
"""Row, start and length in tokens of each document in a batch of two rows of `_TOKENS`."""
_TOLERANCE = 1e-8


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
    found: list[Outputs] = []

    def run(small: Any) -> Tensor:
        vary(small)
        with torch.no_grad():
            found[:] = [_outputs(small), *(_outputs(small, number) for number in range(len(_DOCUMENTS)))]
        return found[0][-1][1][0]

    small = "no model of transformers" if model is None else small_copy(model, run)
    if isinstance(small, str):
        return f"cannot be tried with packed documents, as no small copy of it runs with them ({small})"
    together, *alone = found
    pairs = list(zip(alone, _DOCUMENTS, strict=True))
    if not any(_differ(together[-1][1], outputs[-1][1], *where) for outputs, where in pairs):
        return ""
    name = next(filter(None, (_first_mixing_module(together, outputs, *where) for outputs, where in pairs)), "")
    module = small.get_submodule(name)
    if not any(True for _ in module.children()) and not isinstance(module, nn.Conv1d | nn.RNNBase):
        name = name.rpartition(".")[0]  # A leaf that acts on single tokens only ends the mixing module.
    by = shown_module(small, name)
    return f"gives a document other values beside another one than alone (by {by}, in a trial on a small copy)"


def _outputs(small: Any, document: int | None = None) -> Outputs:
    """Run one document alone, or all of them packed; the last entry is the logits or, without a head, the hidden states."""
    vocabulary = small.get_input_embeddings().weight.shape[0]
    ids = torch.randint(min(5, vocabulary - 1), vocabulary, (2, _TOKENS), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for *_, length in _DOCUMENTS]).view(2, _TOKENS)
    if document is not None:
        row, begin, length = _DOCUMENTS[document]
        ids, positions = (each[row : row + 1, begin : begin + length] for each in (ids, positions))
    given = {"use_cache": False} if "use_cache" in inspect.signature(type(small).forward).parameters else {}
    found, outputs = recorded(small, lambda: small(input_ids=ids, position_ids=positions, **given))
    logits = getattr(found, "logits", None)
    return [*outputs, ("", [found[0] if logits is None else logits])]


def _first_mixing_module(together: Outputs, alone: Outputs, row: int, begin: int, length: int) -> str:
    """Return the first module whose outputs differ beside another document."""
    left: dict[str, list[list[Tensor]]] = {}
    for name, found in alone:
        left.setdefault(name, []).append(found)
    for name, found in together:
        if left.get(name) and _differ(found, left[name].pop(0), row, begin, length):
            return name
    return ""


def _differ(together: list[Tensor], alone: list[Tensor], row: int, begin: int, length: int) -> bool:
    """Return True if a tensor of all documents differs at one document from that document's tensor alone. Tensors of unexpected
    shapes, such as the tokens of one expert, are skipped."""
    for one, other in zip(together, alone, strict=False):
        changed = [dim for dim, sizes in enumerate(zip(one.shape, other.shape, strict=False)) if sizes[0] != sizes[1]]
        if [(one.shape[dim], other.shape[dim]) for dim in changed] == [(2, 1), (_TOKENS, length)]:
            part = one.narrow(changed[0], row, 1).narrow(changed[1], begin, length)
            if not apart(part.double(), other.double(), 1.0) <= _TOLERANCE:
                return True
    return False
