"""Attention of transformers' models while a batch is in force, so that no document of a packed sequence sees another one.

transformers finds documents in the position ids that a model hands to its masks, which many models do not; here the batch tells
them. A mask of a packed batch on the CPU is a `DocumentMask`, which says who sees whom, and which transformers' attention functions
hand to `document_attention`. Everything else that touches it gets the mask as a tensor, and computes as without this module."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial, reduce, wraps
from inspect import Parameter, signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._pytree import tree_map_only
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

from zeromesh.context.attention import document_attention
from zeromesh.context.documents import Documents, Pattern
from zeromesh.context.shares import Context
from zeromesh.errors import ConfigError, DataError
from zeromesh.intervals import round_up
from zeromesh.overrides import override, replaced
from zeromesh.pipeline.stages.build import BALANCE
from zeromesh.tensor.autograd_collectives import uncompiled
from zeromesh.trainer.data.collate import IGNORED_LABEL, padding_begins, shifted
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.units.plan import without_adapters

_Function = Callable[..., Any]
_Batch = Mapping[str, Any]


class DocumentMask(Tensor):
    """Visibility in a packed batch, by its documents and the pattern inside them (None: `make` alone knows it). To any code but
    ours it is the mask `[rows, 1, queries, length]` that `make` returns, which is made when it is first needed. With `shares`,
    queries are those of this rank, and `whole` returns the mask of all."""

    documents: Documents
    pattern: Any  # A `Pattern` or None.
    make: Callable[[], Tensor]
    shares: Context | None
    whole: Callable[[], Any]

    @staticmethod
    def __new__(cls, documents: Documents, pattern: Any, make: Callable[[], Tensor], shares: Context | None, **kind: Any) -> Any:
        queries = documents.length // (1 if shares is None else shares.exchange.size)
        found = torch.Tensor._make_wrapper_subclass(cls, (documents.rows, 1, queries, documents.length), **kind)
        found.documents, found.pattern, found.make, found.shares = documents, pattern, cache(make), shares
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
    """The host's knowledge of a batch's masks before its copy to a device: its documents, and where padding pads nothing."""

    fused_on: tuple[str, ...] = ("cpu",)  # The devices whose masks have an attention of ours.

    def __init__(
        self, batch: _Batch, model: nn.Module | None = None, *, on_device: bool = False, shares: Context | None = None
    ) -> None:
        """Read a `batch` on the CPU, which will be copied to a device if `on_device`, for `model`. A document begins where position
        ids `[rows, length]`, or `[1, length]`, restart. With `shares` the batch is whole, and models get this rank's share of it.
        Raises `DataError` for a batch that cannot be shared, and for padding inside of a document of a packed sequence."""
        self._model, self._shares, self._unpadded = model, shares, batch
        self._batch = batch if shares is None else padded_batch(batch, shares.multiple)
        of_rows = {name: each for name, each in self._batch.items() if isinstance(each, Tensor) and each.dim() == 2}
        positions, self._padding = of_rows.get("position_ids"), of_rows.get("attention_mask")
        if positions is not None and len(positions) == 1 and (ids := self._ids()) is not None and ids.ndim > 1:
            positions = positions.expand(len(ids), -1)  # One row for all, which models expand too.
        if shares is not None and positions is None:  # They have several dims, and tell no documents.
            rows, length = next(iter(of_rows.values())).shape
            positions = torch.arange(length).expand(rows, length)
        padding = None if self._padding is None else self._padding.cpu()
        cached = batch.get("past_key_values") is not None  # Their tokens have no positions here.
        apart = cached or positions is None or (padding is not None and padding.shape[1] != positions.shape[1])
        found = None if positions is None or apart else Documents.of(positions.cpu(), padding)
        if found is None and shares is not None:
            why = "past_key_values were given" if cached else "a sequence has padding inside"
            raise DataError(f"{why}, which parallel.context does not take; leave them out, and pad at an end")
        self.documents = found if found is not None and (found.packed or shares is not None) else None
        """The documents of a batch that packs several into a sequence or whose sequences ranks share, else None."""
        self._full: dict[torch.Size, bool] = {}  # True for padding masks without padding, by shape.
        for name, each in of_rows.items() if on_device else ():
            if name.endswith("attention_mask"):
                self._full[each.shape] = self._full.get(each.shape, True) and bool(each.all())
        self._on_device = on_device

    def told(self) -> _Batch:
        """Return the batch, or this rank's share of it, as the model takes it: for flash attention with `cu_seq_lens_q` and
        `cu_seq_lens_k`, the starts of documents and padding in the flat batch and its end, int32, and `max_length_q` and
        `max_length_k`, the longest's tokens. transformers finds them for a batch of one sequence only, and synchronizes the device
        in every layer. Raises `ConfigError` for a model that hands on neither these nor a mask."""
        batch, documents, shares = self._batch, self.documents, self._shares
        if shares is not None:
            batch = {
                name: shares.share(value, _sequence_dim(name, value)) if isinstance(value, Tensor) else value
                for name, value in batch.items()
            }
        inside = None if self._model is None else pretrained_of(self._model)
        if documents is None or inside is None or "cu_seq_lens_q" in batch:
            return batch
        name = str(getattr(inside.config, "_attn_implementation", None))
        if "flash" not in name and name in ALL_MASK_ATTENTION_FUNCTIONS:
            return batch
        kinds = {each.kind for each in signature(type(inside).forward).parameters.values()}
        if "flash" not in name or Parameter.VAR_KEYWORD not in kinds:
            why = f"{type(inside).__name__}.forward hands nothing on to {name}, which would see the documents of a sequence as one"
            raise ConfigError(f"{why}; set data.separate_documents: false, or model.attention: sdpa")
        length = documents.length
        places = ((row * length, at) for row, begin, end, _ in documents.spans for at in (0, begin, end))
        starts = {first + at for first, at in places if at < length}
        ends = torch.tensor([*sorted(starts), documents.rows * length], dtype=torch.int32)
        longest = int(ends.diff().max())
        found = {name: each for name, each in batch.items() if name != "attention_mask"}
        return {**found, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}

    def real_tokens(self) -> Tensor | bool:
        """Return bool `[rows, share]`, False for tokens of this rank's share that are padding; True if there are none."""
        batch, documents, shares = self._unpadded, self.documents, self._shares
        known = all(getattr(batch.get(name), "ndim", 0) == 2 for name in ("labels", "position_ids"))
        if self._padding is not None:
            real = self._padding.cpu().bool()
        elif documents is None or not (known or shares):
            return True
        else:
            ends = padding_begins(batch).cpu() if known else torch.tensor([self._ids().shape[1]])
            real = (torch.arange(documents.length) < ends.unsqueeze(1)).expand(documents.rows, -1)
        real = real if shares is None else shares.share(real, 1)
        return bool(real.all()) or real

    def _ids(self) -> Any:
        return next((self._unpadded[key] for key in ("input_ids", "inputs_embeds") if self._unpadded.get(key) is not None), None)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside the block masks are those of this batch, and experts are balanced over the tokens of all ranks that share it."""
        with ExitStack() as undone:
            if self.documents is not None or self._on_device:
                _install()
                local = vars(ALL_MASK_ATTENTION_FUNCTIONS)["_local_mapping"]
                for name, own in dict(ALL_MASK_ATTENTION_FUNCTIONS).items():
                    undone.callback(override(local, name, partial(self._mask, own, fused=name in ("sdpa", "eager"))))
                none = {"find_packed_sequence_indices": lambda position_ids: None}
                undone.enter_context(replaced(masking_utils, none))
            if self._shares is not None and self._model is not None:
                names = unwrap(type(without_adapters(self._model)[0]).forward).__globals__
                if (balance := names.get(BALANCE)) is not None:
                    undone.callback(override(names, BALANCE, partial(self._balance, balance, self._shares)))
            yield

    def _mask(self, own: _Function, *, fused: bool, attention_mask: Tensor | None = None, **call: Any) -> Any:
        """Return the mask that `own`, a mask function of transformers, makes for this `call`, within documents."""
        full = None if attention_mask is None else self._full.get(attention_mask.shape)
        if full:
            attention_mask = None
        documents, shares = self.documents, self._shares
        sizes = call["batch_size"], call["q_length"], call["kv_length"]
        if documents is not None:
            queries = documents.length // (1 if shares is None else shares.exchange.size)
            documents = documents if sizes == (documents.rows, queries, queries) else None
        if full is False or documents is not None:  # Else it would look for padding on the device.
            call |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        if documents is None:
            return own(attention_mask=attention_mask, **call)
        if shares is not None:
            attention_mask = None if self._padding is None else self._padding.bool().to(call.get("device", "cpu"))
            call |= {"q_length": documents.length, "kv_length": documents.length}
        return self._within(own, documents, attention_mask, call, fused=fused, shares=shares)

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
        ours = fused and device.type in self.fused_on
        if not documents.packed and attention_mask is None and shares is None and not ours:
            return own(**{**call, "allow_is_causal_skip": True})  # Whole sequences may need no mask.
        function = call.get("mask_function", masking_utils.causal_mask_function)
        numbers, places = documents.tokens(device)
        if (pattern := _pattern(function)) is not None:
            function = masking_utils.remap_positions_for_packed_sequence(function, places)
        call["mask_function"] = masking_utils.and_masks(masking_utils.packed_sequence_mask_function(numbers), function)
        make = partial(own, attention_mask=attention_mask, **call)
        pattern = pattern if ours else None
        if pattern is None and shares is None:
            return make()
        spans = [(0, documents.length)] if shares is None else shares.spans(documents.length)
        pieces = [partial(make, q_length=end - begin, q_offset=begin) for begin, end in spans]
        kind = {"dtype": call["dtype"] if own is masking_utils.eager_mask else torch.bool, "device": device}
        rows = lambda: torch.cat([piece() for piece in pieces], 2)  # noqa: E731
        found = DocumentMask(documents, pattern, rows, shares, **kind)
        found.whole = partial(self._within, own, documents, attention_mask, given, fused=fused)
        return found

    def _balance(self, own: _Function, shares: Context, logits: Any, /, *arguments: Any, **named: Any) -> Any:
        """Return this rank's part of the balance loss, from the router logits `[rows x tokens, experts]` of its tokens."""
        if not isinstance(logits, tuple):
            return own(logits, *arguments, **named)
        rows, length = self._ids().shape[:2]
        wholes = [shares.gather_with_gradient(each.unflatten(0, (rows, -1)), 1) for each in logits]
        call = signature(own).bind(tuple(each[:, :length].flatten(0, 1) for each in wholes), *arguments, **named)
        padding = None if self._padding is None else self._padding[:, :length]
        call.arguments["attention_mask"] = None if padding is None else padding.to(logits[0].device, non_blocking=True)
        return own(*call.args, **call.kwargs) / shares.exchange.size


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


