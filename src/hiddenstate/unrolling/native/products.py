"""Matrix products in our own code, for sizes at which it uses the processor better than torch does."""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .compiling import library, torch_library
from .kernel import KERNEL
from .values import Unsupported

_WORTH = 2**20  # multiplications from which a product by our own code is worth a call of it
_WIDE = 128  # bytes of a panel's row, at most
_NEAR = 2**23  # bytes of a packed factor that stay near the processor
_TYPES = {torch.float32: "float", torch.float64: "double"}
_NAMES = [f"{what}_{ctype}" for what in ("pack", "multiply", "product") for ctype in _TYPES.values()]


class _ProductTask(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("m", "n", "k", "ars", "acs", "brs", "bcs", "parts_m", "parts_n")),
        *((name, ctypes.c_long) for name in ("deep", "room", "next")),
        *((name, ctypes.c_void_p) for name in ("a", "b", "c", "work")),
    ]


def own_in_loops() -> bool:
    """Say whether factors that stay the same are packed once for all steps: for vectors our code was written for."""
    return {"avx2", "fma"} <= _processor()[1] and bool(addresses())


def own_around_loops() -> bool:
    """Say whether large products are ours too: torch's are tuned for other makers' processors than these."""
    return own_in_loops() and _processor()[0] in ("AuthenticAMD", "HygonGenuine")


def addresses() -> dict[str, int]:
    """Return where the functions of the kernel lie, compiled at the first call; nothing where that fails."""
    try:
        return _compiled()
    except Unsupported:
        return {}


@lru_cache(maxsize=1)
def _compiled() -> dict[str, int]:
    kernel = library(KERNEL)
    return {name: _address(kernel, name) for name in _NAMES}


@lru_cache(maxsize=1)
def parallel() -> int:
    """Return the address of the function by which torch's own threads share work, 0 where there is none."""
    found = torch_library()
    return _address(found, "GOMP_parallel") if hasattr(found, "GOMP_parallel") else 0


def packed_size(k: int, n: int, ctype: str) -> int:
    """Return the numbers that a packed factor (k, n) takes, at most."""
    wide = _WIDE // (4 if ctype == "float" else 8)
    return k * -(-n // wide) * wide


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices, by torch's threads."""
    if _crowded(a) and not _crowded(b.t()):
        return multiply(b.t(), a.t()).t().contiguous()
    (m, k), n = a.shape, b.shape[1]
    ctype = _TYPES[a.dtype]
    threads = min(torch.get_num_threads(), m * k * n // _WORTH + 1) if parallel() else 1
    parts_m, parts_n = _parts(m, n, threads)
    width = -(-n // parts_n) + _WIDE
    # All of a factor at once where it is used by many rows; else a few of its rows at a time, to save memory.
    deep = k if m >= k and k * width * a.element_size() <= _NEAR else 2048 // a.element_size()
    room = packed_size(deep, width, ctype)
    work, out = a.new_empty(parts_m * parts_n * room), a.new_empty(m, n)
    pointers = (part.data_ptr() for part in (a, b, out, work))
    task = _ProductTask(m, n, k, *a.stride(), *b.stride(), parts_m, parts_n, deep, room, 0, *pointers)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(addresses()[f"product_{ctype}"])
    function(ctypes.addressof(task), parallel())
    return out


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a product by our own code where it is large enough, else by torch's."""
    return multiply(a, b) if worth(a, b) else torch.mm(a, b)


@contextmanager
def own_products() -> Iterator[None]:
    """Have large products of matrices computed by our own code inside."""
    with _OwnProducts():  # type: ignore[no-untyped-call]
        yield


class _OwnProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and worth(*args):
            return multiply(*args)
        return func(*args, **(kwargs or {}))


def worth(a: Tensor, b: Tensor) -> bool:
    """Say whether a product is large, and of plain numbers."""
    plain = all(type(part) in (Tensor, nn.Parameter) and part.device.type == "cpu" for part in (a, b))
    if not plain or a.dtype not in _TYPES or a.is_neg() or b.is_neg() or not (a.layout is b.layout is torch.strided):
        return False
    m, k, n = *a.shape, b.shape[1]
    return min(m, k, n) >= 8 and m * k * n >= _WORTH


def _parts(m: int, n: int, threads: int) -> tuple[int, int]:
    """Return into how many parts rows and columns are cut, so that the parts are as square as can be."""
    ways = [(threads // across, across) for across in range(1, threads + 1) if threads % across == 0]
    return min(ways, key=lambda way: math.ceil(m / way[0]) + math.ceil(n / way[1]))


def _crowded(a: Tensor) -> bool:
    """Say whether a left factor lies by columns that fall on the same few sets of a cache."""
    return a.stride(0) == 1 and a.stride(1) * a.element_size() % 2048 == 0


def _address(found: ctypes.CDLL, name: str) -> int:
    return int(ctypes.cast(getattr(found, name), ctypes.c_void_p).value or 0)


@lru_cache(maxsize=1)
def _processor() -> tuple[str, frozenset[str]]:
    """Return the maker and the abilities of the processor, as far as they are known."""
    info = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not info.exists():
        return "", frozenset()
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    named = {key.strip(): value for key, value in lines.items()}
    return named.get("vendor_id", "").strip(), frozenset(named.get("flags", "").split())
