"""Two kernels for CUDA: an LSTM's cells in one scan, and a matrix product in cuDNN's own precision.

This module is loaded only if a CUDA device has something to reconstruct. Without triton, plain torch does the same,
more slowly.
"""

# mypy: disable-error-code="import-not-found, no-untyped-def, union-attr, untyped-decorator"

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:  # for example on a machine without a GPU
    triton = None


def available() -> bool:
    """Say whether the kernels can be compiled on this machine."""
    return triton is not None


if triton is not None:

    @triton.jit
    def _scan(
        gates, first, lengths, cells, time, batch, hidden,
        REVERSE: tl.constexpr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < batch * hidden
        row, unit = at // hidden, at % hidden
        c = tl.load(first + at, mask=inside, other=0.0).to(tl.float64 if DOUBLE else tl.float32)
        length = tl.load(lengths + row, mask=inside, other=0)
        for step in range(time):
            t = (time - 1 - step if REVERSE else step).to(tl.int64)
            alive = t < length
            place = gates + (t * batch + row) * 4 * hidden + unit
            i = tl.load(place, mask=inside, other=0.0).to(c.dtype)
            f = tl.load(place + hidden, mask=inside, other=0.0).to(c.dtype)
            g = tl.load(place + 2 * hidden, mask=inside, other=0.0).to(c.dtype)
            o = tl.load(place + 3 * hidden, mask=inside, other=0.0).to(c.dtype)
            i = 1.0 / (1.0 + tl.exp(-i))
            f = 1.0 / (1.0 + tl.exp(-f))
            o = 1.0 / (1.0 + tl.exp(-o))
            g = libdevice.tanh(g)
            c = tl.where(alive, f * c + i * g, c)
            tl.store(place, tl.where(alive, i, 0.0), mask=inside)
            tl.store(place + hidden, tl.where(alive, f, 0.0), mask=inside)
            tl.store(place + 2 * hidden, tl.where(alive, g, 0.0), mask=inside)
            tl.store(place + 3 * hidden, tl.where(alive, o, 0.0), mask=inside)
            tl.store(cells + t * batch * hidden + at, tl.where(alive, c, 0.0), mask=inside)

    @triton.jit
    def _product(
        x, w, bias, out, rows, columns, depth,
        BIAS: tl.constexpr, ADD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        row = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
        column = tl.program_id(1) * N + tl.arange(0, N)
        total = tl.zeros((M, N), dtype=tl.float32)
        for start in range(0, depth, K):
            k = start + tl.arange(0, K)
            a = tl.load(
                x + row[:, None] * depth + k[None, :], mask=(row[:, None] < rows) & (k[None, :] < depth), other=0.0
            )
            b = tl.load(
                w + column[None, :] * depth + k[:, None],
                mask=(column[None, :] < columns) & (k[:, None] < depth),
                other=0.0,
            )
            total = tl.dot(a, b, total, input_precision="tf32")
        if BIAS:
            total += tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
        place = out + row[:, None] * columns + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        if ADD:
            total += tl.load(place, mask=inside, other=0.0)
        tl.store(place, total, mask=inside)


def lstm_scan(pre: Tensor, first: Tensor, lengths: Tensor, *, reverse: bool) -> Tensor:
    """Activate gates `(time, batch, 4 * hidden)` in place, given before their activations; return the cells."""
    time, batch, width = pre.shape
    hidden = width // 4
    cells = pre.new_empty(time, batch, hidden)
    if cells.numel():
        block = 64  # small, since only batch * hidden chains run side by side, and each waits for memory
        grid = (triton.cdiv(batch * hidden, block),)
        with torch.cuda.device(pre.device):
            _scan[grid](
                pre, first, lengths, cells, time, batch, hidden,
                REVERSE=reverse, DOUBLE=pre.dtype == torch.float64, BLOCK=block, num_warps=2,
            )  # fmt: skip
    return cells


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> Tensor:
    """Write `x (rows, depth) @ weight (columns, depth).T + bias` to `out` in tf32, or add it to `out`."""
    (rows, depth), columns = x.shape, weight.shape[0]
    if out.numel():
        m, n = 128, 128
        grid = (triton.cdiv(rows, m), triton.cdiv(columns, n))
        with torch.cuda.device(x.device):
            _product[grid](
                x, weight, x if bias is None else bias, out, rows, columns, depth,
                BIAS=bias is not None, ADD=add, M=m, N=n, K=32, num_warps=8, num_stages=3,
            )  # fmt: skip
    return out
