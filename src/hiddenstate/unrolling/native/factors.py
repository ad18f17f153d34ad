"""Matrix products in a body: by torch's code, or by our own with a factor packed before the first step."""

from __future__ import annotations

from typing import Any

from torch import fx

from .placement import Placement
from .products import own_in_loops, packed_size
from .values import Place, Unsupported, ctype_of, shape_of


class Factors:
    """Writes the products of a body, and beside them what is packed once for all steps."""

    def __init__(self, memory: Placement) -> None:
        """Write on the page of `memory`."""
        self.memory, self.page, self.rows = memory, memory.page, memory.rows
        self.packs: list[str] = []  # lines of C that run before the first step
        self._packed: dict[tuple[str, Place], str] = {}

    def write(self, node: fx.Node) -> None:
        """Write one product."""
        own, by_rows = self.memory.own(node), self.rows.has(node)
        if own.ctype not in ("float", "double"):
            raise Unsupported(f"a product of {own.ctype} has no C here")
        # In a join it may lie between others: products are written into memory without gaps.
        out = own if own.contiguous else self.memory.room(own.shape, own.ctype, private=self.rows.private(node))
        if self._packable(node):
            self._by_own(node, out)
        else:
            left, right = (self._matrix(arg) for arg in node.args)
            if len(out.shape) == 3:
                self._each(left, right, out, by_rows=by_rows)
            else:
                self.page.gemm((left, ""), (right, ""), (out, ""), by_rows=by_rows)
        if out is not own:
            self.page.copy(own, out, by_rows=by_rows)

    def _packable(self, node: fx.Node) -> bool:
        """Say whether the right factor is a matrix that is the same at all steps, and is used by several rows."""
        shape, right = shape_of(node), node.args[1]
        if len(shape) != 2 or shape[0] < 2 or not own_in_loops():
            return False
        place = self.memory.read(right)  # type: ignore[arg-type]
        return isinstance(place, Place) and place.base.startswith("fix") and min(*shape, *place.shape) > 0

    def _each(self, left: Place, right: Place, out: Place, *, by_rows: bool) -> None:
        first, last = ("lo", "hi") if by_rows else ("0", str(out.shape[0]))
        self.page.lines.append(f"for (long b = {first}; b < {last}; b++) {{")
        pieces = [place.moved(place.shape[1:], place.strides[1:]) for place in (left, right, out)]
        moved = [(piece, place.strides[0]) for piece, place in zip(pieces, (left, right, out), strict=True)]
        self.page.gemm(*((piece, f" + b * {step}L") for piece, step in moved))
        self.page.lines.append("}")

    def _by_own(self, node: fx.Node, out: Place) -> None:
        one, other = node.args
        left, right = self._matrix(one), self.memory.read(other)  # type: ignore[arg-type]
        assert isinstance(right, Place)
        (m, k), n = left.shape, right.shape[1]
        first, rows = ("lo", "hi - lo") if self.rows.has(node) else ("0", str(m))
        own = (
            f"multiply_{out.ctype}({rows}, {n}, {k}, {left.pointer()} + {first} * {left.strides[0]}L, "
            f"{left.strides[0]}, {left.strides[1]}, {self._pack(right)}, {out.pointer()} + {first} * {n}L, {n}, 0);"
        )
        if self.rows.has(node):
            self.page.lines.append(own)
            return
        # Threads that cannot take rows of their own share each product, which torch's code knows how to do.
        self.page.lines.append(f"if (threads == 1) {own}\nelse {{")
        self.page.gemm((left, ""), (self._matrix(other), ""), (out, ""))
        self.page.lines.append("}")

    def _pack(self, right: Place) -> str:
        (k, n), kind = right.shape, right.ctype
        key = (kind, right)
        if key not in self._packed:
            room = self.memory.room((packed_size(k, n, kind),), kind)
            self._packed[key] = room.base
            start = room.base.removeprefix("work")
            self.packs.append(
                f"pack_{kind}({k}, {n}, {right.pointer()}, {right.strides[0]}, {right.strides[1]}, "
                f"({kind} *)(work + {start}L));"
            )
        return self._packed[key]

    def _matrix(self, node: Any) -> Place:
        place = self.memory.read(node)
        if isinstance(place, Place) and _has_unit_stride(place):
            return place
        whole = self.memory.room(shape_of(node), ctype_of(node), private=self.rows.private(node))
        self.page.copy(whole, place, by_rows=self.rows.has(node))
        return whole


def _has_unit_stride(place: Place) -> bool:
    rows, columns = place.strides[-2:]
    return (columns == 1 and rows >= place.shape[-1]) or (rows == 1 and columns >= place.shape[-2])
