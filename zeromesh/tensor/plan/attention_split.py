"""Divides the projections of one attention by its heads. Pure: arithmetic on numbers read from the attention's module.

Query heads stay on the rank of their key-value head. With fewer key-value heads than ranks, several ranks have the same key-value
head and divide its query heads.

    9 query heads, 3 key-value heads, 2 ranks      rank 0: q 0-5, kv 0 1        rank 1: q 6-8, kv 2
    8 query heads, 2 key-value heads, 4 ranks      rank 0: q 0 1, kv 0   rank 1: q 2 3, kv 0   rank 2: q 4 5, kv 1   ..."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeromesh.errors import LayoutError
from zeromesh.intervals import Interval, balanced


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShare:
    queries: Interval
    keys: Interval


def divide_heads(queries: int, keys: int, ranks: int, where: str) -> tuple[HeadShare, ...]:
    """Divide `queries` query heads and `keys` key-value heads over `ranks`. Raises `LayoutError`, naming `where`, when a rank would
    have no heads, or the number of query heads is no multiple of that of key-value heads."""
    if keys < 1 or queries % keys:
        raise LayoutError(f"{where}: {keys} key-value heads do not divide {queries} query heads")
    group = queries // keys
    if keys >= ranks:
        return tuple(HeadShare(queries=scaled(own, group), keys=own) for own in balanced(keys, ranks))
    crowds = balanced(ranks, keys)
    if max(crowd.length for crowd in crowds) > group:
        cure = f"parallel.tensor may be at most {queries}"
        raise LayoutError(f"{where}: {queries} query heads cannot be divided among {ranks} ranks; {cure}")
    return tuple(
        HeadShare(queries=own.after(-key * group), keys=Interval(start=key, end=key + 1))
        for key, crowd in enumerate(crowds)
        for own in balanced(group, crowd.length)
    )


def scaled(interval: Interval, width: int) -> Interval:
    return Interval(start=interval.start * width, end=interval.end * width)


_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_FEATURES = ("split_size", "all_head_size", "inner_dim", "embed_dim")

Shares = tuple[tuple[Interval, ...], ...]
"""The intervals of the divided features of each rank, in the order of the local tensor."""


def is_transposed(module: nn.Module) -> bool | None:
    """Return True if a linear layer keeps its weight as `[in, out]`, False for `[out, in]`; None for any other module."""
    if type(module) is nn.Linear or type(module).__name__ == "FalconLinear":
        return False
    return True if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def intermediate_dims(shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, int] | None:
    """Return the index of the intermediate dim in `gate_up_proj` and in `down_proj`, from their shapes; None for other experts."""
    if set(shapes) != {"gate_up_proj", "down_proj"} or any(len(shape) != 3 for shape in shapes.values()):
        return None
    up, down = shapes["gate_up_proj"], shapes["down_proj"]
    if (up[1], up[2]) == (2 * down[2], down[1]):
        return {"gate_up_proj": 1, "down_proj": 2}
    return {"gate_up_proj": 2, "down_proj": 1} if (up[2], up[1]) == (2 * down[1], down[2]) else None


def forward_source(module: nn.Module) -> str:
    """Return the source of a module's `forward`; an empty text where it is not available."""
    try:
        return inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return ""


def linear_sizes(module: Any) -> tuple[int, int]:
    outputs, inputs = module.weight.shape[::-1] if is_transposed(module) else module.weight.shape
    return outputs, inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionDivision:
    """The number of query heads (`queries`) and key-value heads (`keys`) of an attention, and the heads of each rank."""

    queries: int
    keys: int
    shares: tuple[HeadShare, ...]

    @property
    def exclusive(self) -> bool:
        return self.keys >= len(self.shares)

    def by_head(self, name: str, features: int, *, keys: bool = False) -> Shares:
        """Divide `features` of query heads, or of key-value heads (`keys`), without splitting a head."""
        width = _width(name, features, *((self.keys, "key-value heads") if keys else (self.queries, "query heads")))
        return tuple((scaled(share.keys if keys else share.queries, width),) for share in self.shares)

    def fused(self, name: str, features: int, *, stacked: bool) -> Shares:
        """Divide fused queries, keys and values: each of the three as a whole (`stacked`), or grouped by key-value head."""
        width = _width(name, features, self.queries + 2 * self.keys, "query, key and value heads")
        group = self.queries // self.keys
        heads: list[tuple[Interval, ...]] = []
        for share in self.shares:
            if stacked:
                keys = share.keys.after(-self.queries)
                heads.append((share.queries, keys, keys.after(-self.keys)))
            elif self.exclusive:
                heads.append((scaled(share.keys, group + 2),))
            else:
                # The queries of a group come after the keys and values of all groups before it.
                own = share.queries.after(-2 * share.keys.start)
                end = share.keys.end * (group + 2)
                heads.append((own, Interval(start=end - 2, end=end)))
        return tuple(tuple(scaled(interval, width) for interval in intervals) for intervals in heads)

    def patches(self, attention: nn.Module, *, stacked: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each attribute of the attention whose value depends on its head count, with its value on each rank."""
        own = vars(attention)
        local_queries = tuple(share.queries.length for share in self.shares)
        local_keys = tuple(share.keys.length for share in self.shares)
        width = _count(own, _WIDTHS) or own.get("split_size", 0) // self.queries
        counts = (
            (_QUERY_COUNTS, self.queries, local_queries),
            (_KEY_COUNTS, self.keys, local_keys),
            (_FEATURES, self.queries * width, tuple(queries * width for queries in local_queries)),
        )
        found = {name: local for names, count, local in counts for name in names if count and own.get(name) == count}
        yield from found.items()
        if "num_key_value_groups" in own:
            yield "num_key_value_groups", tuple(queries // keys for queries, keys in zip(local_queries, local_keys, strict=True))
        if stacked and not found.keys() & set(_QUERY_COUNTS) and hasattr(own.get("config"), "num_attention_heads"):
            # Its code splits the projection by the head counts of its configuration.
            yield "config.num_attention_heads", local_queries


def division_of(attention: nn.Module, name: str, ranks: int) -> AttentionDivision:
    """Divide the heads of an attention among `ranks`. Raises `LayoutError` when their number is unknown, or cannot be divided."""
    own, queries = vars(attention), count_heads(attention)
    if not queries:
        raise LayoutError(f"{name}: it does not say how many heads it has; give it an attribute num_heads")
    keys = _count(own, _KEY_COUNTS) or queries // (_count(own, ("num_key_value_groups",)) or 1) or queries
    return AttentionDivision(queries=queries, keys=keys, shares=divide_heads(queries, keys, ranks, name))


def count_heads(attention: nn.Module) -> int:
    """Return the number of query heads of an attention, or else of its configuration; 0 if neither has it."""
    return _count(vars(attention), _QUERY_COUNTS) or _count(getattr(attention, "config", None), _QUERY_COUNTS)


def _count(holder: Any, names: tuple[str, ...]) -> int:
    """Return the first positive integer among the attributes (or, of a dict, items) `names` of `holder`; 0 if there is none."""
    values = (holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _width(name: str, features: int, heads: int, what: str) -> int:
    if features % heads:
        raise LayoutError(f"{name}: {features} features are not those of {heads} {what}")
    return features // heads
