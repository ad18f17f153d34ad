"""Callers and faults at random, by seed: engines and servers are driven, and what callers saw has to be explained."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sqlite3
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from hiddenstate.errors import (
    ModelFailed,
    Overloaded,
    SequenceGap,
    ServeError,
    SessionExists,
    SessionLost,
    StoreFailed,
)
from hiddenstate.serve import Client, Engine
from hiddenstate.serve.stores import Store, open_store
from hiddenstate.state import from_bytes
from tests.support.deadline import let_pass, wait_until
from tests.support.history import UNKNOWN, Action, Event, Rules, explain
from tests.support.models import Deep
from tests.support.redis import RedisServer, free_port
from tests.support.web import Nursery, kill, runs

_WEIGHTS = {"push": 70, "info": 8, "open": 7, "reset": 4, "fork": 4, "close": 3, "export": 3, "import": 1}
_FAMILIES, _CALLERS, _ACTIONS = 3, 3, 30  # families of sessions, callers of each, what each of them asks in a round
_HUNG = 90.0  # seconds
LATER: Any = "later"  # in place of an outcome: it may yet take place
REFUSED: Any = "refused"  # it is said not to have taken place


class Fleet:
    """What is driven: something that does actions, and faults by name that last until their function returns."""

    faults: dict[str, Callable[[random.Random], None]]
    pause = 0.005  # seconds after which a caller asks again

    def __init__(self) -> None:
        self._files: dict[int, bytes] = {}  # exported ones, by the id of what stands in them
        self.marks: list[Event] = []  # what was done to the whole store in this round: copied, set back

    def any_of_them(self, chance: random.Random) -> Any:
        """Return an engine, or a client of a server."""
        raise NotImplementedError

    def push(self, asked: Any, action: Action, chance: random.Random) -> Any:
        """Have an engine or client apply an input."""
        raise NotImplementedError

    def ask(self, action: Action, chance: random.Random) -> Any:
        """Do an action and return its answer: an engine and a client are asked in the same way."""
        asked, session = self.any_of_them(chance), action.session
        match action.kind:
            case "push":
                return self.push(asked, action, chance)
            case "open" | "reset" | "close":
                getattr(asked, action.kind)(session)
            case "fork":
                asked.fork(session, action.target)
            case "info":
                info = asked.info(session)
                return info.seq, info.steps
            case "export":
                file = asked.export(session)
                found = _flattened(file)
                self._files[id(found[2])] = file
                return found
            case "import":
                asked.import_(session, self._files[id(action.exported[2])])
        return "done"


@dataclass
class Report:
    """What was asked and done."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    orders: int = 0  # states that the search for explanations went through

    def __str__(self) -> str:
        done = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return f"{self.rounds} rounds; {done}; faults: {faults or 'none'}"


def drive(fleet: Fleet, *, seed: int, seconds: float) -> Report:
    """Ask and disturb at random for some seconds, and until each fault has come, and explain all that callers saw.

    Raises AssertionError where that is impossible, with the events. The seed fixes what is asked and which faults come;
    threads and processes go their own way all the same.
    """
    report = Report()
    end = time.monotonic() + seconds
    faults = _shuffled(sorted(fleet.faults), random.Random(seed))
    while time.monotonic() < end or set(report.faults) != set(fleet.faults):
        try:
            _round(fleet, faults, random.Random(f"{seed} {report.rounds}"), report)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, round {report.rounds}: {error}") from error
        report.rounds += 1
    return report


def _shuffled(names: list[str], chance: random.Random) -> Iterator[str]:
    """Yield all names in random order, again and again."""
    while True:
        yield from chance.sample(names, len(names))


