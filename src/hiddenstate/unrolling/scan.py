"""A loop over time as a value: its body, the values it carries, and the values it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from .pieces import Piece


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A body that is called once for each step, with what it carried out of the last one.

    The body's inputs are what it carries, then what is the same at all steps, then what comes anew at each; its
    outputs are what it carries on, then what is kept of each step.
    """

    body: Piece
    carried: int
    fixed: tuple[fx.Node, ...]
    along: tuple[fx.Node, ...]
    kept: tuple[fx.Node, ...]  # outputs beyond those carried on
    path: tuple[bool, ...]  # for each carried value: is it wanted at all steps, or only at the end?
    backward: bool = False  # from the last step to the first

    def nodes(self) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node], list[fx.Node]]:
        """Return the nodes of the body's own graph: what is carried, fixed and along, and its results."""
        graph, middle = self.body.call.graph, self.carried + len(self.fixed)
        given = [node for node in graph.nodes if node.op == "placeholder"]
        results = list(next(node for node in graph.nodes if node.op == "output").args[0])
        return given[: self.carried], given[self.carried : middle], given[middle:], results

    def order(self, steps: int) -> range:
        """Return the steps in the order in which they run."""
        return range(steps - 1, -1, -1) if self.backward else range(steps)


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """What a loop leaves behind."""

    last: list[Tensor]  # what was carried out of the last step run
    paths: list[Tensor | None]  # (time + 1, ...) in the order of time, also for loops that run backward
    kept: list[Tensor]  # (time, ...)


class Runner(Protocol):
    """Something that can run a loop."""

    def __call__(self, carry: Sequence[Tensor], fixed: Sequence[Tensor], along: Sequence[Tensor], *, steps: int) -> Ran:
        """Run the loop from `carry`, with `along (time, ...)`."""


class PythonRunner:
    """Runs a loop's body by torch's own operations, one step after another."""

    def __init__(self, loop: Loop, call: Callable[..., Any] | None = None) -> None:
        """Run this loop, its body by `call` where there is a better way than its graph's own."""
        self.loop, self._call = loop, loop.body.call if call is None else call
        self._dense = call is not None  # code is compiled for strides too, which would else depend on how many steps

    def __call__(self, carry: Sequence[Tensor], fixed: Sequence[Tensor], along: Sequence[Tensor], *, steps: int) -> Ran:
        """Run the loop from `carry`, with `along (time, ...)`."""
        loop, carry = self.loop, list(carry)
        if self._dense:
            carry, along = [part.contiguous() for part in carry], [tensor.contiguous() for tensor in along]
        # unbind: taking x[t] at each step would walk over all of x again in a backward pass.
        streams = [tensor.unbind(0) for tensor in along]
        paths: list[list[Tensor]] = [[part] for part in carry]
        kept: list[list[Tensor]] = [[] for _ in loop.kept]
        for t in loop.order(steps):
            results = self._call(*carry, *fixed, *(stream[t] for stream in streams))
            carry = list(results[: loop.carried])
            for path, part in zip(paths, carry, strict=True):
                path.append(part)
            for values, value in zip(kept, results[loop.carried :], strict=True):
                values.append(value)
        return Ran(
            carry,
            [self._stacked(path) if wanted else None for path, wanted in zip(paths, loop.path, strict=True)],
            [self._stacked(values) for values in kept],
        )

    def _stacked(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values[::-1] if self.loop.backward else values)


def strided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor that lies in memory as code was compiled for."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
