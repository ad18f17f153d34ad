"""A recording on disk: a folder with an index, `recording.json`, and numbered safetensors files called shards.

A shard holds the runs that were waiting when it was written. Shards are written without copying their tensors, and
read without loading them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BadInput, RecordingFileError
from .recording import Recording
from .runs import RecordedRun, assemble, warn_and_go_on
from .trajectory import Trajectory

_TITLE = "recording.json"
_VERSION = 1
_ROOM = 4096  # the index has this length from the start, so that closing a recording works on a full disk
_SHARD_BYTES = 32 * 2**20  # how many bytes of runs wait before they are written as a shard

_KEY = "hiddenstate.recording"  # a safetensors file with this entry in its metadata is a shard

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


class Folder:
    """Writes a recording: takes runs and writes shards, so that memory stays bounded."""

    def __init__(self, path: str | PathLike[str], about: dict[str, Any]) -> None:
        """Begin a recording in a folder that does not contain one."""
        self.path = Path(path)
        self.stopped: str | None = None
        self._about = {"format": "hiddenstate.recording", "version": _VERSION, "closed": False, **about}
        self._waiting: list[RecordedRun] = []
        self._bytes = self._written = 0
        self._runs: dict[str, int] = {}
        self._begun: dict[str, int] = {}  # runs per track, including those of which only pieces are written
        self._started = self._flushed = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"to={os.fspath(self.path)!r} is a file, but a recording is a folder. Name a new one.")
        if (self.path / _TITLE).exists():
            raise BadInput(
                f"to={os.fspath(self.path)!r} holds another recording already, which is not written over. "
                f"Name a new folder, or remove this one."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._title()

    def _title(self) -> None:
        text = json.dumps({**self._about, "stopped": self.stopped}).encode()
        with open(self.path / _TITLE, "r+b" if (self.path / _TITLE).exists() else "wb") as file:
            file.write(text.ljust(_ROOM))

    def name_tracks(self, tracks: Iterable[str]) -> None:
        """Add these tracks to the index: some become known only when the model is called."""
        self._about["tracks"] = list(tracks)
        self._title()

    @property
    def counts(self) -> dict[str, int]:
        """The number of runs of each track in this folder."""
        return dict(self._runs)

    def add(self, run: RecordedRun, *, last: bool = True) -> None:
        """Add a run, or with `last=False` a piece of a run that continues."""
        if self.stopped is not None:
            return
        if run.number is None:  # otherwise pieces of it were written before, and other runs may have begun since
            run.number = self._begun.get(run.track, 0)
            self._begun[run.track] = run.number + 1
        if last:
            self._runs[run.track] = self._runs.get(run.track, 0) + 1
        self._bytes += run.settle().nbytes
        self._waiting.append(run)
        # If the process is killed, at most a hundredth of the recording is lost; and a long one makes no excess of
        # files.
        age = time.monotonic() - self._flushed
        if not self._written or self._bytes >= _SHARD_BYTES or age > 0.2 + 0.01 * (self._flushed - self._started):
            self.flush()

    def flush(self) -> None:
        """Write the runs that are waiting."""
        if not self._waiting or self.stopped is not None:
            return
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        tensors: dict[str, Tensor] = {}
        note = []
        for run in waiting:
            prefix = f"{run.track}/{run.number}/{run.piece}/"
            tensors |= {prefix + name: value for name, value in run.entries().items()}
            note.append({"track": run.track, "run": run.number, "piece": run.piece, "kind": run.kind})
        try:
            write_shard(self.path / f"{self._written:06d}.safetensors", tensors, note)
        except OSError as error:
            self._stop(waiting[0], error)
            return
        self._written += 1
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write the rest, and mark the recording as complete."""
        self.flush()
        self._about["closed"] = True
        with contextlib.suppress(OSError):  # on a full disk, the index keeps saying that the recording was not closed
            self._title()
            for path in self.path.iterdir():
                handle = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)

    def _stop(self, run: RecordedRun, error: OSError) -> None:
        self.stopped = (
            f"the recording stops before run {run.number} of {run.track!r}: {error.strerror or error} in "
            f"{os.fspath(self.path)}. What was written before is whole; the model runs on unrecorded."
        )
        with contextlib.suppress(OSError):
            self._title()
        warn_and_go_on(self.stopped)


