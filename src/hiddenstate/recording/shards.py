"""Safetensors files, written without a copy and read without loading: pieces of a recording on disk."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import RecordingFileError

KEY = "hiddenstate.recording"  # the metadata entry that makes a safetensors file one of ours

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def write(path: Path, tensors: Mapping[str, Tensor], note: Any) -> None:
    """Write tensors and a note to a file that appears only when it is whole."""
    header: dict[str, Any] = {"__metadata__": {KEY: json.dumps(note)}}
    values, end = [], 0
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        start, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": _dtype(name, value), "shape": list(value.shape), "data_offsets": [start, end]}
        values.append(value)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb", buffering=0) as file:
            _write(file, len(text).to_bytes(8, "little") + text)
            for value in values:
                if value.numel():
                    _write(file, value.view(-1).view(torch.uint8).numpy().data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _write(file: Any, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:  # a plain write may take less than it was given, as when a disk fills up
        view = view[file.write(view) :]


def _dtype(name: str, value: Tensor) -> str:
    try:
        return _NAMES[value.dtype]
    except KeyError:
        raise RecordingFileError(
            f"{name} is {value.dtype}, which safetensors cannot hold: record with dtype=."
        ) from None


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a recording, its header read and the rest left on disk."""

    path: Path
    note: Any
    entries: dict[str, dict[str, Any]]
    start: int  # where the data begins

    @staticmethod
    def open(path: Path) -> Shard:
        """Read a file's header, and check that the file is whole."""
        size = path.stat().st_size
        try:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > size:
                    raise ValueError(f"its header would be {length} bytes long, but the file has {size}")
                header = json.loads(file.read(length))
            note = json.loads(header.pop("__metadata__")[KEY])
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordingFileError(
                f"{path} is no file of a recording ({error}): it was cut short, damaged, or is something else. "
                f"Move it away to read the rest."
            ) from error
        if size < 8 + length + end:
            raise RecordingFileError(
                f"{path} was cut short: it has {size} bytes, but its header tells of {8 + length + end}. Usually the "
                f"machine went down while it was written, or a copy broke off. Move it away to read the rest."
            )
        return Shard(path, note, header, 8 + length)

    def read(self, name: str) -> Tensor:
        """Return a tensor that is read from disk as it is looked at; changes to it stay in memory."""
        entry = self.entries[name]
        dtype, (first, last) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        if first == last:
            return torch.empty(entry["shape"], dtype=dtype)
        raw = np.memmap(self.path, np.uint8, "c", self.start + first, (last - first,))
        return torch.from_numpy(raw).view(dtype).view(entry["shape"])
