"""The work of a part of a step: products of matrices by shape, bytes moved by all else, and exchanges between tensor ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Product(NamedTuple):
    """A product of `batch` matrices `[rows, inner] x [inner, columns]`."""

    dtype: str
    """As in a configuration: `bfloat16`."""
    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> float:
        """Floating-point operations: a multiplication and an addition for each."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns


class TensorExchange(NamedTuple):
    """What tensor ranks exchange at once."""

    kind: str
    """As in `Collective`: `all-reduce`, `all-gather`, `reduce-scatter` or `all-to-all`."""
    nbytes: int
    """Bytes of the whole tensor: of what is summed, of what was gathered, of what is summed and then divided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Counts of one pass through a part of a model."""

    products: Mapping[Product, int] = field(default_factory=dict)
    moved: int = 0
    """Bytes that all other operations read and write."""
    operations: int = 0
    """Operations that are launched, products among them."""
    exchanges: Mapping[TensorExchange, int] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """Floating-point operations of products."""
        return sum(count * product.flops for product, count in self.products.items())

    def __add__(self, other: Work) -> Work:
        return Work(
            products=Counter(self.products) + Counter(other.products),
            moved=self.moved + other.moved,
            operations=self.operations + other.operations,
            exchanges=Counter(self.exchanges) + Counter(other.exchanges),
        )

    def __mul__(self, times: int) -> Work:
        return Work(
            products={key: times * count for key, count in self.products.items()},
            moved=times * self.moved,
            operations=times * self.operations,
            exchanges={key: times * count for key, count in self.exchanges.items()},
        )
