"""What a module gives when it is run along time, known before it runs: torch's compiler asks for shapes first.

A contract is learned from a trial of two rows and two steps, and found again by its name, a string that a graph can
hold. A graph knows what it hands to an operator and nothing else: so all tensors that a module holds are operands, and
one that reads others, or changes anything, has no contract.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..cells import unheard, untouched
from ..errors import BadInput, HiddenStateError
from ..state import State
from .holding import changing_nothing, held_tensors, kept_astray, put_in, stand_in
from .unsaved import unsaved

Runner: TypeAlias = Callable[..., tuple[Tensor, State]]  # (module, x, state, lengths=, resets=, **options)
_TRIED = 2  # rows and steps of a trial


@dataclass(frozen=True, slots=True)
class CallKind:
    """What calls of one contract have in common, as far as a graph knows it."""

    features: tuple[int, ...]  # of one step of one row
    dtype: torch.dtype
    device: torch.device
    rows: int = 0  # the axis of x that holds the rows; time is the other one of the first two
    state: tuple[torch.dtype, ...] = ()  # of the parts of a given state
    autocast: torch.dtype | None = None
    options: tuple[tuple[str, Any], ...] = ()  # further arguments of the runner


@dataclass(frozen=True, slots=True)
class PartKind:
    """One part of a final state: its name, its shape but for the rows, and on which axis these are."""

    name: str
    shape: tuple[int, ...]
    axis: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Contract:
    """How one kind of call of a module is made, and what it gives."""

    name: str
    module: Callable[[], nn.Module | None]
    runner: Runner
    kind: CallKind
    held: tuple[str, ...]  # where the tensors are that the module holds, as `inner.weight`
    reached: tuple[bool, ...] = ()  # which of them a gradient reaches
    tail: tuple[int, ...] = ()  # the shape of an output, behind time and rows
    dtype: torch.dtype = torch.float32
    parts: tuple[PartKind, ...] = ()

    @property
    def axes(self) -> dict[str, int]:
        """Where the rows are in each part of the state."""
        return {part.name: part.axis for part in self.parts}

    def shapes(self, x: Tensor) -> list[tuple[tuple[Any, ...], torch.dtype]]:
        """Return shape and dtype of the output and of each part of the final state; sizes may be symbols."""
        rows = x.shape[self.kind.rows]
        found: list[tuple[tuple[Any, ...], torch.dtype]] = [((*x.shape[:2], *self.tail), self.dtype)]
        for part in self.parts:
            found.append(((*part.shape[: part.axis], rows, *part.shape[part.axis + 1 :]), part.dtype))
        return found

    def run(
        self, held: Sequence[Tensor], x: Tensor, state: Sequence[Tensor], *, lengths: Any = None, resets: Any = None
    ) -> tuple[Tensor, State]:
        """Run the module, as it is now, with these tensors in the place of its own."""
        module = self.module()
        if module is None:
            raise BadInput(
                f"a graph runs {self.name} along time, but that module is gone: a graph does not keep it alive. Keep "
                f"the model as long as what was compiled of it."
            )
        names = [part.name for part in self.parts]
        first = State(dict(zip(names, state, strict=True)), self.axes) if state else None
        device, dtype = self.kind.device.type, self.kind.autocast
        casting = torch.autocast(device, enabled=dtype is not None, dtype=dtype)
        with put_in(module, held), casting, changing_nothing(module):
            return self.runner(module, x, first, lengths=lengths, resets=resets, **dict(self.kind.options))


_contracts: dict[str, Contract] = {}
_numbers = itertools.count(1)


def found_contract(name: str) -> Contract:
    """Return the contract of this name."""
    found = _contracts.get(name)
    if found is None:
        raise BadInput(
            f"a graph runs {name} along time, but no such module is known in this process: the operator calls the "
            f"module itself, which no saved graph holds. Exported with engine='loop', all steps are written out, and "
            f"the program runs anywhere."
        )
    return found


def make_contract(module: nn.Module, runner: Runner, kind: CallKind, *, exported: bool = False) -> Contract | str:
    """Return a contract by a trial, or why there is none; an exported program gets a frozen module of its own."""
    if astray := kept_astray(module):
        return astray
    body = stand_in(module) if exported else module
    held = tuple(tensor.path for tensor in held_tensors(body))
    name = f"{type(module).__name__} {next(_numbers)}"
    contract = Contract(name, (lambda: body) if exported else weakref.ref(module), runner, kind, held)
    try:
        learned = _learned(contract, body)
    except HiddenStateError as refusal:
        return str(refusal)
    except Exception as error:
        return f"a trial of {_TRIED} rows and {_TRIED} steps fails: {type(error).__name__}: {error}"
    # Compiled graphs are kept on disk and found by their text: all that a contract promises has to stand in it.
    promised = (kind.rows, learned.tail, learned.dtype, learned.parts, kind.autocast, kind.options)
    learned = replace(learned, name=f"{name} {sha256(repr(promised).encode()).hexdigest()[:16]}")
    _contracts[learned.name] = learned
    if not exported:
        weakref.finalize(module, _contracts.pop, learned.name, None)
    return learned


def _learned(contract: Contract, module: nn.Module) -> Contract:
    kind, shape = contract.kind, torch.Size((_TRIED, _TRIED, *contract.kind.features))
    x = torch.linspace(0, 1, shape.numel(), device="cpu").view(shape).to(kind.device, kind.dtype)
    own = [held.tensor for held in held_tensors(module)]
    buffers = {id(buffer) for buffer in module.buffers()}  # which some operations would not take with a gradient
    floats = [tensor.is_floating_point() and id(tensor) not in buffers for tensor in own]
    leaves = [tensor.detach().requires_grad_(asked) for tensor, asked in zip(own, floats, strict=True)]
    with unheard(), untouched(module), unsaved(), torch.inference_mode(False), torch.enable_grad():
        before = [tensor.detach().clone() for tensor in own]
        trial = replace(contract, kind=replace(kind, options=tuple({**dict(kind.options), "engine": "loop"}.items())))
        out, state = trial.run(leaves, x, ())
        if kind.state:  # what comes of a state depends on the dtype that it comes in
            trial = _filled(trial, out, state)
            if len(kind.state) != len(state):
                raise BadInput(f"the state has {len(kind.state)} parts, but {', '.join(state)} are needed.")
            cast = [part.detach().to(dtype) for part, dtype in zip(state.values(), kind.state, strict=True)]
            out, state = trial.run(leaves, x, cast)
        if any(not torch.equal(then, now.detach()) for then, now in zip(before, own, strict=True)):
            raise BadInput(f"{type(module).__name__} writes into a tensor that it holds, and a graph would not see it.")
    reached = leaves_of([out, *state.values()])
    check_leaves(module, reached, leaves)
    return replace(_filled(contract, out, state), reached=tuple(id(leaf) in reached for leaf in leaves))


def _filled(contract: Contract, out: Tensor, state: State) -> Contract:
    parts = (PartKind(n, tuple(part.shape), state.batch_axis[n], part.dtype) for n, part in state.items())
    return replace(contract, tail=tuple(out.shape[2:]), dtype=out.dtype, parts=tuple(parts))


def leaves_of(outputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the tensors at which the graph of some outputs ends, by identity."""
    found = {id(out): out for out in outputs if out.requires_grad and out.grad_fn is None}
    waiting: list[Any] = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        for inner, _ in node.next_functions:
            if inner is not None and inner not in seen:
                seen.add(inner)
                waiting.append(inner)
    return found


def check_leaves(module: nn.Module, reached: dict[int, Tensor], known: Sequence[Tensor]) -> None:
    """Refuse a call in which gradients reach tensors that no operand of the graph stands for."""
    foreign = [tensor for key, tensor in reached.items() if key not in {id(leaf) for leaf in known}]
    if foreign:
        raise BadInput(
            f"gradients of {type(module).__name__} reach a tensor of shape {tuple(foreign[0].shape)} that it reads and "
            f"does not hold itself, so a graph would lose them. Make it a parameter or a buffer of the module."
        )
