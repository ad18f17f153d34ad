"""Dropout on the recurrent weights, keeping torch's fused kernels."""

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
    """An `nn.LSTM`, `nn.GRU` or `nn.RNN` whose recurrent weights are dropped anew for each call in training.

    This covers all layers and directions. The layer keeps its own parameters under their names, and its kernel gets the
    dropped weights only while it runs. `state_dict`, optimizers and `.to()` see a plain layer, and in evaluation the
    results are bit for bit those of the plain layer. The wrapper has the layer's attributes, such as `hidden_size`.

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
        """Run the layer with its own arguments."""
        if not self.training or self.p == 0:
            return self.layer(*args, **kwargs)
        with _lent(self.layer, self.p):
            return self.layer(*args, **kwargs)

    def flatten_parameters(self) -> None:
        """Put the layer's weights into one block of memory, as cuDNN prefers."""
        self.layer.flatten_parameters()

    def __getattr__(self, name: str) -> Any:
        """Look up missing attributes in the layer."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "layer":  # it does not exist yet while a pickle is loaded
                raise
            return getattr(self.layer, name)

    def extra_repr(self) -> str:
        """Return the probability, for printing."""
        return f"p={self.p}"


@contextmanager
def _lent(layer: nn.RNNBase, p: float) -> Iterator[None]:
    """Give dropped weights to the kernel in this context; gradients reach the layer's own weights through them."""
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
    # Dropped weights are never in one block of memory; cuDNN copies them into one and warns each time.
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
