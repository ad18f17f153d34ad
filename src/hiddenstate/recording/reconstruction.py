"""Gates and cells from the states alone: given every h, all gates of all steps are one matrix product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from .kernel_call import Weights

if TYPE_CHECKING:
    from .padded import Padded


class Kernels(Protocol):
    """What `kernels` holds."""

    def lstm_scan(self, pre: Tensor, first: Tensor, lengths: Tensor, *, reverse: bool) -> Tensor:
        """Activate gates in place and return the cells."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> Tensor:
        """Write or add a product in tf32."""


def from_states(take: Padded) -> tuple[Tensor, Tensor | None]:
    """Return the gates `(time, batch, gates * hidden)` after their activations, and an LSTM's cells."""
    assert take.x is not None
    if take.kind == "lstm" and _kernels(take.x) is not None:
        return _in_one_scan(take, take.x)
    with torch.no_grad():
        gates = activated_gates(take.kind, take.x, take.before("h"), take.weights, like_cudnn=True)
        gates = _only_valid(take, gates)
        return gates, cells(take, gates) if take.kind == "lstm" else None


def _in_one_scan(take: Padded, x: Tensor) -> tuple[Tensor, Tensor]:
    # A launch for each step would cost as much as the network itself.
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        flat_x, flat_h = _flat(x, take.weights), _flat(take.before("h"), take.weights)
        pre = _sums(flat_x, flat_h, take.weights, _in_tf32(flat_x)).view(*x.shape[:-1], -1)
        first = take.initial["c"].to(pre.dtype).contiguous()
        lengths = take.layout.lengths.to(pre.device)
        kernels = _kernels(pre)
        assert kernels is not None
        return pre, kernels.lstm_scan(pre, first, lengths, reverse=take.reverse)


def cells(take: Padded, activated: Tensor) -> Tensor:
    """Return an LSTM's cells `(time, batch, hidden)` from its gates."""
    i, f, g, _ = activated.chunk(4, -1)
    with torch.no_grad():
        c = i * g
        last = take.initial["c"].to(c.dtype)
        started = None if take.layout.places is None or not take.reverse else take.valid.unsqueeze(-1)
        order = range(len(c) - 1, -1, -1) if take.reverse else range(len(c))
        forget, steps = f.unbind(0), c.unbind(0)
        for t in order:
            steps[t].addcmul_(forget[t], last)
            if started is not None:  # a short row, read backwards, starts at its own last step
                steps[t].copy_(torch.where(started[t], steps[t], last))
            last = steps[t]
        return _only_valid(take, c)


def activated_gates(kind: str, x: Tensor, before: Tensor, weights: Weights, *, like_cudnn: bool = False) -> Tensor:
    """Return the gates `(..., gates * hidden)` of steps with input `x` whose h was `before`.

    Torch's cells and cuDNN's layers do not round alike: with `like_cudnn` products are in tf32 where cuDNN's are.
    """
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        flat_x, flat_h = _flat(x, weights), _flat(before, weights)
        tf32 = like_cudnn and _in_tf32(flat_x)
        gates = (_lstm if kind == "lstm" else _gru)(flat_x, flat_h, weights, tf32)
        return gates.view(*x.shape[:-1], -1)


def _lstm(flat_x: Tensor, flat_h: Tensor, weights: Weights, tf32: bool) -> Tensor:
    gates = _sums(flat_x, flat_h, weights, tf32)
    units = gates.shape[-1] // 4
    gates[:, : 2 * units].sigmoid_()
    gates[:, 2 * units : 3 * units].tanh_()
    gates[:, 3 * units :].sigmoid_()
    return gates


def _gru(flat_x: Tensor, flat_h: Tensor, weights: Weights, tf32: bool) -> Tensor:
    gates = _affine(flat_x, weights.ih, weights.bias_ih, tf32)
    from_h = _affine(flat_h, weights.hh, weights.bias_hh, tf32)
    units = gates.shape[-1] // 3
    gates[:, : 2 * units].add_(from_h[:, : 2 * units]).sigmoid_()
    gates[:, 2 * units :].addcmul_(gates[:, :units], from_h[:, 2 * units :]).tanh_()
    return gates


def _sums(flat_x: Tensor, flat_h: Tensor, weights: Weights, tf32: bool) -> Tensor:
    """Return an LSTM's gates before their activations, `(rows, 4 * hidden)`."""
    gates = _affine(flat_x, weights.ih, weights.bias_ih, tf32)
    if tf32 and (kernels := _kernels(gates)) is not None:
        return kernels.product(flat_h, weights.hh, weights.bias_hh, gates, add=True)
    gates.addmm_(flat_h, weights.hh.t())
    return gates if weights.bias_hh is None else gates.add_(weights.bias_hh)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool) -> Tensor:
    if tf32 and (kernels := _kernels(x)) is not None:
        return kernels.product(x, weight, bias, x.new_empty(len(x), len(weight)), add=False)
    return linear(x, weight, bias)


def _in_tf32(x: Tensor) -> bool:
    """Say whether cuDNN ran the layer in tf32: then reconstruction need not be finer, nor as slow as float32 is."""
    if x.dtype != torch.float32 or not x.is_cuda:
        return False
    return bool(torch.backends.cudnn.allow_tf32) and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _kernels(x: Tensor) -> Kernels | None:
    """Return the kernels where they can run; triton is too heavy to load where nobody needs it."""
    if not x.is_cuda:
        return None
    from . import kernels

    return kernels if kernels.available() else None


def _flat(values: Tensor, weights: Weights) -> Tensor:
    # Under autocast a run's inputs and states may be narrower than its weights.
    return values.reshape(-1, values.shape[-1]).to(weights.ih.dtype).contiguous()


def _only_valid(take: Padded, values: Tensor) -> Tensor:
    return values if take.layout.places is None else values.masked_fill_(~take.valid.unsqueeze(-1), 0)
