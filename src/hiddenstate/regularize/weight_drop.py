"""Dropout on the weights that lead from one state to the next, with torch's fused kernels kept."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import NotRecurrent, UnsupportedTorch
from .dropout import probability


class WeightDrop(nn.Module):
    """An `nn.LSTM`, `nn.GRU` or `nn.RNN` whose recurrent weights are dropped anew for each call, in training.

    All layers and directions are. The layer keeps its own parameters under its own names, and only lends its
    kernel the dropped ones while it runs: `state_dict`, optimizers and `.to()` see a plain layer, and in evaluation
    it is one, to the bit. What the layer has, such as `hidden_size`, the wrapper has too.

    >>> lstm = WeightDrop(nn.LSTM(3, 4, batch_first=True), 0.5)
    >>> output, (h, c) = lstm(torch.randn(2, 5, 3))
    >>> list(lstm.state_dict())[:2]
    ['layer.weight_ih_l0', 'layer.weight_hh_l0']
    """

    layer: nn.RNNBase

    def __init__(self, layer: nn.RNNBase, p: float = 0.5) -> None:
        super().__init__()
        _check_layer(layer)
        self.layer = layer
        self.p = probability(p)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer as it is called itself."""
        if not self.training or self.p == 0:
            return self.layer(*args, **kwargs)
        with _lent(self.layer, self.p):
            return self.layer(*args, **kwargs)

    def flatten_parameters(self) -> None:
        """Lay the layer's own weights in one block, as cuDNN likes them."""
        self.layer.flatten_parameters()

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapper lacks from the layer."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "layer":  # not there yet, as while a pickle is read
                raise
            return getattr(self.layer, name)

    def extra_repr(self) -> str:
        """Say how much is dropped."""
        return f"p={self.p}"


@contextmanager
def _lent(layer: nn.RNNBase, p: float) -> Iterator[None]:
    """Let the kernel see dropped weights; gradients reach the layer's own through them."""
    if not (hasattr(layer, "_flat_weights") and hasattr(layer, "_flat_weights_names")):
        raise UnsupportedTorch(
            f"torch {torch.__version__} keeps no _flat_weights in its recurrent layers, from which their kernels would "
            f"take dropped weights: WeightDrop cannot be trained with it. hs.regularize.Zoneout works without them."
        )
    own: list[Any] = layer._flat_weights
    names: list[str] = layer._flat_weights_names
    layer._flat_weights = [
        F.dropout(weight, p) if name.startswith("weight_hh") and weight is not None else weight
        for name, weight in zip(names, own, strict=True)
    ]
    try:
        with _quiet() if own[0].is_cuda else nullcontext():
            yield
    finally:
        layer._flat_weights = own


@contextmanager
def _quiet() -> Iterator[None]:
    # Dropped weights are never in one block of memory: cuDNN copies them there, and says so each time.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


def _check_layer(layer: object) -> None:
    if isinstance(layer, nn.RNNBase):
        return
    hint = (
        "A cell would need other weights at every step: WeightDrop drops them once for a whole sequence."
        if isinstance(layer, nn.RNNCellBase)
        else "In a model, wrap the layer itself: model.lstm = WeightDrop(model.lstm, p)."
    )
    raise NotRecurrent(f"WeightDrop takes an nn.RNN, nn.LSTM or nn.GRU, but this is {type(layer).__name__}. {hint}")
