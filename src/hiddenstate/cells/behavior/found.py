"""What was found: recurrences with their parts and trajectories, and what could not be decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .starts import LoopStart
    from .taps import TapPlan

# cell: calls of one module, which is handed what it gave before; of modules in modules, the innermost.
# loop: operations of a forward that repeat, with state in variables, containers or attributes of that forward.
# layer: such a loop within one call of a submodule that takes a sequence, and returns one and the state it ends in.
# iteration: repeats, but takes no piece of the call's input of its own.
# attribute: kept by a module between its own calls, with a row for each row of the batch.
# cache: gets longer with every repetition; never a state of fixed size.
Kind: TypeAlias = Literal["cell", "loop", "iteration", "layer", "attribute", "cache"]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One tensor of a state, at every repetition."""

    name: str  # as the code calls it
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_axis: int | None  # None where the call did not tell
    values: tuple[Tensor, ...]  # after each repetition; of a call that somebody else made, see `Found.live`
    initial: Tensor | None  # None where the first repetition was handed nothing
    argument: tuple[Any, ...] | None = None  # of a cell: ("args", 1, 0) is the first item of the second argument
    result: tuple[Any, ...] | None = None  # of a cell: where in what it returns
    counted: bool = False  # the batch axis is only known by its size, which is the number of rows
    cut: bool = False  # of an attribute: the model itself cuts it from its graph
    starts_only: bool = False  # of an attribute: all that comes of it is what layers and loops start from


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """Something that repeats within a call of a model, and what crosses from each repetition to the next."""

    kind: Kind
    module: str  # path in the model, "" the model itself
    line: str  # "model.py:31"
    steps: int
    parts: tuple[Part, ...]
    evidence: tuple[str, ...]
    returned: Any = None  # of a cell: what a call returns, with empty tensors in it
    hidden: bool = False  # of a cell: its state is handed in within an object that nobody else can make

    def __repr__(self) -> str:
        """Return kind, place and parts on one line."""
        parts = ", ".join(f"{part.name} {tuple(part.shape)}" for part in self.parts)
        return f"Recurrence({self.kind} in {self.module or 'the model'}, {self.line}, {self.steps} steps: {parts})"


@dataclass(frozen=True, slots=True)
class Unsure:
    """Something that was looked at, with a reason why it is not among the recurrences."""

    module: str
    line: str
    why: str
    kept: bool = False  # it is about what a module keeps in an attribute
    gave: str = ""  # and this is the known layer that gave it: its state, under another name

    def __str__(self) -> str:
        """Return the place and the reason as one sentence."""
        place = ", ".join(each for each in (self.module or "the model", self.line) if each)
        return f"{place}: {self.why}"


@dataclass(frozen=True, slots=True)
class Cut(Unsure):
    """Why a recurrence, carried from one piece of the input to the next, does not give what the whole gives."""

    carried: bool = False  # whether it is worth carrying all the same
    usual: bool = False  # and nobody needs to be told
    changed: bool = False  # what it gives is changed before it is handed back
    beside: bool = False  # something else crosses with it, and would have to be carried too


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What recurs in one call of a model."""

    recurrences: tuple[Recurrence, ...]
    unsure: tuple[Unsure, ...]
    passed: tuple[Unsure, ...] = ()  # looked at, and certainly no recurrence
    known: tuple[Unsure, ...] = ()  # modules known by their type whose state crosses: reported by others
    unseen: tuple[str, ...] = ()  # what was not examined
    iterated: tuple[str, ...] = ()  # paths of known modules that are stepped as iterations only: not to be carried
    contradicted: tuple[Unsure, ...] = ()  # modules that may bear the names of a cell, and were called as none is
    cuts: tuple[Cut, ...] = ()  # where pieces of the input cannot give what the whole gives
    # By recurrence and part: what there was after each repetition, with its graph; held only as long as this is.
    live: Mapping[Recurrence, Mapping[str, list[Tensor]]] = field(default_factory=dict)
    starts: Mapping[Recurrence, LoopStart] = field(default_factory=dict)  # of loops: what they start from, and where
    handed_in: frozenset[str] = frozenset()  # modules whose first state came with the call of the model
    made_of_input: frozenset[str] = frozenset()  # modules whose first state was made of something in that call
    times: tuple[tuple[tuple[Any, ...], int], ...] = ()  # what is read step by step: place in (args, kwargs), and axis
    called: frozenset[nn.Module] = frozenset()  # what the call reached
    later: tuple[str, ...] = ()  # what only a second call can tell: attributes of which it is not known who reads them
    maybe: tuple[tuple[str, str], ...] = ()  # the attributes that this is about: module, and name in it
    going_on: tuple[tuple[str, str], ...] = ()  # those of them that a forward may read before it writes them
    cleared: frozenset[tuple[str, str]] = frozenset()  # attributes that a call wrote, and did not read before
    rerun: frozenset[tuple[str, str]] = frozenset()  # attributes that activation checkpointing will read once more
    examined: frozenset[str] = frozenset()  # lines of loops that ran often enough to tell
    short: tuple[Unsure, ...] = ()  # what may be a state, and a call of more steps would tell
    entangled: tuple[str, ...] = ()  # cells whose state is not handed from call to call alone
    cells: bool = True  # whether what modules hand on is told of them, and not of the loops around them
    # Of a call that somebody has made, and as long as it is held: the same call without cells.
    without_cells: Callable[[], Found] | None = None
    mixing: Callable[[], tuple[Unsure, ...]] | None = None  # where it takes several steps beside what recurs
    steady: bool = True  # no call has taken another way than those before: loops may be tapped
    plan: TapPlan | None = None  # where loops make their states, so that later calls need not be traced

    def explain(self) -> str:
        """Return what was found and how, what was not taken and why, and what was not examined."""
        lines: list[str] = []
        for each in self.recurrences:
            lines.append(f"{each.kind} in {each.module or 'the model'} ({each.line}), {each.steps} repetitions")
            lines += [f"  {_described(part)}" for part in each.parts]
            lines += [f"  - {sentence}" for sentence in each.evidence]
        if not self.recurrences:
            lines.append("no recurrence was found by behavior in this call")
        for title, things in (
            ("known by type, and its state crosses", self.known),
            ("pieces of the input cannot give what the whole gives", self.cuts),
            ("not sure", self.unsure),
            ("looked at and not taken", self.passed),
            ("not examined", self.unseen),
            ("for a second call to tell", self.later),
        ):
            if things:
                lines.append(f"{title}:")
                lines += [f"  {thing}" for thing in things]
        return "\n".join(lines)


def _described(part: Part) -> str:
    kind = str(part.dtype).removeprefix("torch.")
    rows = "rows unknown" if part.batch_axis is None else f"rows along axis {part.batch_axis}"
    rows += ", by their number" if part.counted else ""
    start = "started by itself" if part.initial is None else "starts from a tensor"
    return f"{part.name}: {tuple(part.shape)} {kind}, {rows}, {start}"