class Loaded(Recording):
    """A recording that is read from disk when its values are used."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """Read the index and the headers of the shards."""
        self.path = Path(path)
        about = _about(self.path)
        self.every = int(about["every"])
        self._names = tuple(about["tracks"])
        files = sorted(self.path.glob("*.safetensors"))
        self._pieces: dict[str, list[list[tuple[Shard, dict[str, Any]]]]] = {}
        for file in files:
            shard = Shard.open(file)
            for piece in shard.note:
                runs = self._pieces.setdefault(piece["track"], [])
                if piece["run"] >= len(runs):
                    runs.append([])
                runs[piece["run"]].append((shard, piece))
        self.stopped = about.get("stopped")
        if self.stopped is None and not about["closed"]:
            self.stopped = "the recording was not closed: what follows was flushed before its process ended"

    def _tracks(self) -> dict[str, int]:
        return {track: len(self._pieces[track]) for track in self._names if track in self._pieces}

    def _known(self) -> tuple[str, ...]:
        return self._names

    def _load(self, track: str, first: int | None = None) -> list[Trajectory]:
        return [self._run(track, pieces) for pieces in self._pieces.get(track, [])[:first]]

    def _run(self, track: str, pieces: list[tuple[Shard, dict[str, Any]]]) -> Trajectory:
        read = [_entries(shard, piece) for shard, piece in pieces]
        lengths = _joined_rows([entries.pop("lengths") for entries in read])
        initial = {n.partition(".")[2]: read[0].pop(n) for n in list(read[0]) if n.startswith("initial.")}
        names = [name for name in read[0] if all(name in entries for entries in read)]
        values = {name: _joined([entries[name] for entries in read], len(lengths)) for name in names}
        kind = pieces[0][1]["kind"]
        return assemble(values, initial, lengths=lengths, every=self.every, track=track, kind=kind)


def _about(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"there is no folder {os.fspath(path)}")
    try:
        about: dict[str, Any] = json.loads((path / _TITLE).read_bytes())
        if about["format"] != "hiddenstate.recording":
            raise ValueError(f"format {about['format']!r}")
        if about["version"] != _VERSION:
            raise RecordingFileError(
                f"{os.fspath(path)} has version {about['version']} of the recording format, but this library reads "
                f"version {_VERSION}. A newer hiddenstate wrote it: upgrade to read it."
            )
        _ = about["every"], about["tracks"], about["closed"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RecordingFileError):
            raise
        raise RecordingFileError(
            f"{os.fspath(path)} holds no recording: its {_TITLE} is missing or damaged ({error}). "
            f"A recording is the whole folder that hs.record(..., to=folder) wrote."
        ) from error
    return about


def _entries(shard: Shard, piece: dict[str, Any]) -> dict[str, Tensor]:
    prefix = f"{piece['track']}/{piece['run']}/{piece['piece']}/"
    return {name.removeprefix(prefix): shard.read(name) for name in shard.entries if name.startswith(prefix)}


def _joined(pieces: list[Tensor], batch: int) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([torch.nn.functional.pad(p, (0, 0, 0, batch - p.shape[1])) for p in pieces])


def _joined_rows(pieces: list[Tensor]) -> Tensor:
    batch = max(len(piece) for piece in pieces)
    return torch.stack([torch.nn.functional.pad(piece, (0, batch - len(piece))) for piece in pieces]).sum(0)


def write_shard(path: Path, tensors: Mapping[str, Tensor], note: Any) -> None:
    """Write tensors and a note to a file that appears only when it is complete."""
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(note)}}
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
    while view:  # one write may take only a part, as when a disk fills up
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
    """One file of a recording; only its header is in memory."""

    path: Path
    note: Any
    entries: dict[str, dict[str, Any]]
    start: int  # the offset at which the data begin

    @staticmethod
    def open(path: Path) -> Shard:
        """Read a file's header, and check that the file is complete."""
        size = path.stat().st_size
        try:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > size:
                    raise ValueError(f"its header would be {length} bytes long, but the file has {size}")
                header = json.loads(file.read(length))
            note = json.loads(header.pop("__metadata__")[_KEY])
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
        """Return a tensor that maps the file; changes to it stay in memory."""
        entry = self.entries[name]
        dtype, (first, last) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        if first == last:
            return torch.empty(entry["shape"], dtype=dtype)
        raw = np.memmap(self.path, np.uint8, "c", self.start + first, (last - first,))
        return torch.from_numpy(raw).view(dtype).view(entry["shape"])
