"""What serving costs: the engine against bare calls, durable stores against memory, the server against others.

python benchmarks/serve.py [engine|stores|stream|fairness|sessions ...]
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hiddenstate.serve import Engine
from timing import compare, machine

SESSIONS, UNITS, PIECE, THREADS = 256, 256, 8, 32


def engine() -> None:
    """Inputs of one step, all sessions in one tick, with the memory store."""
    served, bare = (nn.LSTM(UNITS, UNITS, batch_first=True).eval() for _ in range(2))
    x = torch.randn(SESSIONS, UNITS)
    state = tuple(torch.zeros(1, SESSIONS, UNITS) for _ in range(2))
    rows = [(x[n].view(1, 1, -1), tuple(part[:, n : n + 1] for part in state)) for n in range(SESSIONS)]
    with Engine(served) as made, torch.no_grad():
        names, inputs = [made.open() for _ in range(SESSIONS)], list(x)

        async def gathered() -> None:
            await asyncio.gather(*(made.apush(name, row) for name, row in zip(names, inputs, strict=True)))

        async def nothing() -> None:
            async def one() -> None: ...

            await asyncio.gather(*(one() for _ in names))

        loop, pool = asyncio.new_event_loop(), ThreadPoolExecutor(THREADS)
        rivals = {
            "the bare model, one batched call": lambda: bare(x.unsqueeze(1), state),
            "engine.push_many": lambda: made.push_many(names, x),
            "engine.apush, one coroutine each": lambda: loop.run_until_complete(gathered()),
            f"engine.push, from {THREADS} threads": lambda: list(pool.map(made.push, names, inputs)),
            "the bare model, one call for each": lambda: [bare(step, own) for step, own in rows],
        }
        found = compare(rivals, rounds=15)
        overhead = {
            "as many coroutines that do nothing": lambda: loop.run_until_complete(nothing()),
            "as many calls of nothing in the threads": lambda: list(pool.map(lambda *given: None, names, inputs)),
        }
        alone_cost = compare(
            {"the bare model, one batched call": rivals["the bare model, one batched call"], **overhead}
        )
        pool.shutdown()
        pieces = torch.randn(SESSIONS, PIECE, UNITS)
        longer = {
            "the bare model, one batched call": lambda: bare(pieces, state),
            "engine.push_many": lambda: made.push_many(names, pieces),
        }
        pieced = compare(longer, rounds=15)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that processor time is work, and not one thread's waiting for the other
        alone = compare(dict(list(rivals.items())[:3]), rounds=31, clock=time.process_time)
        torch.set_num_threads(threads)
        loop.close()
    print(f"{SESSIONS} sessions, LSTM-{UNITS}, one step each\n{found}")
    ratios = found.ratios
    print(f"engine against the bare batched call: {1 / ratios['engine.push_many']:.2f} of its throughput (target 0.7)")
    print(f"coroutines: {1 / ratios['engine.apush, one coroutine each']:.2f} (target 0.5)")
    print(f"{THREADS} threads: {1 / ratios[f'engine.push, from {THREADS} threads']:.2f} (target 0.25)")
    print(f"{SESSIONS} coroutines and calls by themselves\n{alone_cost}")
    print(f"push_many in processor time, with one thread: {1 / alone.ratios['engine.push_many']:.2f}")
    print(f"coroutines so: {1 / alone.ratios['engine.apush, one coroutine each']:.2f}")
    each = ratios["the bare model, one call for each"]
    print(f"engine against one call for each: {each / ratios['engine.push_many']:.1f} times (target 15)")
    part = 1 / pieced.ratios["engine.push_many"]
    print(f"the same with pieces of {PIECE} steps: {part:.2f} of the bare batched call\n")


def stores() -> None:
    """States of 4 KiB, a tick of 64 and of 256 sessions, in memory and in SQLite with every commit on disk."""
    units = 512
    for count in (64, 256):
        x = torch.randn(count, units)
        with tempfile.TemporaryDirectory() as folder:
            engines = {
                "memory": Engine(nn.LSTM(units, units, batch_first=True)),
                "sqlite": Engine(nn.LSTM(units, units, batch_first=True), f"sqlite:///{folder}/sessions.db"),
            }
            names = {kind: [made.open() for _ in range(count)] for kind, made in engines.items()}
            rivals = {kind: partial(made.push_many, names[kind], x) for kind, made in engines.items()}
            found = compare(rivals, rounds=21)
            for made in engines.values():
                made.shutdown()
        print(f"{count} sessions in a tick, LSTM-{units}: states of {2 * 4 * units} bytes\n{found}")
        print(f"SQLite against memory: {1 / found.ratios['sqlite']:.2f} of its throughput (target 0.5)\n")


_SERVER = """
import sys
import torch, uvicorn
from fastapi import FastAPI, WebSocket
from torch import nn
port, kind, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
model = nn.LSTM(64, 64, batch_first=True).eval()

def step(data, state):
    with torch.no_grad():
        y, state = model(torch.frombuffer(bytearray(data[8:]), dtype=torch.float32).view(1, 1, 64), state)
    return data[:8] + y.numpy().tobytes(), state

if kind in ("memory", "sqlite"):
    from hiddenstate.serve import Engine, app
    store = "memory:" if kind == "memory" else f"sqlite:///{folder}/{port}.db"
    app = app(Engine(model, store), new_sessions=1e9)
else:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor
    app, states, pool = FastAPI(), {}, ThreadPoolExecutor(2)

    @app.websocket("/v1/sessions/{session}/stream")
    async def stream(socket: WebSocket, session: str):
        await socket.accept()
        await socket.send_text("{}")
        state = None
        while True:
            data = await socket.receive_bytes()
            if kind == "dict":  # the states of all sessions in a dict, the model called right there
                data, states[session] = step(data, states.get(session))
            elif kind == "connection":  # each connection has its state, and workers that call the model for it
                data, state = await asyncio.get_running_loop().run_in_executor(pool, step, data, state)
            await socket.send_bytes(data)

uvicorn.run(app, port=port, log_level="critical", ws_per_message_deflate=False)
"""


def stream() -> None:
    """Frames of one step through WebSockets against an echo server of the same stack, and against plain designs.

    The plain ones batch nothing and keep nothing: their states are gone with the process.
    """
    for connections, window, frames in ((64, 1, 60), (32, 8, 200)):
        kinds = ("echo", "memory", "sqlite", "dict", "connection")
        _streamed(kinds, connections=connections, window=window, frames=frames)


def _streamed(kinds: tuple[str, ...], *, connections: int, window: int, frames: int) -> None:
    from websockets.asyncio.client import connect

    frame = bytes(8) + torch.randn(64).numpy().tobytes()

    async def talk(port: int, name: int) -> None:
        address = f"ws://127.0.0.1:{port}/v1/sessions/{name}/stream?open=true"
        async with connect(address, compression=None, proxy=None) as client:
            await client.recv()
            for _ in range(window):
                await client.send(frame)
            for _ in range(frames - window):
                await client.recv()
                await client.send(frame)
            for _ in range(window):
                await client.recv()

    def run(port: int) -> Callable[[], None]:
        async def all_of_them() -> None:
            tasks: list[Awaitable[None]] = [talk(port, name) for name in range(connections)]
            await asyncio.gather(*tasks)

        return lambda: asyncio.run(all_of_them())

    with tempfile.TemporaryDirectory() as folder:
        ports = {kind: _free_port() for kind in kinds}
        servers = {
            kind: subprocess.Popen([sys.executable, "-c", _SERVER, str(port), kind, folder])
            for kind, port in ports.items()
        }
        try:
            for port in ports.values():
                _wait_for(port)
            found = compare({kind: run(port) for kind, port in ports.items()}, rounds=9)
            spent = {kind: _processor_seconds(server.pid) for kind, server in servers.items()}
        finally:
            for server in servers.values():
                server.terminate()
                server.wait()
    loop = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"
    print(f"{connections} WebSockets, {frames} frames each, {window} under way, LSTM-64, {loop} in the server\n{found}")
    for kind in kinds[1:]:
        work = spent[kind] / spent["echo"]
        print(f"{kind}: {1 / found.ratios[kind]:.2f} of the echo's throughput, {work:.1f} times its processor time")
    print()


def fairness() -> None:
    """How long a polite caller waits for its answers while another one floods the engine."""
    count, rounds = 2000, 60
    x = torch.randn(UNITS)
    with Engine(nn.LSTM(UNITS, UNITS, batch_first=True), max_batch=64) as made:

        async def measured(flood: Callable[[], Awaitable[None]] | None) -> list[float]:
            task = None if flood is None else asyncio.ensure_future(flood())
            await asyncio.sleep(0.2)
            times = []
            for _ in range(rounds):
                began = time.perf_counter()
                await made.apush("polite:a", x)
                times.append(time.perf_counter() - began)
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            return sorted(times)

        async def many_sessions() -> None:
            async def pushing(name: str) -> None:
                while True:
                    await made.apush(name, x)

            await asyncio.gather(*(pushing(f"flood:{n}") for n in range(count)))

        async def one_session() -> None:
            async def pushing() -> None:
                while True:
                    await made.apush("flood:0", x)

            await asyncio.gather(*(pushing() for _ in range(count)))

        async def main() -> None:
            for n in range(count):
                await made.aopen(f"flood:{n}")
            await made.aopen("polite:a")
            alone = await measured(None)
            print(f"a polite caller, LSTM-{UNITS}, ticks of up to 64: alone {1e3 * alone[rounds // 2]:.1f} ms")
            for name, flood in (("sessions", many_sessions), ("inputs to one session", one_session)):
                times = await measured(flood)
                tick = made.stats().tick_seconds
                print(
                    f"while another has {count} {name} waiting, {count / 64:.0f} ticks of {1e3 * tick:.1f} ms: "
                    f"median {1e3 * times[rounds // 2]:.1f} ms, longest {1e3 * times[-1]:.1f} ms"
                )

        asyncio.run(main())
    print()


def sessions() -> None:
    """A hundred thousand sessions in SQLite, a thousand states at hand."""
    count, at_once = 100_000, 1000
    model = nn.LSTM(128, 128, batch_first=True)
    before = _resident()
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_sessions": 1000, "max_batch": at_once}
        with Engine(model, f"sqlite:///{folder}/sessions.db", **options) as made:
            began = time.perf_counter()

            async def opened(begin: int) -> list[str]:
                return await asyncio.gather(*(made.aopen(f"{n:06d}") for n in range(begin, begin + at_once)))

            for begin in range(0, count, at_once):
                made.push_many(asyncio.run(opened(begin)), torch.randn(at_once, 128))
            seconds = time.perf_counter() - began
            grown = (_resident() - before) / 2**20
            hot = made.hot
            size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 2**20
    print(
        f"{count:,} sessions opened and fed in {seconds:.0f} s, {hot} states at hand: {grown:.0f} MB of memory above "
        f"the model (target 500), {size:.0f} MB of disk\n"
    )


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("the server did not start")


def main() -> None:
    """Run the parts that are named, or all."""
    parts = {part.__name__: part for part in (engine, stores, stream, fairness, sessions)}
    print(machine(), "\n")
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
