"""A call along time while torch compiles or exports the code around it: one operator goes into the graph.

Dynamo reads this file's code; only functions that are marked as constant are run, while it reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from .._torch_names import lookup
from ..cells import Form, flatten
from ..state import State
from .contracts import CallKind, Runner, make_contract
from .holding import held_tensors, stand_in
from .operators import AVAILABLE
from .twins import members

P = ParamSpec("P")
T = TypeVar("T")
_transforms = lookup("torch._C._functorch.peek_interpreter_stack")
_without_modes = lookup("torch.utils._python_dispatch._disable_current_modes")


def constant(fn: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that is run while a graph is made, out of sight, and whose result is a constant of the graph."""

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_exporting() or _without_modes is None:
            return fn(*args, **kwargs)
        with torch._C.DisableTorchFunction(), _without_modes():
            return fn(*args, **kwargs)

    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call


def run_in_graph(
    module: nn.Module,
    x: Tensor,
    state: State | Any = None,
    *,
    lengths: Any,
    resets: Any,
    runner: Runner,
    rows: int,
    options: tuple[tuple[str, Any], ...],
) -> tuple[Tensor, State] | str:
    """Put the call into the graph, and return what it will give; or why it has to stay outside.

    `runner(module, x, state, lengths=, resets=, **options)` makes the call; time and rows are the first two axes of
    `x`, and `rows` says which of them holds the rows.
    """
    given = {} if state is None else _named_parts(state)
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    dtypes = tuple([part.dtype for part in given.values()])
    # As text, which has a symbol replaced by its size: what a step is given is no matter of rows and time.
    features = " ".join([f"{size}" for size in x.shape[2:]])
    learned = _contract(module, runner, features, x.dtype, x.device, rows, dtypes, autocast, options)
    if isinstance(learned, str):
        return learned
    name, held, reached, names = learned[0], learned[1].split("\n"), learned[2], tuple(learned[3].split("\n"))
    axes = tuple([int(axis) for axis in learned[4].split()])
    if given and (tuple(given) != names or (isinstance(state, State) and tuple(state.batch_axis.values()) != axes)):
        return f"its state has the parts {', '.join(names)}, and another one was given"
    tensors = [_found(module, path) for path in held if path]
    parts = list(given.values())
    wanted = [_wants_grad(tensor, leads == "1") for tensor, leads in zip(tensors, reached, strict=True)]
    wanted += [_wants_grad(tensor, True) for tensor in (x, *parts)]
    marks = [None if mark is None else torch.as_tensor(mark) for mark in (lengths, resets)]
    out, *finals, _ = torch.ops.hiddenstate.unroll(name, tensors, x, parts, marks, wanted)
    final = {part: value for part, value in zip(names, finals, strict=True)}
    return out, State(final, {part: axis for part, axis in zip(names, axes, strict=True)})


@constant
def nesting(module: nn.Module, form_of: Callable[[nn.Module], Form]) -> str:
    """Return a form in text, a line for each end and container; "" where it is of no plain containers."""

    def lines(form: Form) -> list[str]:
        if isinstance(form, str):
            return ["=" + form]
        if type(form) not in (tuple, list, dict) or (type(form) is dict and not all(type(key) is str for key in form)):
            raise TypeError
        inner = form.values() if type(form) is dict else form
        keys = [">" + key for key in form] if type(form) is dict else []
        return [f"{type(form).__name__} {len(form)}", *keys, *(line for item in inner for line in lines(item))]

    try:
        return "\n".join(lines(form_of(stand_in(module) if torch.compiler.is_exporting() else module)))
    except TypeError:
        return ""


def nested(lines: list[str], parts: State) -> Any:
    """Return the parts in a form that was given in text; its lines are used up."""
    line = lines.pop(0)
    if line[0] == "=":
        return parts[line[1:]]
    kind, count = line.split(" ")
    keys = [lines.pop(0)[1:] for _ in range(int(count))] if kind == "dict" else []
    items = [nested(lines, parts) for _ in range(int(count))]
    if kind == "dict":
        return {key: item for key, item in zip(keys, items, strict=True)}
    return tuple(items) if kind == "tuple" else items


def stay_outside(reason: str) -> None:
    """Break the graph that is being compiled, and say why."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=f"hiddenstate keeps this call out of the graph, because {reason}")


def _named_parts(state: State | Any) -> dict[str, Tensor]:
    return dict(state.items()) if isinstance(state, State) else flatten(state)[0]


def _found(module: nn.Module, path: str) -> Tensor:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _wants_grad(tensor: Tensor, leads: bool) -> bool:
    """Say whether a gradient may be asked for: of an exported program nobody knows with which tensors it will run."""
    if torch.compiler.is_exporting():
        return leads and tensor.is_floating_point()
    return leads and torch.is_grad_enabled() and tensor.requires_grad


@constant
def _contract(
    module: nn.Module,
    runner: Runner,
    features: str,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    state: tuple[torch.dtype, ...],
    autocast: torch.dtype | None,
    options: tuple[tuple[str, Any], ...],
) -> tuple[str, ...] | str:
    """Return a contract's name, and what the graph has to know of it, all in text; or why there is none.

    Of the constants that Dynamo takes from such a function, only texts are to it as if the code had them.
    """
    if not AVAILABLE:
        return f"torch {torch.__version__} lacks what an operator needs"
    if _transforms is None or _transforms() is not None:
        return "a transform of torch.func is at work"
    if pending := _pending(module):
        return pending
    kind = CallKind(tuple(map(int, features.split())), dtype, device, rows, state, autocast, options)
    contract = make_contract(module, runner, kind, exported=torch.compiler.is_exporting())
    if isinstance(contract, str):
        return contract
    reached, axes = "".join("01"[leads] for leads in contract.reached), contract.axes
    return contract.name, "\n".join(contract.held), reached, "\n".join(axes), " ".join(map(str, axes.values()))


def _pending(module: nn.Module) -> str:
    """Return what was changed in the graph so far and is still as before outside of it; "" for nothing that matters.

    Dynamo makes changes of attributes, lists and dicts when a graph has run; the operator would run within it.
    """
    if not torch.compiler.is_dynamo_compiling() and not _reading():
        return ""
    try:
        effects = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output.side_effects
        changed = [variable for variable in effects.id_to_variable.values() if effects.is_modified(variable)]
        inside = set(members(module))
        carried = {place.path.rpartition(".")[2] for place in held_tensors(module)}
        for variable in changed:
            if not type(variable.mutation_type).__name__.endswith("Existing"):
                continue  # made in the graph, so the module cannot have it
            owner = getattr(variable, "value", None)
            if isinstance(owner, nn.Module):
                names = effects.store_attr_mutations.get(variable, {}).keys()
                if owner not in inside or names <= carried:
                    continue  # not a matter of this module; or tensors, which go in as operands
                return f"its attribute {sorted(names - carried)[0]!r} is changed before, in the same graph"
            if getattr(variable.source, "member", "") in ("_parameters", "_buffers"):
                continue  # as functional_call does: these are operands
            return "a list, dict or object is changed before, in the same graph, and it may read it"
    except AttributeError as error:  # another version of torch, which keeps its books otherwise
        return f"torch {torch.__version__} does not say what was changed before, in the same graph ({error})"
    return ""


def _reading() -> bool:
    tls = getattr(sys.modules.get("torch._dynamo.symbolic_convert"), "tls", None)
    return getattr(tls, "current_tx", None) is not None
