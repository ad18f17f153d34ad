"""The division of a loop over the chip: rows and units by block, products by warp."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..native.values import Unsupported
from .indexing import Extent

_TILE = 16  # rows of one instruction of the matrix unit; it has eight columns


@dataclass(frozen=True, slots=True)
class Product:
    """The size of a product with a weight: its inner length, how many parts of a unit it makes, bytes per number."""

    inner: int
    parts: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks of `tiles` times 16 rows and `units` units each; `blocks` of them share their rows, a group."""

    tiles: int
    groups: int
    blocks: int
    units: int
    warps: int

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.tiles * _TILE

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def elements(self) -> int:
        """Elements of the state that one thread sees to."""
        return math.ceil(self.rows * self.units / self.threads)

    def columns(self, product: Product) -> int:
        """Eights of columns that a block computes of a product."""
        return math.ceil(product.parts * self.units / 8)

    def depth(self, product: Product) -> int:
        """Pieces of 64 bytes of a row that a warp takes of a product."""
        return math.ceil(product.inner * product.bytes / 64 / self.warps)

    def chunk(self, product: Product, products: Sequence[Product]) -> int:
        """Pieces that a thread has on their way at a time, twice: as many as its registers allow for."""
        room = 4 if self.warps < 16 and self.registers(products) <= 112 else 2
        return min(self.depth(product), room)

    def padded(self, product: Product) -> int:
        """Numbers from row to row of a product's partial results, such that no two threads meet in a bank."""
        wide = 8 * self.columns(product)
        return wide + 8 if wide % 16 == 0 else wide

    def partial(self, product: Product) -> int:
        """Numbers that all warps' parts of a product take up."""
        return self.warps * self.rows * self.padded(product)

    def registers(self, products: Sequence[Product]) -> int:
        """Registers of a thread that hold weights and results of products."""
        held = sum(4 * self.depth(product) * self.columns(product) for product in products)
        return held + max((4 * self.tiles * self.columns(product) for product in products), default=0)

    def time(self, extent: Extent, products: Sequence[Product], *, exchanges: int) -> float:
        """Return about how many microseconds a step takes; the weights are a fit to measured times on an H200."""
        total = 0.6 + 0.9 * exchanges + 0.3 * self.elements
        for product in products:
            read = min(self.rows, extent.rows) * product.inner * product.bytes
            total += 1.1e-5 * read + 0.9e-7 * read * self.blocks * self.groups
            total += 5e-5 * self.partial(product) + 0.024 * self.depth(product)
        return total


def choose(extent: Extent, products: Sequence[Product], *, processors: int, exchanges: int) -> Sizes:
    """Return the way to spread a loop that should take least time, or raise `Unsupported` where it does not fit."""
    fitting = [sizes for sizes in _ways(extent, processors) if _fits(sizes, products)]
    if not fitting:
        raise Unsupported("its weights do not fit on the chip beside these rows")
    return min(fitting, key=lambda sizes: sizes.time(extent, products, exchanges=exchanges))


def _ways(extent: Extent, processors: int) -> Iterator[Sizes]:
    for tiles in (1, 2, 4):
        groups = math.ceil(extent.rows / (tiles * _TILE))
        for units in sorted({math.ceil(extent.units / blocks) for blocks in range(1, processors // groups + 1)}):
            for warps in (4, 8, 16):
                yield Sizes(tiles, groups, math.ceil(extent.units / units), units, warps)


def _fits(sizes: Sizes, products: Sequence[Product]) -> bool:
    room = 72 if sizes.warps == 16 else 176  # what the rest of the step leaves of 128, or of 255
    shared = 4 * sum(sizes.partial(product) for product in products)
    return sizes.registers(products) <= room and shared <= 200 * 1024 and sizes.elements <= 8
