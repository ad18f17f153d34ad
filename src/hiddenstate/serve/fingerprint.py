"""Fingerprints of models: a hash over everything that determines the next state."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from ..cells import layers, unwrap
from .settings import Ends, settings


def fingerprint(model: nn.Module) -> str:
    """Return 32 hexadecimal digits that change with any weight, buffer, setting, name, shape, dtype or module.

    A setting is an attribute of a module or of its class: a number, a text, a tensor, a function, or any container or
    object that holds such. Modes, gradients, devices and hooks are none, and neither is code.

    >>> model = torch.nn.GRU(2, 3)
    >>> before = fingerprint(model)
    >>> before == fingerprint(model)
    True
    >>> _ = torch.nn.init.zeros_(model.bias_hh_l0)
    >>> before == fingerprint(model)
    False
    """
    digest = _of_layers(model)
    bare = unwrap(model)
    named = {**dict(bare.named_buffers()), **bare.state_dict()}  # those that are not saved are buffers too
    weights = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}
    for name, tensor in sorted(weights.items()):
        _add_tensor(digest, name, tensor)
    known = {id(tensor) for tensor in (*weights.values(), *bare.parameters(), *bare.buffers())}
    known |= {tensor.data_ptr() for tensor in weights.values() if _is_dense(tensor)}
    ends = Ends(bare)
    for path, module in bare.named_modules():
        for name, value in settings(module):
            for where, end in ends.of(value, f"{path}.{name}"):
                if not isinstance(end, Tensor):
                    digest.update(f"{where} {end}".encode("utf-8", "surrogatepass"))
                elif id(end) not in known and not (_is_dense(end) and end.data_ptr() in known):
                    _add_tensor(digest, where, end)
    return digest.hexdigest()


def first_fingerprint(model: nn.Module) -> str:
    """Return what the fingerprint was in the first edition, without settings and buffers that are not saved.

    Sessions that were stored then can be told by nothing else.
    """
    digest = _of_layers(model)
    for name, tensor in sorted(unwrap(model).state_dict().items()):
        if isinstance(tensor, Tensor):
            _add_tensor(digest, name, tensor)
    return digest.hexdigest()


def _of_layers(model: nn.Module) -> hashlib.blake2b:
    """Return a digest of the recurrent layers, to be gone on with."""
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
    return digest


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def _add_tensor(digest: hashlib.blake2b, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode("utf-8", "surrogatepass"))
    if tensor.device.type == "meta":
        return
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.is_quantized:
        plain = plain.int_repr()
    if plain.numel():
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
