"""Compiling CUDA source to a kernel, with the compiler and the driver that torch comes with."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..native.values import Unsupported

_SHARED_LIMIT = 8  # the driver's number for the attribute of a function that allows it more shared memory


class Launchable:
    """A compiled kernel on one device, all of whose blocks run at the same time."""

    def __init__(self, source: str, device: torch.device, *, shared: int) -> None:
        """Compile and load it."""
        self._device, self._shared = device, shared
        key = (hashlib.sha256(source.encode()).hexdigest(), device)
        if key not in _functions:
            _functions[key] = _loaded(source, device, shared)
        self._function = _functions[key]

    def __call__(self, steps: int, tensors: Sequence[Tensor], *, grid: int, threads: int) -> None:
        """Run the kernel on the current stream."""
        values = [ctypes.c_long(steps), *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        with torch.cuda.device(self._device):
            # As a cooperative kernel: either all blocks get a place at once, or none, so none waits in vain.
            launch = _driver().cuLaunchCooperativeKernel
            _check(launch(self._function, grid, 1, 1, threads, 1, 1, self._shared, stream, pointers))


# By source and device. Once loaded, a kernel stays: some recorded graph may hold it, and it is small.
_functions: dict[tuple[str, torch.device], ctypes.c_void_p] = {}


def _loaded(source: str, device: torch.device, shared: int) -> ctypes.c_void_p:
    major, minor = torch.cuda.get_device_capability(device)
    image = compiled(source, f"sm_{major}{minor}")
    function, module, driver = ctypes.c_void_p(), ctypes.c_void_p(), _driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # makes sure that torch's context is the current one
        _check(driver.cuModuleLoadData(ctypes.byref(module), image))
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"run"))
        _check(driver.cuFuncSetAttribute(function, _SHARED_LIMIT, ctypes.c_int(shared)))
    return function


def compiled(source: str, architecture: str) -> bytes:
    """Return a kernel's machine code, or raise `Unsupported` where there is no compiler."""
    library, program = _compiler(), ctypes.c_void_p()
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"run.cu", 0, None, None))
    try:
        if library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            text = _fetched(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise Unsupported(f"its kernel does not compile: {text.decode(errors='replace')[:2000]}")
        return _fetched(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _fetched(size_of: Any, fetch: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(fetch(program, text))
    return text.raw


@lru_cache(maxsize=1)
def _compiler() -> ctypes.CDLL:
    """Return NVIDIA's runtime compiler, which comes with torch's builds for CUDA."""
    version = str(torch.version.cuda or "12").split(".")[0]
    folders = [Path(torch.__file__).parent / "lib", *(Path(entry) / "nvidia" for entry in sys.path if entry)]
    beside = [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("**/libnvrtc.so*"))]
    for name in (f"libnvrtc.so.{version}", *map(str, beside), "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise Unsupported("CUDA's runtime compiler was not found")


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unsupported("CUDA's driver was not found") from error


def _check(code: int) -> None:
    if code:
        raise Unsupported(f"CUDA answers with error {code}")
