"""The work of a part of a step: products of matrices, bytes moved by all else, and exchanges between tensor ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Product(NamedTuple):
    """One product of matrices, or a kernel of several, such as attention."""

    dtype: str
    """As in a configuration: `bfloat16`."""
    flops: float
    """Floating-point operations: a multiplication and an addition for each."""
    nbytes: int
    """Bytes that are read and written."""
    around: int = 0
    """Of a product of activations by a weight, the bytes of all but the weight: where the weight's gradient comes later, so many
    are kept for it. 0 for others."""


class TensorExchange(NamedTuple):
    """An exchange of one tensor between tensor ranks."""

    kind: str
    """As in `Collective`: `all-reduce`, `all-gather`, `reduce-scatter` or `all-to-all`."""
    nbytes: int
    """Bytes of the whole tensor: of what is summed, of what was gathered, of what is summed and then divided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Counts of one pass through a part of a model."""

    products: tuple[tuple[Product, int], ...] = ()
    """Each with how often it follows, in the order in which they run."""
    moved: int = 0
    """Bytes that all other operations read and write."""
    operations: int = 0
    """Operations that are launched, products among them."""
    exchanges: tuple[tuple[TensorExchange, int], ...] = ()

    @property
    def flops(self) -> float:
        """Floating-point operations of products."""
        return sum(count * product.flops for product, count in self.products)

    def __add__(self, other: Work) -> Work:
        return Work(
            products=self.products + other.products,
            moved=self.moved + other.moved,
            operations=self.operations + other.operations,
            exchanges=self.exchanges + other.exchanges,
        )

    def __mul__(self, times: int) -> Work:
        return Work(
            products=tuple((product, times * count) for product, count in self.products),
            moved=times * self.moved,
            operations=times * self.operations,
            exchanges=tuple((exchange, times * count) for exchange, count in self.exchanges),
        )
