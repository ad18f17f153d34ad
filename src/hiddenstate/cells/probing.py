"""Trying a module out without leaving a trace, to learn what its state looks like."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .adapter import weights_like
from .native import Form, Native, flatten, matches

_ROWS = 3  # neither 1, which broadcasts, nor 2, which `h, c = state` would take apart along the batch


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Put back everything a trial call may change: buffers, attributes, modes and the random stream."""
    members = list(module.modules())
    attributes = [(member, dict(member.__dict__)) for member in members]
    stores: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (store, dict(store)) for m in members for store in _stores(m)
    ]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = sorted({tensor.device.index for tensor in module.parameters() if tensor.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for member, before in attributes:
                member.__dict__.clear()
                member.__dict__.update(before)
            for store, entries in stores:
                store.clear()
                store.update(entries)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _stores(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def find_form(module: nn.Module, hidden: int, sample: Tensor | None = None) -> Form | None:
    """Return the form of state that `module` takes and gives back, found by trying it; None where nothing fits."""
    device, dtype = weights_like(module)

    def zeros() -> Tensor:
        return torch.zeros(_ROWS, hidden, device=device, dtype=dtype)

    candidates: list[Callable[[], Native]] = [zeros, lambda: (zeros(), zeros())]
    with undisturbed(module), torch.no_grad():
        for x in _steps(module, hidden, sample):
            for candidate in candidates:
                native = candidate()
                if _fits(module, x, native):
                    return flatten(native)[1]
    return _read_form(module)


def _fits(module: nn.Module, x: Tensor, native: Native) -> bool:
    form, shapes = flatten(native)[1], [part.shape for part in flatten(native)[0].values()]
    try:
        result = module.forward(x, native)
    except Exception:  # a trial: whatever a user's cell raises means that this form is not its own
        return False
    for found in (result, result[1] if isinstance(result, tuple) and len(result) == 2 else None):
        if found is not None and matches(form, found):
            return [part.shape for part in flatten(found)[0].values()] == shapes
    return False


def _steps(module: nn.Module, hidden: int, sample: Tensor | None) -> Iterator[Tensor]:
    device, dtype = weights_like(module)
    if sample is not None:
        yield sample[:1].expand(_ROWS, *sample.shape[1:]).contiguous()
        return
    named = [getattr(module, name, None) for name in ("input_size", "in_features", "input_dim")]
    widths = [inner.in_features for inner in module.modules() if isinstance(inner, nn.Linear)]
    matrices = [parameter.shape for parameter in module.parameters(recurse=False) if parameter.dim() == 2]
    sizes = [*named, *widths, *(width - hidden for width in widths), *(n for shape in matrices for n in shape)]
    for size in dict.fromkeys(size for size in sizes if isinstance(size, int) and size > 0):
        yield torch.zeros(_ROWS, size, device=device, dtype=dtype)
    yield torch.zeros(_ROWS, device=device, dtype=torch.int64)  # a cell that embeds tokens


def _read_form(module: nn.Module) -> Form | None:
    """Read `h, c = state` out of the source, for cells that cannot be tried."""
    import inspect

    from .adapter import arguments

    try:
        source = inspect.getsource(type(module).forward)
        name = arguments(type(module))[1]
    except (OSError, TypeError, IndexError):
        return None
    return ("h", "c") if re.search(rf"^\s*\(?\w+\s*,\s*\w+\)?\s*=\s*{name}\s*$", source, re.MULTILINE) else None


def call_initial_state(module: nn.Module, batch: int) -> Any:
    """Call a cell's own `initial_state`, with device and dtype where it insists on them."""
    import inspect

    method: Callable[..., Any] = module.initial_state  # type: ignore[assignment]
    device, dtype = weights_like(module)
    extra = {"device": device, "dtype": dtype}
    parameters = inspect.signature(method).parameters.values()
    needed = {p.name: extra[p.name] for p in parameters if p.name in extra and p.default is p.empty}
    return method(batch, **needed)