def _attend(own: _Function, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any) -> Any:
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
    beyond = named.get("position_bias") is not None or any(map(named.get, ("softcap", "dropout", "output_attentions")))
    if beyond or mask.pattern is None:
        if shares is not None:
            key, value = (shares.gather_with_gradient(each, 2) for each in (key, value))
            attention_mask = mask.make()
        return own(module, query, key, value, attention_mask, **named)
    return mask.attend(query, key, value, scale=named.get("scaling"), sinks=sinks).transpose(1, 2).contiguous(), None


def padded_batch(batch: _Batch, multiple: int) -> dict[str, Any]:
    """Return a batch of whole sequences, on the CPU, padded at the end to a multiple of tokens by what is no target. It gets
    `position_ids`, and with `labels` also `shift_labels`. Raises `DataError` for a field that does not go along sequences."""
    ids = next((batch[name] for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), Tensor)), None)
    if ids is None or ids.dim() < 2:
        raise DataError(f"parallel.context divides sequences, and the batch has no input_ids; it has {', '.join(batch)}")
    rows, length = ids.shape[:2]
    found: dict[str, Any] = {"position_ids": torch.arange(length).expand(rows, length), **batch}
    if isinstance(labels := batch.get("labels"), Tensor):
        found["shift_labels"] = shifted(labels)
    more = round_up(length, multiple) - length
    for name, value in found.items():
        if not isinstance(value, Tensor):
            continue
        dim = _sequence_dim(name, value)
        if value.dim() < 2 or value.shape[dim] != length:
            why = f"{name} has shape {list(value.shape)}, and goes not along the {length} tokens of sequences that ranks share"
            raise DataError(f"{why} (parallel.context); leave the field out, or set parallel.context: 1")
        if name == "position_ids":  # Padding is a document of its own, so that no position is beyond what a model has.
            found[name] = torch.cat([value, torch.arange(more, dtype=value.dtype).expand(*value.shape[:-1], more)], -1)
        else:
            ends = (0, 0) * (value.dim() - 1 - dim) + (0, more)
            found[name] = pad(value, ends, value=IGNORED_LABEL if name in ("labels", "shift_labels") else 0)
    return found


def _sequence_dim(name: str, value: Tensor) -> int:
    """Return the dim of tokens: positions may have a dim before that of rows, `[3, batch, sequence]`."""
    return value.dim() - 1 if name == "position_ids" else 1
