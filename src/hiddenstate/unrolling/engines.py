"""Which engine runs a cell along time."""

from __future__ import annotations

import warnings
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..cells import Layer, unheard, untouched
from ..errors import BadInput, UnrollWarning, Untraceable
from ..state import State
from .building import build, compile_loops
from .cache import Entry, entry_for, settle
from .checks import Task
from .fast import Run, execute, prepare
from .loop import run_loop
from .observing import must_step, observed
from .step import StateChanges
from .twins import members

Engine: TypeAlias = Literal["auto", "fast", "loop"]
_ENGINES = ("auto", "fast", "loop")

# How many steps of one shape run in the plain loop before a trace, and before compiled loops, are worth their time.
_TRACE_AFTER, _COMPILE_AFTER = 1_000, 10_000


def check_engine(engine: str) -> None:
    """Refuse a name that is no engine's."""
    if engine not in _ENGINES:
        raise BadInput(f"engine is {engine!r}, but 'auto', 'fast' or 'loop' is needed.")


def run_cell(layer: Layer, task: Task, engine: Engine = "auto") -> tuple[Tensor, State]:
    """Run a cell along a checked task."""
    if engine == "loop":
        return run_loop(layer, task)
    obstacle = obstacle_to(layer, task)
    if engine == "auto":
        return run_loop(layer, task) if obstacle else _run_auto(layer, task)
    if obstacle:
        raise Untraceable(f"{type(layer.module).__name__} cannot run by a schedule, because {obstacle}.")
    try:
        return _run_fast(layer, task)
    except Untraceable as refusal:
        raise Untraceable(
            f"{type(layer.module).__name__} cannot run by a schedule, because {refusal.reason}. "
            f"engine='auto' runs such a cell step by step.",
            refusal.line,
        ) from refusal


def obstacle_to(layer: Layer, task: Task) -> str | None:
    """Return what about this call, rather than about the cell, keeps it from running by a schedule."""
    if any(must_step(member) for member in members(layer.module)) or _hooked_globally():
        return "hooks on it want to see every step"
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return "it is being compiled by torch itself"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func is at work"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives are asked for"
    if _get_current_dispatch_mode() is not None or _function_modes():
        return "a mode is active that wants to see every operation"
    if task.x.numel() == 0 or (type(task.x) is not Tensor and not isinstance(task.x, nn.Parameter)):
        return "x is empty, or no plain tensor"
    if _randomly_started(layer, task):
        return "its initial state is drawn at random, anew at every reset"
    return None


def _run_auto(layer: Layer, task: Task) -> tuple[Tensor, State]:
    run = prepare(layer, task)
    entry = entry_for(run)
    if entry.refusal is None and (entry.schedule is not None or entry.steps >= _TRACE_AFTER):
        try:
            return _shown(layer, task, _execute(entry, run, compiled=entry.steps >= _COMPILE_AFTER))
        except StateChanges:
            return _after_one_step(layer, task, "auto")
        except Untraceable as refusal:
            _note(layer, refusal)
    elif isinstance(entry.refusal, StateChanges):
        return _after_one_step(layer, task, "auto")
    entry.steps += task.x.shape[1]
    return run_loop(layer, task)


def _run_fast(layer: Layer, task: Task) -> tuple[Tensor, State]:
    run = prepare(layer, task)
    try:
        return _shown(layer, task, _execute(entry_for(run), run, compiled=True))
    except StateChanges:
        if task.x.shape[1] == 1:
            raise
        return _after_one_step(layer, task, "fast")


def _execute(entry: Entry, run: Run, *, compiled: bool) -> tuple[Tensor, State]:
    with unheard():
        schedule = settle(entry, lambda: build(run))
        entry.steps += run.x.shape[1]
        if compiled and not entry.compiled:
            with entry.lock:
                if not entry.compiled:
                    compile_loops(schedule, run)
                    entry.compiled = True
        return execute(schedule, run)


def _shown(layer: Layer, task: Task, result: tuple[Tensor, State]) -> tuple[Tensor, State]:
    """Show the steps that a schedule has run to the hooks that only look on."""
    if observed(layer.module):
        with torch.no_grad(), untouched(layer.module):
            run_loop(layer, task)
    return result


def _after_one_step(layer: Layer, task: Task, engine: Engine) -> tuple[Tensor, State]:
    """Run the first step plainly: after it a state has the dtype that it keeps, as under autocast."""
    resets = task.resets
    head, state = run_loop(layer, Task(task.x[:, :1], task.state, None, _some(resets, slice(0, 1)), task.initial))
    if task.x.shape[1] == 1:
        return head, state
    lengths = None if task.lengths is None else task.lengths - 1
    rest = Task(task.x[:, 1:], state, lengths, _some(resets, slice(1, None)), task.initial)
    try:
        run = prepare(layer, rest)
        tail, final = _shown(layer, rest, _execute(entry_for(run), run, compiled=engine == "fast"))
    except Untraceable as refusal:
        if engine == "fast":
            raise Untraceable(refusal.reason, refusal.line) from refusal
        _note(layer, refusal)
        return run_loop(layer, task)
    return torch.cat([head, tail], dim=1), final


def _some(resets: Tensor | None, steps: slice) -> Tensor | None:
    if resets is None or not bool(resets[:, steps].any()):
        return None
    return resets[:, steps]


_noted: set[tuple[type, str]] = set()


def _note(layer: Layer, refusal: Untraceable) -> None:
    """Say once for each type of cell and reason that it runs step by step."""
    key = (type(layer.module), refusal.reason)
    if key not in _noted:
        _noted.add(key)
        warnings.warn(
            f"{type(layer.module).__name__} runs step by step, and slower than it might, because {refusal}. "
            f"engine='loop' says that this is fine.",
            UnrollWarning,
            stacklevel=5,
        )


def _function_modes() -> bool:
    # A default device is such a mode too, and a harmless one.
    stack: list[object] = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode).__name__ != "DeviceContext" for mode in stack)


def _hooked_globally() -> bool:
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    return any(getattr(nn_module, name, None) for name in (*names, "_global_backward_pre_hooks"))


def _randomly_started(layer: Layer, task: Task) -> bool:
    if task.resets is None or (task.initial is None and not hasattr(layer.module, "initial_state")):
        return False
    device = task.x.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        before = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        (task.initial or layer.initial)(1)
        if not torch.equal(before[0], torch.get_rng_state()):
            return True
        return before[1] is not None and not torch.equal(before[1], torch.cuda.get_rng_state(device))
