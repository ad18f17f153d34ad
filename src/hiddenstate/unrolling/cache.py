"""Schedules that were made before: found again by everything they depend on, and never too many."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import Untraceable
from .fast import Run
from .schedule import Schedule
from .twins import fingerprint

_MOST = 32  # schedules of one cell; beyond, those not used for longest are forgotten


@dataclass(slots=True, eq=False)
class Entry:
    """What is known of one cell under one set of conditions."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    steps: int = 0  # that have run in the plain loop so far
    schedule: Schedule | None = None
    compiled: bool = False  # whether its loops are compiled
    refusal: Untraceable | None = None


_entries: WeakKeyDictionary[nn.Module, OrderedDict[Hashable, Entry]] = WeakKeyDictionary()
_lock = threading.Lock()
# Tracing swaps out parts of torch itself, so there is only ever one at a time.
_tracing = threading.Lock()


def entry_for(run: Run) -> Entry:
    """Return what is known of a run's cell under the run's conditions."""
    key = _key(run)
    with _lock:
        known = _entries.setdefault(run.step.layer.module, OrderedDict())
        entry = known.setdefault(key, Entry())
        known.move_to_end(key)
        while len(known) > _MOST:
            known.popitem(last=False)
    return entry


def settle(entry: Entry, build: Callable[[], Schedule]) -> Schedule:
    """Return the entry's schedule, built now if it is not there yet, or raise why there is none."""
    with entry.lock:
        if entry.refusal is not None:
            raise entry.refusal
        if entry.schedule is None:
            try:
                with _tracing:
                    entry.schedule = build()
            except Untraceable as refusal:
                entry.refusal = refusal.with_traceback(None)
                raise
    return entry.schedule


def known_to(module: nn.Module) -> int:
    """Return how many schedules are kept for a cell."""
    with _lock:
        return len(_entries.get(module, ()))


def _key(run: Run) -> Hashable:
    step, device = run.step, run.x.device.type
    grad = run.needs_grad()
    return (
        fingerprint(step.layer.module),
        id(step.layer.adapter),
        (step.ends, step.restarts, grad, tuple(step.axes.items())),
        tuple(_kind(tensor, grad) for tensor in (*run.weights, *run.firsts, *run.states)),
        (run.x.shape[0], run.x.shape[2:], *_kind(run.x, grad)[1:]),
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.get_float32_matmul_precision()),
    )


def _kind(tensor: Tensor, grad: bool) -> tuple[Hashable, ...]:
    return (tensor.shape, tensor.dtype, tensor.device, grad and tensor.requires_grad)
