"""The complete kernel of a loop: its source, and its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..native.values import shape_of
from .instructions import INSTRUCTIONS
from .plan import Plan, stored
from .prelude import PRELUDE
from .sizes import Product, choose
from .writing import StepWriter, slots

_FUNCTIONS = {"+": ("hs_sum", "0.0f"), "max": ("hs_max", "-INFINITY")}


class Kernel:
    """A loop as CUDA source, and its size on the chip.

    Its parameters are the number of steps, then pointers: to what is carried, the same at all steps, given at each,
    kept of each, to memory to work in, and to the counters by which blocks wait for each other.
    """

    def __init__(self, plan: Plan, *, processors: int, exact: bool) -> None:
        """Write the kernel for a chip of so many processors, with float32 factors whole or rounded to ten bits."""
        self.plan, self.writer, self.exact = plan, StepWriter(plan), exact
        self.products = [
            Product(shape_of(node.args[0])[1], len(self.writer.parts[node]), node.meta["val"].dtype.itemsize)  # type: ignore[arg-type]
            for node in plan.products
        ]
        self.sizes = choose(plan.extent, self.products, processors=processors, exchanges=plan.exchanges)
        self._sums = max(len(level.sums) for level in self.writer.levels)

    @property
    def grid(self) -> int:
        """Blocks in all."""
        return self.sizes.groups * self.sizes.blocks

    @property
    def work(self) -> int:
        """Bytes of memory to work in for one of two steps: what is multiplied, then each block's sums."""
        sums = sum(len(level.sums) for level in self.writer.levels)
        return self.writer.scratch + (self.grid * sums * self.sizes.rows * 4 + 127) // 128 * 128

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        partial = sum(map(self.sizes.partial, self.products))
        return 4 * (partial + self._sums * self.sizes.rows * (self.sizes.units + 1))

    def source(self, instructions: str = INSTRUCTIONS) -> str:
        """Return the CUDA text."""
        writer = self.writer
        start = [*self._constants(), *self._elements(), *self._weights(), *writer.outer, *_each(writer.first)]
        single = [place for place in range(self.plan.loop.carried) if slots(self.plan, place) == 1]
        step = "steps - 1 - n" if self.plan.loop.backward else "n"
        lines = [
            *start,
            "unsigned met = 0;",
            "for (long n = 0; n < steps; n++) {",
            f"const long t = {step};",
            f"char *work_now = work + (n & 1) * {self.work}L;",
            *self._moving(),
            *writer.inner,
            *_each(writer.top),
            *self._levels(),
            *_each(writer.ending()),
            "}",
            *_each(line for place in single for line in writer.finals(place)),
        ]
        body = "\n".join(lines)
        return f"{instructions}\n{PRELUDE}\n{self._defines()}\n{self._head()}\n{body}\n}}\n"

    def _defines(self) -> str:
        sizes, extent = self.sizes, self.plan.extent
        lines = [
            f"#define E {sizes.elements}",
            f"#define ROWS {sizes.rows}",
            f"#define UNITS {sizes.units}",
            f"#define THREADS {sizes.threads}",
            f"#define BLOCKS {sizes.blocks}",
            f"#define ALL_ROWS {extent.rows}",
            f"#define ALL_UNITS {extent.units}",
        ]
        start = 0
        for number, product in enumerate(self.products):
            pad = sizes.padded(product)
            gather = f"gathered<{sizes.warps}, {sizes.tiles}, {pad}>(partial + {start}, row, column)"
            lines.append(f"#define GATHER{number}(row, column) {gather}")
            start += sizes.partial(product)
        return "\n".join(lines)

    def _head(self) -> str:
        plan = self.plan
        given = [f"{stored(node)} *room{place}" for place, node in enumerate(plan.carried)]
        given += [f"const {stored(node)} *fix{place}" for place, node in enumerate(plan.fixed)]
        given += [f"const {stored(node)} *along{place}" for place, node in enumerate(plan.along)]
        kept = plan.results[plan.loop.carried :]
        given += [f"{stored(node)} *keep{place}" for place, node in enumerate(kept)]
        inside = ", ".join(["long steps", *given, "char *work", "unsigned *bars"])
        return f'extern "C" __global__ void __launch_bounds__(THREADS, 1) run({inside}) {{'

    def _constants(self) -> list[str]:
        partial = sum(map(self.sizes.partial, self.products))
        lines = [
            "float *partial = shared_memory();",
            f"float *own = partial + {partial}, *total = own + {self._sums} * ROWS * UNITS;",
            "const int tid = threadIdx.x, group = blockIdx.x / BLOCKS, block = blockIdx.x % BLOCKS;",
            "const int first_row = group * ROWS, first_unit = block * UNITS;",
            "unsigned *bar = bars + group * 32;",
        ]
        for place, node in enumerate(self.plan.carried):
            size = math.prod(shape_of(node))
            # A path of all steps is in the order of time: a loop that runs backward begins at its end.
            begins = f"steps * {size}L" if self.plan.loop.backward and slots(self.plan, place) == 0 else "0"
            lines.append(f"const long start{place} = {begins};")
        return lines

    def _elements(self) -> list[str]:
        lines = [
            "const int number = e * THREADS + tid, inside = min(number, ROWS * UNITS - 1);",
            "lrow[e] = inside / UNITS;",
            "lunit[e] = inside % UNITS;",
            "ok[e] = number < ROWS * UNITS && first_row + lrow[e] < ALL_ROWS && first_unit + lunit[e] < ALL_UNITS;",
            "row[e] = min(first_row + lrow[e], ALL_ROWS - 1);",
            "unit[e] = min(first_unit + lunit[e], ALL_UNITS - 1);",
        ]
        return ["int lrow[E], lunit[E], row[E], unit[E];", "bool ok[E];", *_each(lines)]

    def _weights(self) -> list[str]:
        lines = []
        for number, (node, product) in enumerate(zip(self.plan.products, self.products, strict=True)):
            weight, turned = self.plan.weight(node)
            inner, outer = weight.meta["val"].stride()[:: -1 if turned else 1]
            depth, columns = self.sizes.depth(product), self.sizes.columns(product)
            parts = self.writer.parts[node]
            kinds = f"{stored(node)}, {self._exact(product)}, {product.inner}, {depth}, {columns}, UNITS, {len(parts)}"
            where = f"fix{self.plan.fixed.index(weight)}, {inner}L, {outer}L, parts{number}, first_unit, ALL_UNITS"
            lines += [
                f"unsigned w{number}[{depth}][{columns}][4];",
                f"const int parts{number}[] = {{{', '.join(map(str, parts))}}};",
                f"load_weight<{kinds}>(w{number}, {where});",
            ]
        return lines

    def _exact(self, product: Product) -> str:
        return "true" if self.exact and product.bytes == 4 else "false"

    def _moving(self) -> list[str]:
        """Return the lines that find this step's place in what lies along time."""
        plan, lines = self.plan, []
        for place, node in enumerate(plan.carried):
            size, count = math.prod(shape_of(node)), slots(plan, place)
            now, after = ("steps - n", "t") if plan.loop.backward else ("n", "n + 1")
            if count == 2:
                now, after = "(n & 1)", "((n + 1) & 1)"
            if count != 1:
                lines.append(f"const long now{place} = ({now}) * {size}L, next{place} = ({after}) * {size}L;")
        for name, nodes in (("along", plan.along), ("keep", plan.results[plan.loop.carried :])):
            for place, node in enumerate(nodes):
                const = "const " if name == "along" else ""
                size = math.prod(shape_of(node))
                lines.append(f"{const}{stored(node)} *{name}{place}_now = {name}{place} + t * {size}L;")
        return lines

    def _levels(self) -> list[str]:
        plan, lines = self.plan, []
        for level, work in enumerate(self.writer.levels):
            if level or plan.enters:
                lines.append("wait(bar, met);")
            lines += self._exchanged(level)
            lines += _each(work.body)
            lines += _each(work.shared)
            lines += self._summed(level + 1)
            if level < plan.last or plan.enters:
                lines += ["arrive(bar);", "met += BLOCKS;"]
            lines += _each(work.stores)
        return lines

    def _exchanged(self, level: int) -> list[str]:
        """Return the lines that take in what all blocks made: products of it, and sums."""
        lines, start = [], 0
        for number, (node, product) in enumerate(zip(self.plan.products, self.products, strict=True)):
            if self.plan.levels[node] == level:
                sizes = self.sizes
                numbers = [product.inner, sizes.depth(product), sizes.columns(product), sizes.tiles]
                numbers += [sizes.chunk(product, self.products), sizes.padded(product), self.plan.extent.rows]
                left = self.writer.left[node.args[0]]  # type: ignore[index]
                call = f"product<{stored(node)}, {self._exact(product)}, {', '.join(map(str, numbers))}>"
                lines.append(f"{call}(partial + {start}, {left}, first_row, w{number});")
            start += self.sizes.partial(product)
        for place, (_, operation) in enumerate(self.writer.levels[level].sums):
            function, zero = _FUNCTIONS[operation]
            lines += [
                f"for (int r = tid >> 5; r < ROWS; r += {self.sizes.warps}) {{",
                f"float x = {zero};",
                "for (int b = tid & 31; b < BLOCKS; b += 32)",
                f"x = {function}(x, __uint_as_float(far1({self._sum(level, place, 'b')})));",
                f"for (int s = 16; s; s /= 2) x = {function}(x, __shfl_xor_sync(0xffffffff, x, s));",
                f"if ((tid & 31) == 0) total[{place} * ROWS + r] = x;",
                "}",
            ]
        return [*lines, "__syncthreads();"] if lines else []

    def _summed(self, level: int) -> list[str]:
        """Return the lines that leave a block's own part of sums where the others find it."""
        if level > self.plan.last or not self.writer.levels[level].sums:
            return []
        mine = [
            f"if (e * THREADS + tid < ROWS * UNITS) own[({place} * ROWS + lrow[e]) * UNITS + lunit[e]] = "
            f"ok[e] ? {name} : {_FUNCTIONS[operation][1]};"
            for place, (name, operation) in enumerate(self.writer.levels[level].sums)
        ]
        lines = [*_each(mine), "__syncthreads();"]
        for place, (_, operation) in enumerate(self.writer.levels[level].sums):
            function, zero = _FUNCTIONS[operation]
            lines += [
                "for (int r = tid; r < ROWS; r += THREADS) {",
                f"float x = {zero};",
                f"for (int u = 0; u < UNITS; u++) x = {function}(x, own[({place} * ROWS + r) * UNITS + u]);",
                f"*({self._sum(level, place, 'block')}) = x;",
                "}",
            ]
        return lines

    def _sum(self, level: int, place: int, block: str) -> str:
        number = sum(len(earlier.sums) for earlier in self.writer.levels[:level]) + place
        start = f"(float *)(work_now + {self.writer.scratch}L)"
        return f"{start} + (({number} * {self.sizes.groups} + group) * BLOCKS + {block}) * ROWS + r"


def _each(lines: Iterable[str]) -> list[str]:
    """Return lines that are done for each element of a thread."""
    inside = list(lines)
    return ["#pragma unroll", "for (int e = 0; e < E; e++) {", *inside, "}"] if inside else []
