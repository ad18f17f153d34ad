"""C source to a function in memory, kept on disk for the next time."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .values import Unsupported

_FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-w")


def load(source: str) -> Any:
    """Return the function `run` of a C file, compiled now or at an earlier time."""
    function = library(source).run
    function.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    return function


def library(source: str) -> ctypes.CDLL:
    """Return a C file as a library in memory, compiled now or at an earlier time."""
    name = hashlib.sha256("\0".join([source, _machine(), *_FLAGS]).encode()).hexdigest()[:32]
    try:
        return _library(source, _folder() / f"{name}.so")
    except OSError:  # a home that cannot be written to, or from which nothing may be run
        try:
            return _library(source, _private() / f"{name}.so")
        except OSError as error:
            raise Unsupported(f"compiled code can be kept nowhere: {error}") from error


def _library(source: str, path: Path) -> ctypes.CDLL:
    if not path.exists():
        _compile(source, path)
    return ctypes.CDLL(str(path))


@lru_cache(maxsize=1)
def torch_products() -> tuple[int, int]:
    """Return the addresses of torch's own matrix products, single and double."""
    try:
        found = [ctypes.cast(getattr(torch_library(), f"{kind}gemm_"), ctypes.c_void_p).value for kind in "sd"]
    except AttributeError as error:
        raise Unsupported("torch's library hands out no matrix product") from error
    return int(found[0] or 0), int(found[1] or 0)


@lru_cache(maxsize=1)
def torch_library() -> ctypes.CDLL:
    """Return the library that torch computes with."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        if (folder / name).exists():
            return ctypes.CDLL(str(folder / name))
    raise Unsupported("torch's library was not found")


def _compile(source: str, path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform == "win32":
        raise Unsupported("there is no C compiler")
    with tempfile.TemporaryDirectory() as folder:
        code, made = Path(folder) / "loop.c", Path(folder) / "loop.so"
        code.write_text(source)
        command = [*compiler.split(), *_FLAGS, str(code), "-o", str(made), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Unsupported(f"the C compiler refused: {done.stderr.strip()[:500]}")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Beside its place first: another process may be looking for a whole file.
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        shutil.copy(made, beside)
        os.replace(beside, path)


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "hiddenstate" / "loops"
    except RuntimeError:  # no home at all
        return _private()


@lru_cache(maxsize=1)
def _private() -> Path:
    return Path(tempfile.mkdtemp(prefix="hiddenstate-"))


@lru_cache(maxsize=1)
def _machine() -> str:
    # Code for one processor may not run on another that shares the home folder.
    info = Path("/proc/cpuinfo")
    flags = (
        [line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))]
        if info.exists()
        else []
    )
    return f"{platform.machine()} {platform.processor()} {flags[:1]}"
