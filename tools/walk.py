"""Which files and functions of ours does one call pass through?

Six calls are traced: a chunk under `Carry`, a recorded call, an unroll by a schedule (when it is built, and when it is
cached), a diagnosis, and a WebSocket frame on its way to a SQLite file. Every function of `hiddenstate` is noted when
it is first entered, in all threads. Whoever reads along has to open these files.

    python tools/walk.py                  one line for each walk
    python tools/walk.py record frame     the functions of these walks, in order
"""

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

import hiddenstate as hs

PACKAGE = Path(hs.__file__).parent


class Walk:
    """Functions of ours in the order in which they were first entered, and how often each was."""

    def __init__(self) -> None:
        """Start with none."""
        self.calls: Counter[CodeType] = Counter()  # in order: a Counter keeps it

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is entered in this thread, and in those that were started with `_note` as their profile."""
        global _walk
        _walk = self
        sys.setprofile(_note)
        try:
            yield
        finally:
            sys.setprofile(None)
            _walk = None

    @property
    def functions(self) -> list[CodeType]:
        """Those that have a name, in order: a comprehension or a lambda is read with the function that it stands in."""
        return [code for code in self.calls if not code.co_name.startswith("<")]

    @property
    def files(self) -> list[str]:
        """The files, in order."""
        return list(dict.fromkeys(map(_file, self.calls)))

    @property
    def parts(self) -> str:
        """How many files of which part."""
        counts = Counter(file.partition("/")[0].removesuffix(".py") for file in self.files)
        return ", ".join(f"{part} {count}" for part, count in counts.most_common())


_walk: Walk | None = None


def _note(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    # Modules and class bodies are run by imports: they are read, but not on this way.
    if event == "call" and _walk is not None and code.co_flags & 0x2 and code.co_filename.startswith(str(PACKAGE)):
        _walk.calls[code] += 1


def _file(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(PACKAGE))


class Tagger(nn.Module):
    """A small model around torch's LSTM."""

    def __init__(self) -> None:
        """Make the layer and a head."""
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return two numbers for each step."""
        return self.head(self.lstm(x)[0])


class LeakyCell(nn.Module):
    """A cell of one's own, as small as it gets."""

    def __init__(self) -> None:
        """Make its two maps."""
        super().__init__()
        self.input_size, self.hidden_size = 3, 4
        self.inner, self.recurrent = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        return torch.tanh(self.inner(x) + self.recurrent(h))


def carried_call(walk: Walk) -> None:
    """The second chunk of a model whose state is carried."""
    model, x = Tagger(), torch.randn(4, 20, 3)
    with hs.Carry(model):
        model(x)
        with walk.noting():
            model(x)


def recorded_call(walk: Walk) -> None:
    """The second call of a model that is being recorded, and a look at its states."""
    model, x = Tagger(), torch.randn(4, 20, 3)
    with hs.record(model) as recording:
        model(x)
        with walk.noting():
            model(x)
            _ = recording.runs("lstm")[-1].h


def built_unroll(walk: Walk) -> None:
    """A cell that the fast engine meets for the first time."""
    cell, x = LeakyCell(), torch.randn(4, 20, 3)
    with walk.noting():
        hs.unroll(cell, x, engine="fast")


def cached_unroll(walk: Walk) -> None:
    """A cell whose schedule is there already."""
    cell, x = LeakyCell(), torch.randn(4, 20, 3)
    hs.unroll(cell, x, engine="fast")
    with walk.noting():
        hs.unroll(cell, x, engine="fast")


def diagnosis(walk: Walk) -> None:
    """All checks on a healthy model."""
    with walk.noting():
        hs.diagnose(Tagger(), torch.randn(4, 12, 3))


def websocket_frame(walk: Walk) -> None:
    """One input on an open stream, until its answer is there."""
    from websockets.sync.client import connect

    step = torch.randn(1, 3).numpy().tobytes()
    with _stream() as url, connect(url, proxy=None) as socket:
        socket.recv(timeout=10)  # what the stream tells of itself
        for number in (1, 2):  # the first one also loads what is loaded late
            with walk.noting() if number == 2 else nullcontext():
                socket.send(number.to_bytes(8, "little") + step)
                socket.recv(timeout=10)


@contextmanager
def _stream() -> Iterator[str]:
    """The address of a new session's stream, on a server in a thread of this process."""
    import uvicorn

    ready = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, *args: Any, **kwargs: Any) -> None:
            await super().startup(*args, **kwargs)
            ready.set()

    threading.setprofile(_note)  # for the threads of the engine and of the server
    with (
        tempfile.TemporaryDirectory() as folder,
        hs.serve.Engine(Tagger().eval(), f"sqlite:///{folder}/sessions.db") as engine,
    ):
        server = Server(uvicorn.Config(hs.serve.app(engine), port=0, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        ready.wait(20)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"ws://127.0.0.1:{port}/v1/sessions/{engine.open()}/stream"
        finally:
            server.should_exit = True
            thread.join(20)
            threading.setprofile(None)


WALKS: dict[str, Callable[[Walk], None]] = {
    "carry": carried_call,
    "record": recorded_call,
    "unroll-built": built_unroll,
    "unroll-cached": cached_unroll,
    "diagnosis": diagnosis,
    "frame": websocket_frame,
}


def main() -> None:
    """Print a table of all walks, or the steps of those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("walks", nargs="*", choices=[*WALKS, []], metavar="walk", help=", ".join(WALKS))
    chosen = parser.parse_args().walks
    torch.manual_seed(0)
    rows = []
    for name in chosen or WALKS:
        walk = Walk()
        WALKS[name](walk)
        rows.append((name, len(walk.files), len(walk.functions), sum(walk.calls.values()), walk.parts))
        if chosen:
            print(f"\n{name}: {WALKS[name].__doc__}\n")
            for code in walk.functions:
                print(f"{walk.calls[code]:7d}  {_file(code):36s}  {getattr(code, 'co_qualname', code.co_name)}")
    print("\n| walk | files | functions | calls | files by part |\n|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
