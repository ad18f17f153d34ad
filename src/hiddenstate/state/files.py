"""States on disk: safetensors, the batch axes in the metadata, never pickle."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import StateFileError

if TYPE_CHECKING:
    from .value import State

_KEY = "hiddenstate.state"  # the metadata entry that makes a safetensors file one of ours
_VERSION = 1


def write(path: str | PathLike[str], parts: Mapping[str, Tensor], axes: Mapping[str, int]) -> None:
    """Write parts and axes to a temporary file next to `path`, then rename it."""
    target = Path(path)
    data = to_bytes(parts, axes, name=str(target))
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(target.parent)


def to_bytes(parts: Mapping[str, Tensor], axes: Mapping[str, int], *, name: str = "the state") -> bytes:
    """Return the content of a state's file."""
    header = {"version": _VERSION, "parts": [[part, axes[part]] for part in parts]}
    # Cloned, since safetensors refuses tensors that share memory, as views of one buffer do.
    tensors = {part: tensor.detach().to("cpu", copy=True).contiguous() for part, tensor in parts.items()}
    try:
        return safetensors.torch.save(tensors, {_KEY: json.dumps(header)})
    except (KeyError, SafetensorError, RuntimeError, ValueError) as error:
        kinds = ", ".join(f"{part} {tensor.dtype}" for part, tensor in parts.items())
        raise StateFileError(f"{name} cannot be written as safetensors ({kinds}): {error}") from error


def load(path: str | PathLike[str], *, device: str | torch.device = "cpu") -> State:
    """Read a State that `State.save` wrote.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> State({"h": torch.ones(2, 3)}).save(path)
    >>> load(path)
    State(h (2, 3) float32; batch of 2)
    """
    with open(path, "rb") as file:  # a missing file is Python's own FileNotFoundError
        _refuse_pickle(path, file.read(8))
    try:
        with safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
            header = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise StateFileError(
            f"{os.fspath(path)} is not a whole safetensors file ({error}). It was cut short, damaged, "
            f"or is something else; State.save writes files that are never half-written."
        ) from error
    return _assemble(path, header, tensors)


def _assemble(path: str | PathLike[str], header: str | None, tensors: dict[str, Tensor]) -> State:
    from .value import State

    if header is None:
        raise StateFileError(
            f"{os.fspath(path)} is a safetensors file, but not one of a state: it says nothing of batch axes. "
            f"If it holds weights, load it with safetensors.torch.load_file."
        )
    try:
        content = json.loads(header)
        if content["version"] != _VERSION:
            raise StateFileError(
                f"{os.fspath(path)} has version {content['version']} of the state format, but this library reads "
                f"version {_VERSION}. A newer hiddenstate wrote it: upgrade to read it."
            )
        axes = {name: int(axis) for name, axis in content["parts"]}
        return State({name: tensors[name] for name in axes}, axes)
    except StateFileError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise StateFileError(f"{os.fspath(path)} has damaged metadata: {error}") from error


def _refuse_pickle(path: str | PathLike[str], head: bytes) -> None:
    if head[:2] == b"PK" or head[:1] == b"\x80":
        raise StateFileError(
            f"{os.fspath(path)} is a pickle (torch.save writes those), which may run code when opened: "
            f"it is not read here. Open it with torch.load(..., weights_only=True) and save it with State.save."
        )


def _mode(target: Path) -> int:
    # mkstemp makes private files; a state file should get the rights any other new file gets.
    with contextlib.suppress(FileNotFoundError):
        return target.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _sync_folder(folder: Path) -> None:
    # Without this the rename itself may be lost when power fails. Windows cannot open folders.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
