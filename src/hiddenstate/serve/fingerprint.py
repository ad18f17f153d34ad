"""Which model a state belongs to: a hash over all that makes its next state."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from ..cells import layers, unwrap


def fingerprint(model: nn.Module) -> str:
    """Return 32 hexadecimal digits that change with any weight, buffer, name, shape, dtype or recurrent layer.

    >>> model = torch.nn.GRU(2, 3)
    >>> before = fingerprint(model)
    >>> before == fingerprint(model)
    True
    >>> _ = torch.nn.init.zeros_(model.bias_hh_l0)
    >>> before == fingerprint(model)
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for layer in layers(model):
        kind = type(layer.module)
        spec = layer.spec
        # torch's plain RNN has its nonlinearity in its mode and nowhere in its weights.
        mode = getattr(layer.module, "mode", "")
        facts = (
            layer.name,
            kind.__qualname__,
            layer.kind,
            mode,
            sorted(spec.sizes.items()),
            spec.layers,
            spec.directions,
        )
        digest.update(repr(facts).encode())
    for name, tensor in sorted(unwrap(model).state_dict().items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.is_quantized:
        plain = plain.int_repr()
    if not plain.numel():
        return memoryview(b"")
    return plain.reshape(-1).view(torch.uint8).numpy().data
