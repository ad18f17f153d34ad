"""Choosing the engine that runs a cell along time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module

from .._compiling import compiling
from .._torch_names import lookup
from ..cells import Layer, as_layer
from ..errors import BadInput, Untraceable
from ..state import State
from .checks import Task
from .loop import run_loop
from .observing import must_step
from .twins import members

Engine: TypeAlias = Literal["auto", "fast", "loop"]
_ENGINES = ("auto", "fast", "loop")
_SWITCH = "HIDDENSTATE_ENGINE"
_TRIED = ("2.11", "2.13")  # versions of torch whose guards were tried on all the changes that the tests know

# By these torch says what else is at work. It promises none of them: where one is gone, cells run step by step.
_tracing_state = lookup("torch._C._get_tracing_state")
_transforms = lookup("torch._C._functorch.peek_interpreter_stack")
_is_wrapped = lookup("torch._C._functorch.is_functorch_wrapped_tensor")
_untransformed = lookup("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
_dispatch_mode = lookup("torch.utils._python_dispatch._get_current_dispatch_mode")
_function_mode_stack = lookup("torch.overrides._get_current_function_mode_stack")


def check_engine(engine: str) -> None:
    """Refuse a name that is no engine's."""
    if engine not in _ENGINES:
        raise BadInput(f"engine is {engine!r}, but 'auto', 'fast' or 'loop' is needed.")


def chosen_engine(engine: Engine | None, own: Engine = "auto") -> Engine:
    """Return the engine that runs: the one asked for, else the layer's own; none but the loop where it is off."""
    chosen: Engine = own if engine is None else engine
    check_engine(chosen)
    return "loop" if switched_off() else chosen


def switched_off() -> bool:
    """Say whether the environment turns the fast engine off everywhere."""
    said = os.environ.get(_SWITCH, "")
    if said not in ("", "auto", "loop"):
        raise BadInput(
            f"the environment variable {_SWITCH} is {said!r}, but 'loop' is needed, which turns the fast engine off "
            f"everywhere, or nothing."
        )
    return said == "loop"


def layer_for(cell: nn.Module, x: Any) -> Layer:
    """Return a cell as a layer; a real step teaches what its state looks like."""
    if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1] == 0:
        return as_layer(cell)
    if not (_transforms and _untransformed and _transforms() is not None):
        return as_layer(cell, x[:, 0])
    # Within a transform of torch.func no tensor has numbers of its own: the step is made up, outside of it, and so are
    # weights that the transform has taken hold of, as it does those of an ensemble.
    from .holding import held_tensors, put_in  # which a plain import can do without

    step = _like(x[:, 0])
    held = [place.tensor for place in held_tensors(cell)]
    makers = [_like(tensor) if _is_wrapped is None or _is_wrapped(tensor) else None for tensor in held]
    with _untransformed():
        own = [tensor if make is None else make() for tensor, make in zip(held, makers, strict=True)]
        with put_in(cell, own):
            return as_layer(cell, step())


def _like(tensor: Tensor) -> Callable[[], Tensor]:
    """Return what makes up a tensor of this shape; numbers differ, so that nothing looks like something else."""
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    return lambda: torch.linspace(0, 1, shape.numel(), device="cpu").view(shape).to(device, dtype)


def run_cell(layer: Layer, task: Task, engine: Engine = "auto") -> tuple[Tensor, State]:
    """Run a cell along a checked task."""
    if engine == "loop":
        return run_loop(layer, task)
    from .scheduled import run_auto, run_fast  # all of the fast engine, which a plain import can do without

    if engine == "auto":
        # Sizes that are symbols, or being traced, are not to be asked for.
        plain = type(task.x) in (Tensor, nn.Parameter) and _tracing_state is not None and _tracing_state() is None
        return run_auto(layer, task, obstacle_to) if plain else run_loop(layer, task)
    if obstacle := obstacle_to(layer, task):
        raise Untraceable(f"{type(layer.module).__name__} cannot run by a schedule, because {obstacle}.")
    try:
        return run_fast(layer, task)
    except Untraceable as refusal:
        raise Untraceable(
            f"{type(layer.module).__name__} cannot run by a schedule, because {refusal.reason}. "
            f"engine='auto' runs such a cell step by step.",
            refusal.line,
        ) from refusal


def obstacle_to(layer: Layer, task: Task) -> str | None:
    """Return what about this call, rather than about the cell, keeps it from running by a schedule."""
    if any(must_step(member) for member in members(layer.module)):
        return "hooks on it want to see every step"
    return obstacle_around(layer, task)


def obstacle_around(layer: Layer | None, task: Task) -> str | None:
    """Return what is at work around this call that keeps all of it from running by a schedule."""
    if _hooked_globally():
        return "hooks on all modules want to see every step"
    if torch.is_anomaly_enabled():
        return "anomaly mode wants to see every operation"
    if not torch.__version__.startswith(_TRIED):
        return f"torch {torch.__version__} is none of the versions that its guards were tried on: {', '.join(_TRIED)}"
    if "torch._dynamo" in sys.modules and torch._dynamo.eval_frame._stance.stance != "default":
        return "torch's compiler is told to stand aside"
    level = getattr(forward_ad, "_current_level", None)
    if not (_tracing_state and _transforms and _dispatch_mode and _function_mode_stack) or level is None:
        return f"torch {torch.__version__} does not say whether something else is at work"
    # That torch compiles something says nothing of this thread.
    if compiling() or _tracing_state() is not None:
        return "it is being compiled by torch itself"
    if _transforms() is not None:
        return "a transform of torch.func is at work"
    if level >= 0:
        return "forward-mode derivatives are asked for"
    # A default device is a mode too, and a harmless one.
    modes = [mode for mode in _function_mode_stack() if type(mode).__name__ != "DeviceContext"]
    if _dispatch_mode() is not None or modes:
        return "a mode is active that wants to see every operation"
    if task.x.numel() == 0 or (type(task.x) is not Tensor and not isinstance(task.x, nn.Parameter)):
        return "x is empty, or no plain tensor"
    if layer is not None and _randomly_started(layer, task):
        return "its initial state is drawn at random, anew at every reset"
    return None


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
