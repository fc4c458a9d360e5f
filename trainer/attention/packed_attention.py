"""Attention of transformers' models while a batch is in force, so that no document of a packed sequence sees another one.

transformers finds documents in the position ids that a model hands to its masks, which many models do not; here the batch tells
them. A mask of a packed batch on the CPU is a `DocumentMask`, which says who sees whom, and which transformers' attention functions
hand to `document_attention`. Everything else that touches it gets the mask as a tensor, and computes as without this module."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial, reduce, wraps
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

from zeromesh.context.attention import document_attention
from zeromesh.context.documents import Documents, Pattern
from zeromesh.errors import ConfigError
from zeromesh.overrides import override, replaced
from zeromesh.trainer.models.adapters import pretrained_of

_Function = Callable[..., Any]


class DocumentMask(Tensor):
    """Who sees whom in a packed batch, by its documents and the pattern inside them. To any code but ours it is the mask `[rows, 1,
    length, length]` that `make` returns, which is made when it is first needed."""

    documents: Documents
    pattern: Pattern
    make: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, documents: Documents, pattern: Pattern, dtype: torch.dtype, make: Callable[[], Tensor]) -> Any:
        shape = documents.rows, 1, documents.length, documents.length
        found = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        found.documents, found.pattern, found.make = documents, pattern, cache(make)
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # It would be compiled for the documents of each batch.
    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return document_attention(query, key, value, self.documents, self.pattern, **options)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mask = (kwargs := kwargs or {}).get("attn_mask")
        if func is scaled_dot_product_attention and isinstance(mask, cls) and not kwargs.get("dropout_p"):
            return mask.attend(*args, scale=kwargs.get("scale"))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        made = tree_map_only(cls, lambda mask: mask.make(), (args, kwargs or {}))
        return func(*made[0], **made[1])


class PackedAttention:
    """What the host knows of a batch's masks before it is copied to a device: its documents, and where padding pads nothing."""

    def __init__(self, batch: Mapping[str, Any], *, on_device: bool = False) -> None:
        """Read a `batch`, which is on the CPU and will be copied to a device if `on_device`. A document begins where position ids
        `[rows, length]` restart."""
        of_rows = {name: each for name, each in batch.items() if isinstance(each, Tensor) and each.dim() == 2}
        positions, padding = of_rows.get("position_ids"), of_rows.get("attention_mask")
        found = None if positions is None else Documents.of(positions.cpu(), None if padding is None else padding.cpu())
        self.documents = found if found is not None and found.packed else None
        """The documents of a batch that packs several into a sequence, else None."""
        self._full: dict[torch.Size, bool] = {}  # True for padding masks without padding, by shape.
        for name, each in of_rows.items() if on_device else ():
            if name.endswith("attention_mask"):
                self._full[each.shape] = self._full.get(each.shape, True) and bool(each.all())
        self._on_device = on_device

    def told(self, model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a packed batch as `model` takes it: for flash attention with `cu_seq_lens_q` and `cu_seq_lens_k`, the starts of
        documents and padding in the flat batch and its end, int32, and `max_length_q` and `max_length_k`, the longest's tokens.
        transformers finds them for a batch of one sequence only, and synchronizes the device in every layer. Raises `ConfigError`
        for a model that hands on neither these nor a mask."""
        inside, documents = pretrained_of(model), self.documents
        if documents is None or inside is None or "cu_seq_lens_q" in batch:
            return batch
        name = str(getattr(inside.config, "_attn_implementation", None))
        if "flash" not in name and name in ALL_MASK_ATTENTION_FUNCTIONS:
            return batch
        kinds = {each.kind for each in signature(type(inside).forward).parameters.values()}
        if "flash" not in name or Parameter.VAR_KEYWORD not in kinds:
            raise ConfigError(
                f"{type(inside).__name__}.forward hands nothing on to {name}, which would see the documents of a sequence as "
                "one; set data.separate_documents: false, or model.attention: sdpa"
            )
        length = documents.length
        places = ((row * length, at) for row, begin, end, _ in documents.spans for at in (0, begin, end))
        starts = {first + at for first, at in places if at < length}
        ends = torch.tensor([*sorted(starts), documents.rows * length], dtype=torch.int32)
        longest = int(ends.diff().max())
        found = {name: each for name, each in batch.items() if name != "attention_mask"}
        return {**found, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside the block the masks of transformers' models are those of this batch."""
        with ExitStack() as undone:
            if self.documents is not None or self._on_device:
                _install()
                local = vars(ALL_MASK_ATTENTION_FUNCTIONS)["_local_mapping"]
                for name, own in dict(ALL_MASK_ATTENTION_FUNCTIONS).items():
                    undone.callback(override(local, name, partial(self._mask, own, fused=name in ("sdpa", "eager"))))
                none = {"find_packed_sequence_indices": lambda position_ids: None}
                undone.enter_context(replaced(masking_utils, none))
            yield

    def _mask(self, own: _Function, *, fused: bool, attention_mask: Tensor | None = None, **call: Any) -> Any:
        """Return the mask that `own`, a mask function of transformers, makes for this `call`, within documents."""
        full = None if attention_mask is None else self._full.get(attention_mask.shape)
        if full:
            attention_mask = None
        documents, device = self.documents, torch.device(call.get("device", "cpu"))
        sizes = call["batch_size"], call["q_length"], call["kv_length"]
        if documents is not None and sizes != (documents.rows, documents.length, documents.length):
            documents = None
        if full is False or documents is not None:  # Else it would look for padding on the device.
            call |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        if documents is None:
            return own(attention_mask=attention_mask, **call)
        function = call.get("mask_function", masking_utils.causal_mask_function)
        numbers, places = documents.tokens(device)
        if (pattern := _pattern(function)) is not None:
            function = masking_utils.remap_positions_for_packed_sequence(function, places)
        apart = masking_utils.packed_sequence_mask_function(numbers)
        call["mask_function"] = masking_utils.and_masks(apart, function)
        make = partial(own, attention_mask=attention_mask, **call)
        if pattern is None or not fused or device.type != "cpu":
            return make()
        return DocumentMask(documents, pattern, call["dtype"] if own is masking_utils.eager_mask else torch.bool, make)


def _pattern(function: _Function) -> Pattern | None:
    """Return the pattern of a mask function of transformers, or None for one that is not known."""
    if function is masking_utils.causal_mask_function:
        return Pattern()
    if function is masking_utils.bidirectional_mask_function:
        return Pattern(right=None)
    if function.__module__ != masking_utils.__name__ or function.__closure__ is None:
        return None
    values = (cell.cell_contents for cell in function.__closure__)
    inside = dict(zip(function.__code__.co_freevars, values, strict=True))
    match function.__qualname__.partition(".")[0]:
        case "sliding_window_overlay":
            return Pattern(left=inside["sliding_window"] - 1, right=None)
        case "sliding_window_bidirectional_overlay":
            return Pattern(left=inside["sliding_window"], right=inside["sliding_window"])
        case "chunked_overlay":
            return Pattern(right=None, chunk=inside["chunk_size"])
        case "and_masks":
            found = [_pattern(each) for each in inside["mask_functions"]]
            return None if None in found else reduce(Pattern.both, filter(None, found))
        case _:
            return None


@cache
def _install() -> None:
    """Let attention functions of transformers hand a `DocumentMask` to ours. With another mask they compute as before."""
    get = AttentionInterface.get_interface

    @wraps(get)
    def get_interface(self: AttentionInterface, attn_implementation: str, default: _Function) -> _Function:
        return partial(_attend, get(self, attn_implementation, default))

    setattr(AttentionInterface, "get_interface", get_interface)  # noqa: B010 - a type checker would refuse the assignment.


def _attend(
    own: _Function, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any
) -> Any:
    """Call `own`, an attention function of transformers, or ours for a `DocumentMask` where ours can; the result is `[rows, length,
    heads, width]`. A trial (`losses/trial.py`) has shown that they agree."""
    beyond = named.get("position_bias") is not None or any(
        named.get(name) for name in ("softcap", "dropout", "output_attentions")
    )
    if beyond or not isinstance(attention_mask, DocumentMask):
        return own(module, query, key, value, attention_mask, **named)
    found = attention_mask.attend(query, key, value, scale=named.get("scaling"), sinks=named.get("s_aux"))
    return found.transpose(1, 2).contiguous(), None
