"""Explaining what the fast engine makes of a cell: its schedule in words, or the reason why it has none."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from ..cells import as_layer
from ..errors import Untraceable
from ..state import State
from .checks import Lengths, read
from .engines import obstacle_to, switched_off
from .recurrent import Recurrent

if TYPE_CHECKING:
    from .schedule import Schedule


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a cell runs along time; printing it is a table."""

    cell: str
    stages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # stage -> its operations, in order
    reason: str = ""  # why there is no schedule, where there is none
    compiled: str = ""  # what runs the loops
    seconds: float = 0.0  # that tracing and compiling took
    auto: str = ""  # what engine="auto" has decided for it so far, and when

    @property
    def fast(self) -> bool:
        """Whether the cell runs by a schedule."""
        return not self.reason

    def __str__(self) -> str:
        """Return one line for each stage."""
        auto = f"\n  auto: {self.auto}" if self.auto else ""
        if self.reason:
            return f"{self.cell} runs step by step: {self.reason}.{auto}"
        width = max(map(len, self.stages))
        lines = [f"{self.cell} runs by a schedule, made in {self.seconds:.1f} s; {self.compiled}"]
        for stage, operations in self.stages.items():
            lines.append(f"  {stage:<{width}}  {len(operations):3d}  {_shortened(operations)}".rstrip())
        return "\n".join(lines) + auto


def explain(
    cell: nn.Module,
    x: Tensor,
    state: State | Any = None,
    *,
    lengths: Lengths | None = None,
    resets: Tensor | None = None,
) -> Explanation:
    """Return the schedule by which `cell` runs along `x`, or the reason why it runs step by step.

    >>> shown = explain(torch.nn.RNNCell(3, 4), torch.randn(2, 9, 3))
    >>> shown.stages["before the loop"]
    ('mm',)
    >>> shown.stages["in the loop"]
    ('mm', 'add', 'add', 'add', 'tanh')
    """
    name = type(cell).__name__
    if isinstance(cell, Recurrent):
        return explain(cell.cells()[0], x, lengths=lengths, resets=resets)
    layer = as_layer(cell, x[:, 0])
    if layer.fused:
        return Explanation(name, reason="it is a fused layer, which runs all steps in a kernel of its own")
    task = read(layer, x, state, lengths=lengths, resets=resets)
    reason = "HIDDENSTATE_ENGINE is 'loop'" if switched_off() else obstacle_to(layer, task)
    if reason:
        return Explanation(name, reason=reason)
    from .building import build, compile_loops  # the fast engine, which a plain import can do without
    from .cache import cell_known
    from .fast import prepare
    from .reading import StepReader
    from .step import StateChanges

    start, auto = time.perf_counter(), cell_known(layer.module).told
    try:
        run = prepare(layer, task, StepReader())
        schedule, judge = build(run)
    except StateChanges as refusal:
        return Explanation(name, reason=f"{refusal}; unroll runs one step plainly first, and goes on by a schedule")
    except Untraceable as refusal:
        return Explanation(name, reason=str(refusal), auto=auto)
    compile_loops(schedule, run, judge)
    seconds = time.perf_counter() - start
    return Explanation(name, _stages(schedule), compiled=_how(schedule), seconds=seconds, auto=auto)


def _how(schedule: Schedule) -> str:
    if schedule.plain_because:
        return f"its loops run by torch's own operations, because {schedule.plain_because}"
    return schedule.runs


def _stages(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    from .split import Stage

    found = {stage.value: tuple(_name(node) for node in schedule.split.nodes(stage)) for stage in Stage}
    return {stage: tuple(name for name in names if name) for stage, names in found.items() if names}


def _name(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return ""
    return str(node.target).removeprefix("aten.").split(".")[0]


def _shortened(operations: tuple[str, ...], most: int = 12) -> str:
    shown = ", ".join(operations[:most])
    return f"{shown}, …" if len(operations) > most else shown
