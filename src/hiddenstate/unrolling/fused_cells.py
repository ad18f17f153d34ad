"""Torch's own cells in their equations: on a GPU torch runs each by one kernel, which no compiler can look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def equations_of(operation: Any, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return what computes the same as an operation by parts; None where torch itself takes it apart."""
    x = arguments[0] if arguments else None
    return _EQUATIONS.get(operation) if isinstance(x, Tensor) and x.is_cuda else None


def lstm_cell(
    x: Tensor,
    state: tuple[Tensor, Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return an LSTM's next hidden and cell state."""
    x, h, c, w_ih, w_hh, b_ih, b_hh = _as_autocast(x, *state, w_ih, w_hh, b_ih, b_hh)
    i, f, g, o = (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_cell(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Return a GRU's next state."""
    x, h, w_ih, w_hh, b_ih, b_hh = _as_autocast(x, h, w_ih, w_hh, b_ih, b_hh)
    reset, update, new = F.linear(x, w_ih, b_ih).chunk(3, dim=-1)
    of_reset, of_update, of_new = F.linear(h, w_hh, b_hh).chunk(3, dim=-1)
    new = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
    return new + torch.sigmoid(update + of_update) * (h - new)


def _as_autocast(*tensors: Any) -> Any:
    """Return what torch's kernel would be given: under autocast all of it in the lower precision."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


_EQUATIONS: dict[Any, Callable[..., Any]] = {torch.lstm_cell: lstm_cell, torch.gru_cell: gru_cell}
