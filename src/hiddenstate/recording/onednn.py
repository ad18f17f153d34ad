"""oneDNN's LSTM on the CPU: where torch uses it, and where it leaves the gates."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from .exact import judge
from .kernel_call import KernelCall, Weights

_LSTM = 2  # oneDNN's number for the kind of network


def takes(call: KernelCall) -> bool:
    """Say whether torch hands this call to oneDNN."""
    if call.kind != "lstm" or call.batch_sizes is not None or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    tensors = (call.data, *call.state, *call.flat)
    return (
        torch._C._get_mkldnn_enabled()
        and all(tensor.device.type == "cpu" and tensor.layout == torch.strided for tensor in tensors)
        and call.data.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and call.data.numel() != 0
        and len(call.weights(0)) == (4 if call.bias else 2) * call.directions  # no projection
    )


def track(x: Tensor, state: tuple[Tensor, ...], weights: Weights, *, reverse: bool) -> tuple[Tensor, ...]:
    """Run one layer and direction over `x (time, batch, feature)`: output, h, c, and in grad mode a workspace."""
    bias = weights.bias_ih is not None
    hidden = weights.hh.shape[1]
    b_ih = torch.zeros_like(weights.ih) if weights.bias_ih is None else weights.bias_ih  # as torch fills the place
    b_hh = torch.zeros_like(weights.hh) if weights.bias_hh is None else weights.bias_hh
    h, c = (part.contiguous() for part in state)
    result: tuple[Tensor, ...] = torch.mkldnn_rnn_layer(
        x, weights.ih, weights.hh, b_ih, b_hh, h, c, reverse, [], _LSTM, hidden, 1, bias, False, False, True
    )
    return result


def kept(
    result: tuple[Tensor, ...], x: Tensor, state: tuple[Tensor, ...], weights: Weights, *, reverse: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return gates `(time, batch, 4 * hidden)` and cells `(time, batch, hidden)` out of a training run's workspace.

    Its layout is oneDNN's own business: at each new size the last step is checked against the equations, and
    None is returned where it differs.
    """
    out, _, last, workspace = result
    time, batch, hidden = out.shape
    numbers = workspace.view(torch.float32)
    row, step = _row(4 * hidden), batch * hidden
    # Each region starts on a page: gates, h without its projection, h of two layers, c of two layers; the latter two
    # with the initial state in front and without the final one, which goes straight to the result.
    inner = _pages(time * batch * row) + _pages(time * batch * _row(hidden))
    start = inner + _pages(2 * (time + 1) * batch * _row(max(x.shape[2], hidden))) + (time + 2) * step
    if len(numbers) < start + (time - 1) * step:
        return None, None
    gates = numbers[: time * batch * row].view(time, batch, row)[..., : 4 * hidden]
    cells = numbers[start : start + (time - 1) * step].view(time - 1, batch, hidden)

    def agree() -> bool:
        i, f, g, _ = gates[-1].chunk(4, -1)
        c = f * (cells[-1] if time > 1 else state[1]) + i * g
        return _close(gates[-1], _final_gates(x, out, state, weights, reverse)) and _close(c, last)

    if not judge(("workspace", x.shape, hidden, reverse), agree):
        return None, None
    cells = torch.cat([cells, last.unsqueeze(0)])
    # A workspace is in the order of computation.
    return (gates.flip(0), cells.flip(0)) if reverse else (gates, cells)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)


def _final_gates(x: Tensor, out: Tensor, state: tuple[Tensor, ...], weights: Weights, reverse: bool) -> Tensor:
    here, before = (0, 1) if reverse else (len(out) - 1, len(out) - 2)
    gates = linear(x[here], weights.ih, weights.bias_ih)
    gates += linear(out[before] if len(out) > 1 else state[0], weights.hh, weights.bias_hh)
    hidden = out.shape[2]
    gates[:, : 2 * hidden].sigmoid_()
    gates[:, 2 * hidden : 3 * hidden].tanh_()
    gates[:, 3 * hidden :].sigmoid_()
    return gates


def _row(numbers: int) -> int:
    """Return the length of a workspace row: whole cache lines, but never a multiple of 256 numbers."""
    padded = -(-numbers // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded


def _pages(numbers: int) -> int:
    return -(-numbers // 1024) * 1024
