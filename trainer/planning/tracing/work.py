"""The work of a part of a step: matrix products, bytes moved by all other operators, and exchanges between tensor ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Product(NamedTuple):
    """One matrix product, or a kernel of several products, such as attention."""

    dtype: str
    """The name of the dtype as in a configuration, such as `bfloat16`."""
    flops: float
    """The number of floating-point operations, two per multiply-add."""
    nbytes: int
    """Bytes read and written."""
    around: int = 0
    """The bytes of a product of activations and a weight, without the weight: kept until a deferred computation of the weight's
        gradient. 0 for other products."""


class TensorExchange(NamedTuple):
    """An exchange of one tensor between tensor ranks."""

    kind: str
    """The kind of collective, as in `Collective`: `all-reduce`, `all-gather`, `reduce-scatter` or `all-to-all`."""
    nbytes: int
    """Bytes of the whole tensor: the reduced one, the gathered one, or the one that is reduced before it is scattered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of one pass through a part of a model."""

    products: tuple[tuple[Product, int], ...] = ()
    """The products in the order of execution, each with its number of repetitions."""
    moved: int = 0
    """Bytes that all other operators read and write."""
    operations: int = 0
    """The number of launched operators, products included."""
    exchanges: tuple[tuple[TensorExchange, int], ...] = ()

    @property
    def flops(self) -> float:
        """Floating-point operations of the products."""
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
