"""Lines of C: loops over elements, copies, sums and products."""

from __future__ import annotations

import math

from .operations import converted
from .values import Place


class Page:
    """Lines that are written one after another."""

    def __init__(self) -> None:
        """Begin with an empty page."""
        self.lines: list[str] = []

    def nest(self, shape: tuple[int, ...], lines: list[str], *, by_rows: bool = False) -> None:
        """Write a loop over all elements, the last axis fastest; `by_rows`, over a thread's own rows."""
        for axis, size in enumerate(shape):
            if axis == len(shape) - 1:
                self.lines.append("SIMD")
            self.lines.append(_each(axis, size, by_rows=by_rows))
        self.lines += [*("  " + line for line in lines), "}" * len(shape)]  # a shape without axes is one element

    def copy(self, target: Place, source: Place | str, *, by_rows: bool = False) -> None:
        """Write a copy from one place, or of one number, to another place."""
        if isinstance(source, Place) and source.contiguous and target.contiguous and source.ctype == target.ctype:
            size, start = str(math.prod(target.shape)), ""
            if by_rows:
                row = math.prod(target.shape[1:])
                size, start = f"(hi - lo) * {row}", f" + lo * {row}L"
            pointers = f"{target.pointer()}{start}, {source.pointer()}{start}"
            self.lines.append(f"memcpy({pointers}, {size}L * sizeof({target.ctype}));")
            return
        index = [f"i{axis}" for axis in range(len(target.shape))]
        value = source if isinstance(source, str) else source.at(index)
        kind = target.ctype if isinstance(source, str) else source.ctype
        self.nest(target.shape, [f"{target.at(index)} = {converted(value, kind, target.ctype)};"], by_rows=by_rows)

    def gather(self, source: Place, into: Place, *, last: bool, largest: bool, by_rows: bool = False) -> None:
        """Write the loop that adds up elements, or finds the largest; `last`, along the last axis."""
        index = [f"i{axis}" for axis in range(len(source.shape))]
        for axis, size in enumerate(source.shape[:-1]):
            self.lines.append(_each(axis, size, by_rows=by_rows))
        each = _each(len(source.shape) - 1, source.shape[-1], by_rows=by_rows).removesuffix(" {")
        new, old = source.at(index), "s" if last else into.at(index)
        # What is no number is taken, and nothing is larger.
        step = f"{old} = {new} > {old} || {new} != {new} ? {new} : {old};" if largest else f"{old} += {new};"
        if last:
            simd = "" if largest else '_Pragma("omp simd reduction(+ : s)")'
            self.lines += [f"{into.ctype} s = {into.at(index)};", simd, f"{each} {step}", f"{into.at(index)} = s;"]
        else:
            self.lines += ["SIMD", f"{each} {step}"]
        self.lines.append("}" * (len(source.shape) - 1))

    def gemm(
        self, left: tuple[Place, str], right: tuple[Place, str], out: tuple[Place, str], *, by_rows: bool = False
    ) -> None:
        """Write a matrix product by torch's code; each matrix comes with what is added to its address."""
        (a, move_a), (b, move_b), (c, move_c) = left, right, out
        (m, k), n = a.shape, b.shape[1]
        kind = c.ctype
        pa, pb, pc = a.pointer() + move_a, b.pointer() + move_b, c.pointer() + move_c
        rows = str(m)
        if by_rows:
            pa, pc, rows = f"{pa} + lo * {a.strides[0]}L", f"{pc} + lo * {n}L", "(int)(hi - lo)"
        straight = b.strides[1] == 1 and b.strides[0] >= n
        if m == 1 and (a.strides[1] == 1 or k == 1):
            name, ld = ("rows", b.strides[0]) if straight else ("dots", b.strides[1])
            self.lines.append(f"hs_{name}_{kind}({n}, {k}, {pa}, {pb}, {ld}L, {pc});")
            return
        # Fortran reads by columns, so it is handed the transposed product: C' = B' A'.
        a_rows = a.strides[1] == 1 and a.strides[0] >= k
        flags = ("N" if straight else "T"), ("N" if a_rows else "T")
        lds = (b.strides[0] if straight else b.strides[1]), (a.strides[0] if a_rows else a.strides[1])
        call = f"&(int){{{n}}}, &(int){{{rows}}}, &(int){{{k}}}, &({kind}){{1}}, {pb}, &(int){{{lds[0]}}}, {pa}, "
        call += f"&(int){{{lds[1]}}}, &({kind}){{0}}, {pc}, &(int){{{n}}}"
        self.lines.append(f'{"sgemm" if kind == "float" else "dgemm"}("{flags[0]}", "{flags[1]}", {call});')


def _each(axis: int, size: int, *, by_rows: bool) -> str:
    first, last = ("lo", "hi") if by_rows and axis == 0 else ("0", str(size))
    return f"for (long i{axis} = {first}; i{axis} < {last}; i{axis}++) {{"