def _round(fleet: Fleet, faults: Iterator[str], chance: random.Random, report: Report) -> None:
    families: dict[str, list[Event]] = defaultdict(list)
    fleet.marks.clear()
    errors: list[BaseException] = []
    callers = [
        threading.Thread(
            target=_call, args=(fleet, name, random.Random(chance.random()), families[name], errors), daemon=True
        )
        for name in [uuid.uuid4().hex[:8] for _ in range(_FAMILIES)]
        for _ in range(_CALLERS)
    ]
    for caller in callers:
        caller.start()
    end = time.monotonic() + _HUNG
    while any(caller.is_alive() for caller in callers):
        name = next(faults)
        fleet.faults[name](chance)
        report.faults[name] += 1
        if time.monotonic() > end:
            raise AssertionError(f"callers got no answer for {_HUNG} s")
        let_pass(0.02 * chance.random())
    for error in errors:
        raise error
    for events in families.values():
        report.outcomes.update("unknown" if e.outcome is UNKNOWN else e.action.kind for e in events)
        report.outcomes.update(f"-> {e.outcome}" for e in events if e.outcome in ("lost", "gap", "failed", "exists"))
        report.orders += explain([*events, *fleet.marks], Rules())


def _call(fleet: Fleet, family: str, chance: random.Random, events: list[Event], errors: list[BaseException]) -> None:
    numbers: dict[str, int] = {}
    exported: list[tuple[int, int, Tensor]] = []
    action, outcome = None, None
    try:
        for _ in range(_ACTIONS):
            missing = outcome == "lost" and chance.random() < 0.7
            action = Action("open", action.session) if missing else _action(family, chance, numbers, exported)
            event = Event(action, time.monotonic())
            events.append(event)
            outcome = _outcome(fleet, action, chance)
            if outcome is not LATER:
                event.ended, event.outcome = time.monotonic(), outcome
            if outcome is REFUSED:
                events.remove(event)
            if outcome in (LATER, UNKNOWN, REFUSED):
                let_pass(fleet.pause)  # as a caller would, lest all be asked in vain
            if action.kind == "push" and isinstance(outcome, Tensor) and action.seq is not None:
                numbers[action.session] = action.seq
            elif action.kind == "info" and isinstance(outcome, tuple):
                numbers[action.session] = outcome[0]
            elif action.kind == "export" and isinstance(outcome, tuple):
                exported.append(outcome)
    except BaseException as error:
        errors.append(error)


def _action(
    family: str, chance: random.Random, numbers: dict[str, int], exported: list[tuple[int, int, Tensor]]
) -> Action:
    names = [f"{family}-{letter}" for letter in "ab"]
    session = chance.choice(names)
    (kind,) = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    if kind == "push":
        x = torch.randn(chance.randint(1, 3), 3, generator=torch.Generator().manual_seed(chance.getrandbits(40)))
        if chance.random() < 0.03:
            x[-1, 0] = torch.nan
        known = numbers.get(session, 0)
        # Most often the next one; now and then a repetition, a gap, or whichever comes next.
        seq = chance.choice([known + 1, known + 1, known + 1, None, max(1, known - chance.randint(0, 9)), known + 3])
        return Action("push", session, x=x, seq=seq)
    if kind == "fork":
        return Action("fork", session, target=chance.choice(names))
    if kind == "import" and exported:
        return Action("import", session, exported=chance.choice(exported))
    return Action("open" if kind == "import" else kind, session)


def _outcome(fleet: Fleet, action: Action, chance: random.Random) -> Any:
    try:
        return fleet.ask(action, chance)
    except SessionLost as error:
        if error.reason != "unknown":
            raise
        return "lost"
    except SessionExists:
        return "exists"
    except SequenceGap as error:
        if action.seq is None and "set back to an older copy" in str(error):
            return REFUSED  # which is told once
        return "gap"
    except ModelFailed:
        return "failed"
    except Overloaded:
        return REFUSED
    except StoreFailed:
        return UNKNOWN
    except (TimeoutError, CancelledError):
        return LATER
    except ServeError as error:
        if type(error) is not ServeError:
            raise
        if isinstance(error.__cause__, httpx.ConnectError):
            return REFUSED  # there was nobody to send it to
        return LATER if isinstance(error.__cause__, httpx.TransportError) else UNKNOWN


def _flattened(file: bytes) -> tuple[int, int, Tensor]:
    """Return what stands in an exported file."""
    length = int.from_bytes(file[:8], "little")
    facts = json.loads(json.loads(file[8 : 8 + length])["__metadata__"]["hiddenstate.session"])
    state = from_bytes(file)
    parts = [state[name].flatten() for name in ("encoder.lstm.h", "encoder.lstm.c", "gru.h")]
    return facts["seq"], facts["steps"], torch.cat(parts)


