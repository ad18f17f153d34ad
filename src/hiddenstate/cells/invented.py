"""Inputs made up for a module that came without any, from the sizes that can be read off it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .adapter import weights_like

_NAMES = ("input_size", "in_features", "input_dim", "n_in", "input_dims")


def invented_inputs(module: nn.Module, *shape: int) -> Iterator[Tensor]:
    """Yield inputs `(*shape, feature)`, or tokens `(*shape)`, that a module may take, the likeliest first."""
    device, dtype = weights_like(module)
    generator = torch.Generator().manual_seed(0)
    widths: set[int] = set()
    tables: set[int] = set()
    for size, is_vocabulary in _sizes(module):
        if size < 1 or size in (tables if is_vocabulary else widths):
            continue
        (tables if is_vocabulary else widths).add(size)
        if is_vocabulary:
            yield torch.randint(size, shape, generator=generator).to(device)
        else:
            yield torch.randn(*shape, size, generator=generator, dtype=torch.float64).to(device, dtype)
    if not tables:
        yield torch.zeros(shape, dtype=torch.int64, device=device)  # tokens that are looked up in some other way


def _sizes(module: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yield sizes and whether each is that of a vocabulary."""
    hidden = getattr(module, "hidden_size", 0)
    for inner in module.modules():
        if isinstance(inner, nn.Embedding):
            yield inner.num_embeddings, True
        for size in (getattr(inner, name, None) for name in _NAMES):
            if isinstance(size, int):
                yield size, False
    if isinstance(hidden, int):  # products with x and h side by side
        for inner in module.modules():
            if isinstance(inner, nn.Linear):
                yield inner.in_features - hidden, False
    for parameter in module.parameters():
        if parameter.dim() == 2:
            yield parameter.shape[0], False
            yield parameter.shape[1], False
