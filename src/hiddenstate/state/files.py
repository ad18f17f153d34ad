"""States as bytes and as files: safetensors, with batch axes and checksums in the metadata. Nothing is pickled.

This file deals in named tensors and their batch axes; `value.py` makes a State of them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import zlib
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import StateFileError

if TYPE_CHECKING:
    from .value import State

_KEY = "hiddenstate.state"  # a safetensors file with this entry in its metadata holds a State
_VERSION = 1


def to_bytes(state: State) -> bytes:
    """Return the content of the safetensors file that `state.save` writes."""
    try:
        tensors = _storable(state)
        parts = [_entry(name, axis, state[name], tensors[name]) for name, axis in state.batch_axis.items()]
        return safetensors.torch.save(tensors, {_KEY: json.dumps({"version": _VERSION, "parts": parts})})
    except (KeyError, SafetensorError, RuntimeError, TypeError, ValueError) as error:
        raise StateFileError(f"{state!r} cannot be written as safetensors: {error}") from error


def parts_and_axes(data: bytes, source: str) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the tensors and batch axes in bytes that `to_bytes` wrote, with checksums verified.

    Errors call the bytes by the name of their `source`.
    """
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length]).get("__metadata__", {}).get(_KEY)
    # Any error that safetensors or torch raises in here means that the data are damaged.
    except (SafetensorError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _unreadable(data, source, error) from error
    if header is None:
        raise StateFileError(
            f"{source} is in safetensors format, but does not hold a state: its metadata name no batch axes. "
            f"If it holds weights, load it with safetensors.torch.load_file."
        )
    return _assemble(source, header, tensors)


def read(path: str | PathLike[str]) -> bytes:
    """Return the content of a file. A missing file raises Python's own FileNotFoundError."""
    if os.path.isdir(path):
        raise StateFileError(f"{os.fspath(path)} is a folder, but a state is one file. Name the file in it.")
    return Path(path).read_bytes()


def save(state: State, path: str | PathLike[str]) -> None:
    """Write `state` to a temporary file in the same folder, then rename it to `path`."""
    data = to_bytes(state)
    target = Path(os.path.realpath(path))  # follow symbolic links: a rename would replace the link itself
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "A state is saved to a file, but this is a folder", os.fspath(path))
    temporary = target.with_name(f".{target.name[:40]}.{os.urandom(8).hex()}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))  # keep the permissions of the file it replaces
        os.replace(temporary, target)
    except OSError as error:
        reason = f"{error.strerror or error} (the state was not saved; an older file there is untouched)"
        raise OSError(error.errno, reason, os.fspath(path)) from error
    finally:
        with contextlib.suppress(OSError):  # after the rename, the temporary file is gone
            os.unlink(temporary)
    _sync_folder(target.parent)


def _storable(state: State) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, part in state.items():
        if name == "__metadata__":
            raise ValueError("the name '__metadata__' is taken by the format itself; name the part otherwise")
        tensor = part.detach().cpu().resolve_conj().resolve_neg()
        # Complex parts are stored as pairs of real numbers: safetensors does not know every complex dtype.
        tensor = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()
        # Safetensors refuses tensors that share memory: two parts in one buffer, or one tensor under two names.
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return tensors


def _entry(name: str, axis: int, part: Tensor, stored: Tensor) -> dict[str, Any]:
    """Return a part's metadata. The checksum covers name, axis, dtype and shape as well as the bytes."""
    entry = {"name": name, "axis": axis, "complex": part.is_complex()}
    checksum = checksum_of_kind(entry, stored)
    if stored.numel():
        checksum = zlib.crc32(stored.reshape(-1).unsqueeze(-1).view(torch.uint8).numpy().data, checksum)
    return entry | {"crc32": checksum}


def checksum_of_kind(entry: dict[str, Any], stored: Tensor) -> int:
    """Return the checksum of a part's name, axis, dtype and shape; the checksum of its bytes continues from it."""
    return zlib.crc32(f"{entry} {stored.dtype} {tuple(stored.shape)}".encode())


def _assemble(source: str, header: str, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    try:
        content = json.loads(header)
        version = content["version"]
        if version != _VERSION:
            raise StateFileError(
                f"{source} has version {version!r} of the state format, but this library reads version {_VERSION}. "
                f"If a newer hiddenstate wrote it, upgrade to read it."
            )
        axes = {entry["name"]: entry["axis"] for entry in content["parts"]}
        if axes.keys() != tensors.keys():
            raise ValueError(f"it lists the parts {list(axes)}, but holds {sorted(tensors)}")
        return {entry["name"]: _intact(entry, tensors[entry["name"]]) for entry in content["parts"]}, axes
    except StateFileError:
        raise
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise damaged(source, error) from error


def damaged(source: str, error: Exception) -> StateFileError:
    """Return the error for a file whose content contradicts its own metadata."""
    return StateFileError(
        f"{source} is damaged ({type(error).__name__}: {error}), so the state in it cannot be trusted. "
        f"Go back to an older copy."
    )


def _intact(entry: dict[str, Any], stored: Tensor) -> Tensor:
    part = torch.view_as_complex(stored) if entry["complex"] else stored
    if _entry(entry["name"], entry["axis"], part, stored) != entry:
        raise ValueError(f"part {entry['name']!r} does not have the checksum written with it")
    return part


def _unreadable(data: bytes, source: str, error: Exception) -> StateFileError:
    if not data:
        return StateFileError(f"{source} is empty: nothing was ever written, or the disk was full.")
    # Ask only after safetensors has refused the data: the length at its beginning may look like a pickle's first byte.
    if data[:2] == b"PK" or data[:1] == b"\x80":
        return StateFileError(
            f"{source} is a pickle or a zip (torch.save writes those), which may run code when opened: "
            f"it is not read here. Open it with torch.load(..., weights_only=True) and save it with State.save."
        )
    return StateFileError(
        f"{source} is not a whole safetensors file ({error}). It was cut short, damaged, "
        f"or is something else; State.save never leaves a half-written file."
    )


def _sync_folder(folder: Path) -> None:
    # Without this, a power failure may undo the rename. Windows cannot open folders.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