class EngineFleet(Fleet):
    """Engines of this process on one store that fails at random, with room for few sessions in memory."""

    def __init__(self, address: str, *, engines: int = 1, disk: Path | None = None) -> None:
        """With `disk`, a small file system that the store is on, that is filled as well."""
        super().__init__()
        self._disk = disk
        self._address = address
        self._trouble = self._skew = self._stalled = 0.0
        self._stores = random.Random(0)
        self._engines = [self._start() for _ in range(engines)]
        self._turn = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.faults = {
            "the store fails": self._fail,
            "the clock jumps": self._jump,
            "the model stalls": self._stall,
            "a lull": lambda chance: let_pass(0.05 * chance.random()),
        }
        if not address.startswith("memory"):
            self.faults["an engine restarts"] = self._restart
        if address.startswith("sqlite"):
            self._path = Path(address.removeprefix("sqlite:///"))
            self._kept = self._path.with_name("kept.db")
            self.faults["the file is set back"] = self._set_back
        if disk is not None:
            self.faults["the disk is full"] = self._fill

    def close(self) -> None:
        for engine in self._engines:
            engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def any_of_them(self, chance: random.Random) -> Engine:
        return chance.choice(self._engines)

    def push(self, engine: Engine, action: Action, chance: random.Random) -> Any:
        session, x, seq = action.session, action.x, action.seq
        way = chance.choice(["plain", "plain", "soon", "many", "coroutine", "cancelled", "raw"])
        if way == "soon":
            return engine.push(session, x, seq, timeout=0.002 * chance.random())
        if way == "many":
            return engine.push_many([session], x.unsqueeze(0), seqs=[seq])[0]
        if way == "plain":
            return engine.push(session, x, seq)
        coroutine = self._raw(engine, action) if way == "raw" else engine.apush(session, x, seq)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if way == "cancelled":
            let_pass(0.002 * chance.random())
            future.cancel()
        return future.result(_HUNG)

    async def _raw(self, engine: Engine, action: Action) -> Any:
        (push,) = engine.submit_raw(action.session, [(memoryview(action.x.numpy().tobytes()), action.seq)])
        return engine.output(await push.outcome())

    def _start(self) -> Engine:
        store = open_store(self._address)
        _make_unreliable(store, lambda: self._stores.random() < self._trouble)
        torch.manual_seed(0)
        model = Deep()
        model.register_forward_pre_hook(lambda module, inputs: self._hold())
        return Engine(model, store, max_sessions=3, max_batch=5, clock=lambda: time.time() + self._skew)

    def _hold(self) -> None:
        if self._stalled:
            let_pass(self._stalled)

    def _fail(self, chance: random.Random) -> None:
        self._trouble = chance.choice([0.05, 0.3, 1.0])
        let_pass(0.03 * chance.random())
        self._trouble = 0.0

    def _jump(self, chance: random.Random) -> None:
        self._skew += chance.uniform(-86_400, 86_400)

    def _set_back(self, chance: random.Random) -> None:
        """Put a copy in the place of the file, now and then, and make another one."""
        if self._kept.exists() and chance.random() < 0.5:
            with self._marked("set back"):
                os.replace(self._kept, self._path)
                for end in ("-shm", "-wal"):
                    with suppress(FileNotFoundError):
                        os.remove(f"{self._path}{end}")
        else:
            self._kept.unlink(missing_ok=True)
            with self._marked("copy"):
                copies = [sqlite3.connect(path, timeout=10) for path in (self._path, self._kept)]
                copies[0].backup(copies[1])
                for copy in copies:
                    copy.close()

    @contextmanager
    def _marked(self, kind: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.marks.append(Event(Action(kind, ""), began, time.monotonic(), "done"))

    def _fill(self, chance: random.Random) -> None:
        assert self._disk is not None
        junk = self._disk / "junk"
        with suppress(OSError), open(junk, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        let_pass(0.1 * chance.random())
        junk.unlink()

    def _stall(self, chance: random.Random) -> None:
        self._stalled = chance.choice([0.01, 0.12])  # a lease is shorter than the latter
        let_pass(0.15)
        self._stalled = 0.0

    def _restart(self, chance: random.Random) -> None:
        place = chance.randrange(len(self._engines))
        old, self._engines[place] = self._engines[place], self._start()
        old.shutdown()


def _make_unreliable(store: Store, fails: Callable[[], bool]) -> None:
    """Let a store fail before and after what it does, as one across a network does."""

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if fails():
                raise StoreFailed("the store is away, before anything was done")
            found = method(*given)
            if fails():
                raise StoreFailed("the store is away, after it was done")
            return found

        return call

    for name in ("claim", "commit", "advance", "read", "answer"):
        setattr(store, name, wrapped(getattr(store, name)))


class ServerFleet(Fleet):
    """Servers in processes of their own on one store, which are killed, paused and stopped."""

    pause = 0.1

    def __init__(self, store: str, *, workers: int, redis: RedisServer | None = None) -> None:
        super().__init__()
        self._store, self._redis = store, redis
        self._nursery = Nursery()
        self._ports = [free_port() for _ in range(workers)]
        self._workers = [self._nursery.start(port, store) for port in self._ports]
        self._own = threading.local()
        self._clients: list[Client] = []
        self.faults = {
            "a worker is killed": self._kill,
            "a worker is told to stop": self._stop,
            "a worker is paused": self._pause,
            "a client vanishes": self._vanish,
            "a lull": lambda chance: let_pass(0.5 * chance.random()),
        }
        if redis is not None:
            self.faults["Redis is killed"] = self._kill_redis
        else:
            self.faults["the file is locked"] = self._lock

    def close(self) -> None:
        for client in self._clients:
            client.__exit__(None, None, None)
        for worker in self._workers:
            kill(worker)
        self._nursery.close()

    def any_of_them(self, chance: random.Random) -> Client:
        return self._client(chance.choice(self._ports))

    def push(self, client: Client, action: Action, chance: random.Random) -> Any:
        # A client numbers its inputs by itself where it is given no number, from what it saw last.
        if action.seq is None:
            action.seq = client.info(action.session).seq + 1
        return client.push(action.session, action.x, action.seq)

    def _client(self, port: int) -> Client:
        clients = self._own.__dict__.setdefault("clients", {})
        if port not in clients:
            # Without patience: each try is an event of its own.
            clients[port] = Client(f"http://127.0.0.1:{port}", patience=0.0, timeout=10.0)
            self._clients.append(clients[port])
        return clients[port]

    def _again(self, place: int) -> None:
        self._workers[place] = self._nursery.start(self._ports[place], self._store)

    def _kill(self, chance: random.Random) -> None:
        place = chance.randrange(len(self._workers))
        kill(self._workers[place])
        self._again(place)

    def _stop(self, chance: random.Random) -> None:
        place = chance.randrange(len(self._workers))
        os.kill(self._workers[place], signal.SIGTERM)
        wait_until(lambda: not runs(self._workers[place]))  # which fails where it does not stop in time
        self._again(place)

    def _pause(self, chance: random.Random) -> None:
        worker = chance.choice(self._workers)
        os.kill(worker, signal.SIGSTOP)
        let_pass(chance.choice([0.05, 0.4]))  # a lease is shorter than the latter
        os.kill(worker, signal.SIGCONT)

    def _vanish(self, chance: random.Random) -> None:
        beginning = b"POST /v1/sessions/none/steps HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
        with suppress(OSError), socket.create_connection(("127.0.0.1", chance.choice(self._ports)), timeout=1) as gone:
            gone.sendall(beginning[: chance.randrange(len(beginning))])

    def _kill_redis(self, chance: random.Random) -> None:
        assert self._redis is not None
        self._redis.stop()
        let_pass(0.2 * chance.random())
        self._redis.start()

    def _lock(self, chance: random.Random) -> None:
        other = sqlite3.connect(self._store.removeprefix("sqlite:///"), isolation_level=None, timeout=5)
        try:
            other.execute("BEGIN IMMEDIATE")
            let_pass(chance.choice([0.1, 1.5]))
            other.execute("ROLLBACK")
        finally:
            other.close()


@contextmanager
def closing(fleet: Any) -> Iterator[Any]:
    """Close a fleet at the end."""
    try:
        yield fleet
    finally:
        fleet.close()
