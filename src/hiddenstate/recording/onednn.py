"""oneDNN's LSTM on the CPU: where torch uses it, and where it leaves the gates."""

from __future__ import annotations

import torch
from torch import Tensor

from .calls import Call, Weights
from .exact import judge, same_bits

_LSTM = 2  # oneDNN's number for the kind of network


def takes(call: Call) -> bool:
    """Say whether torch hands this call to oneDNN."""
    if call.kind != "lstm" or call.batch_sizes is not None or not torch.backends.mkldnn.is_available():
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
    """Run one layer and direction over `x (time, batch, feature)`: output, h, c, and (with grad mode on) a workspace."""
    bias = weights.bias_ih is not None
    hidden = weights.hh.shape[1]
    b_ih, b_hh = (
        (weights.bias_ih, weights.bias_hh) if bias else (torch.zeros_like(weights.ih), torch.zeros_like(weights.hh))
    )
    h, c = (part.contiguous() for part in state)
    result: tuple[Tensor, ...] = torch.mkldnn_rnn_layer(  # type: ignore[attr-defined]
        x, weights.ih, weights.hh, b_ih, b_hh, h, c, reverse, [], _LSTM, hidden, 1, bias, False, False, True
    )
    return result


def gates(workspace: Tensor, x: Tensor, out: Tensor, state: tuple[Tensor, ...], weights: Weights, *, reverse: bool) -> Tensor | None:
    """Return all gates `(time, batch, 4 * hidden)` out of a training workspace, or None where they are not found.

    The layout is oneDNN's own business: one step is checked against the equations, so a change there is noticed.
    """
    time, batch, hidden = out.shape
    width = _row(4 * hidden)
    if workspace.numel() < 4 * time * batch * width:
        return None
    found = workspace[: 4 * time * batch * width].view(torch.float32).view(time, batch, width)[..., : 4 * hidden]
    # Gates lie in the order of computation; the last step computed is the farthest from the start of the workspace.
    last = 0 if reverse else time - 1
    before = state[0] if time == 1 else out[1] if reverse else out[time - 2]
    biases = (None, None) if weights.bias_ih is None else (weights.bias_ih, weights.bias_hh)
    pre = torch.nn.functional.linear(x[last], weights.ih, biases[0])
    pre += torch.nn.functional.linear(before, weights.hh, biases[1])
    pre[:, : 2 * hidden].sigmoid_()
    pre[:, 2 * hidden : 3 * hidden].tanh_()
    pre[:, 3 * hidden :].sigmoid_()
    if not torch.allclose(found[time - 1], pre, rtol=1e-3, atol=1e-4, equal_nan=True):
        return None
    return found.flip(0) if reverse else found


def training_equals_inference(shape: tuple[int, ...], hidden: int, *, bias: bool) -> bool:
    """Say whether oneDNN's two LSTM kernels give the same bits at this size; its inference kernel keeps no gates.

    They add up in different orders at some sizes. That does not depend on the number of steps, so a short sequence
    of random numbers, drawn apart from the user's random stream, is proof enough.
    """
    time, batch, feature = shape
    steps = 1 if time == 1 else min(256, max(8, 512 // (batch * hidden)))
    key = ("training equals inference", steps == 1, batch, feature, hidden, bias, torch.get_num_threads())
    return judge(key, lambda: _agree((steps, batch, feature), hidden, bias))


def _agree(shape: tuple[int, ...], hidden: int, bias: bool) -> bool:
    source = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=source) / hidden**0.5

    with torch.inference_mode(False):
        x = torch.randn(shape, generator=source)
        state = draw(shape[1], hidden), draw(shape[1], hidden)
        biases = (draw(4 * hidden), draw(4 * hidden)) if bias else (None, None)
        weights = Weights(draw(4 * hidden, shape[2]), draw(4 * hidden, hidden), *biases)
        with torch.enable_grad():
            training = track(x, state, weights, reverse=False)
        with torch.no_grad():
            inference = track(x, state, weights, reverse=False)
    return same_bits(training[:3], inference[:3])


def _row(numbers: int) -> int:
    """Return the length of a workspace row: whole cache lines, but never a multiple of 256 numbers."""
    padded = -(-numbers // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded
