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
from zeromesh.context.shares import Context
from zeromesh.errors import ConfigError, DataError
from zeromesh.overrides import override, replaced
from zeromesh.tensor.autograd_collectives import uncompiled
from zeromesh.trainer.models.adapters import pretrained_of

_Function = Callable[..., Any]


class DocumentMask(Tensor):
    """Who sees whom in a packed batch, by its documents and the pattern inside them (None: `make` alone knows it). To any code but
    ours it is the mask `[rows, 1, queries, length]` that `make` returns, which is made when it is first needed. With `shares`,
    queries are those of this rank, and `whole` returns the mask of all."""

    documents: Documents
    pattern: Any  # A `Pattern` or None.
    make: Callable[[], Tensor]
    shares: Context | None = None
    whole: Callable[[], Any]

    @staticmethod
    def __new__(
        cls, documents: Documents, pattern: Pattern | None, dtype: torch.dtype, make: Callable[[], Tensor], **shape: Any
    ) -> Any:
        """Make the mask, of the `device` and the number of `queries` that `shape` may have, else on the CPU and of all."""
        sizes = documents.rows, 1, shape.get("queries", documents.length), documents.length
        device = torch.device(shape.get("device", "cpu"))
        found = torch.Tensor._make_wrapper_subclass(cls, sizes, dtype=dtype, device=device)
        found.documents, found.pattern, found.make = documents, pattern, cache(make)
        return found

    @uncompiled  # It would be compiled for the documents of each batch.
    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return document_attention(query, key, value, self.documents, self.pattern, shares=self.shares, **options)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mask = (kwargs := kwargs or {}).get("attn_mask")
        known = func is scaled_dot_product_attention and not kwargs.get("dropout_p")
        if known and isinstance(mask, cls) and mask.pattern is not None:
            return mask.attend(*args, scale=kwargs.get("scale"))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        made = tree_map_only(cls, lambda mask: mask.make(), (args, kwargs or {}))
        return func(*made[0], **made[1])


class PackedAttention:
    """What the host knows of a batch's masks before it is copied to a device: its documents, and where padding pads nothing."""

    fused_on: tuple[str, ...] = ("cpu",)  # The devices whose masks have an attention of ours.

    def __init__(self, batch: Mapping[str, Any], *, on_device: bool = False, shares: Context | None = None) -> None:
        """Read a `batch` on the CPU, which will be copied to a device if `on_device`. A document begins where position ids `[rows,
        length]` restart. With `shares` it is whole, and models get this rank's share of it. Raises `DataError` for such a batch
        with padding inside of sequences."""
        of_rows = {name: each for name, each in batch.items() if isinstance(each, Tensor) and each.dim() == 2}
        positions, padding = of_rows.get("position_ids"), of_rows.get("attention_mask")
        found = None if positions is None else Documents.of(positions.cpu(), None if padding is None else padding.cpu())
        self.documents = found if found is not None and found.packed else None
        """The documents of a batch that packs several into a sequence, else None."""
        self._full: dict[torch.Size, bool] = {}  # True for padding masks without padding, by shape.
        for name, each in of_rows.items() if on_device else ():
            if name.endswith("attention_mask"):
                self._full[each.shape] = self._full.get(each.shape, True) and bool(each.all())
        self._on_device, self._padding, self._shares = on_device, padding, shares
        if shares is not None:
            rows, length = next(iter(of_rows.values())).shape
            self._queries = sum(end - begin for begin, end in shares.spans(length))
            if self.documents is None:
                self.documents = Documents.whole(rows, length) if padding is None else Documents.of(None, padding)
            if self.documents is None:
                raise DataError("a sequence has padding inside, which parallel.context does not take; pad at an end")
        elif self.documents is not None:
            self._queries = self.documents.length

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
        documents, shares = self.documents, self._shares
        sizes = call["batch_size"], call["q_length"], call["kv_length"]
        if documents is not None and sizes != (documents.rows, *[self._queries] * 2):
            documents = None
        if full is False or documents is not None:  # Else it would look for padding on the device.
            call |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        if documents is None:
            return own(attention_mask=attention_mask, **call)
        if shares is None:
            return self._within(own, documents, attention_mask, call, fused=fused)
        padding = None if self._padding is None else self._padding.bool().to(call.get("device", "cpu"))
        call |= {"q_length": documents.length, "kv_length": documents.length}
        return self._within(own, documents, padding, call, fused=fused, shares=shares)

    def _within(
        self,
        own: _Function,
        documents: Documents,
        attention_mask: Tensor | None,
        given: Mapping[str, Any],
        *,
        fused: bool,
        shares: Context | None = None,
    ) -> Any:
        """Return the mask of whole sequences, within documents; with `shares`, of this rank's queries."""
        call, device = dict(given), torch.device(given.get("device", "cpu"))
        if not documents.packed and attention_mask is None and shares is None:
            return own(**{**call, "allow_is_causal_skip": True})  # Whole sequences may need no mask.
        function = call.get("mask_function", masking_utils.causal_mask_function)
        numbers, places = documents.tokens(device)
        if (pattern := _pattern(function)) is not None:
            function = masking_utils.remap_positions_for_packed_sequence(function, places)
        apart = masking_utils.packed_sequence_mask_function(numbers)
        call["mask_function"] = masking_utils.and_masks(apart, function)
        make = partial(own, attention_mask=attention_mask, **call)
        if not fused or device.type not in self.fused_on:
            pattern = None
        dtype = call["dtype"] if own is masking_utils.eager_mask else torch.bool
        if shares is None:
            return make() if pattern is None else DocumentMask(documents, pattern, dtype, make)
        pieces = [partial(make, q_length=end - begin, q_offset=begin) for begin, end in shares.spans(documents.length)]
        rows = lambda: torch.cat([piece() for piece in pieces], 2)  # noqa: E731
        found = DocumentMask(documents, pattern, dtype, rows, queries=self._queries, device=device)
        found.shares = shares
        found.whole = partial(self._within, own, documents, attention_mask, given, fused=fused)
        return found


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
    mask, sinks = attention_mask, named.get("s_aux")
    if not isinstance(mask, DocumentMask):
        return own(module, query, key, value, attention_mask, **named)
    heads, key_heads = query.shape[1], key.shape[1]
    if (shares := mask.shares) is not None and shares.method_for(heads, key_heads) == "heads":
        if key_heads % shares.exchange.size:
            key, value = (each.repeat_interleave(heads // key_heads, 1) for each in (key, value))
        if sinks is not None:
            named["s_aux"] = sinks.chunk(shares.exchange.size)[shares.exchange.index]
        query, key, value = map(shares.to_heads, (query, key, value))
        out, _ = _attend(own, module, query, key, value, mask.whole(), **named)
        return shares.to_shares(out.transpose(1, 2)).transpose(1, 2), None
    beyond = named.get("position_bias") is not None or any(
        named.get(name) for name in ("softcap", "dropout", "output_attentions")
    )
    if beyond or mask.pattern is None:
        if shares is not None:
            key, value = (shares.gather_with_gradient(each, 2) for each in (key, value))
            attention_mask = mask.make()
        return own(module, query, key, value, attention_mask, **named)
    found = mask.attend(query, key, value, scale=named.get("scaling"), sinks=sinks)
    return found.transpose(1, 2).contiguous(), None
