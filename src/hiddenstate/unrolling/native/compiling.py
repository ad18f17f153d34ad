"""Compiling C source to a function in memory, with a cache on disk."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..cache_folder import cache_folder
from .values import Unsupported

_FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-w")
_MOST_BYTES = 2**28  # of compiled code that are kept


def load(source: str) -> Any:
    """Return the function `run` of a C file, compiled now or at an earlier time."""
    function = library(source).run
    function.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    return function


def library(source: str) -> ctypes.CDLL:
    """Return a C file as a library in memory, compiled now or at an earlier time."""
    key = [source, _machine(), _compiler_seen(_compiler()), *_FLAGS]
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]
    try:
        return _library(source, cache_folder() / "loops" / f"{name}.so")
    except (OSError, RuntimeError):  # no home, or one that cannot be written to, or from which nothing may be run
        try:
            return _library(source, _private() / f"{name}.so")
        except OSError as error:
            raise Unsupported(f"compiled code can be kept nowhere: {error}") from error


def _library(source: str, path: Path) -> ctypes.CDLL:
    if path.parent.exists() and not _is_own(path.parent):
        raise PermissionError(f"{path.parent} belongs to others, or others may write to it")
    if path.exists():
        try:
            found = ctypes.CDLL(str(path)) if _is_own(path) else None
        except OSError:  # cut short, by a disk that was full
            found = None
        if found is not None:
            with suppress(OSError):
                os.utime(path)  # what is used stays longest
            return found
        path.unlink()
    _compile(source, path)
    return ctypes.CDLL(str(path))


def _is_own(path: Path) -> bool:
    """Say whether nobody else may have put code there, which is going to be run."""
    seen = path.stat()
    return seen.st_uid == os.getuid() and not seen.st_mode & 0o022


def _make_room(folder: Path) -> None:
    """Remove what was not used for longest, beyond what may be kept."""
    found = sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    kept = 0
    for path in found:
        kept += path.stat().st_size
        if kept > _MOST_BYTES:
            path.unlink()


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
    compiler = _compiler()
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
        # Beside its place first: another thread or process may be looking for a whole file. Whoever is last wins, and
        # both have written the same, so nobody has to wait for a lock.
        handle, beside = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        os.close(handle)
        try:
            shutil.copyfile(made, beside)
            os.chmod(beside, 0o700)
            os.replace(beside, path)
        finally:
            Path(beside).unlink(missing_ok=True)
        with suppress(OSError):  # another process may be at it too
            _make_room(path.parent)


def _compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@lru_cache(maxsize=8)
def _compiler_seen(compiler: str | None) -> str:
    """Return which compiler it is: another one by the same name is another."""
    found = shutil.which(compiler.split()[0]) if compiler else None
    if found is None:
        return str(compiler)
    seen = os.stat(found)
    return f"{compiler} {os.path.realpath(found)} {seen.st_size} {seen.st_mtime_ns}"


@lru_cache(maxsize=1)
def _private() -> Path:
    """Return a folder for this process alone, which goes with it."""
    folder, owner = Path(tempfile.mkdtemp(prefix="hiddenstate-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


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
