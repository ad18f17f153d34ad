"""A loop whose body is fused by torch's compiler, and writes what is kept of a step to its place at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from .scan import Loop, Ran

aten = torch.ops.aten


class SlotRunner:
    """Runs a loop's body as compiled kernels, without a copy between them and what is kept."""

    def __init__(self, loop: Loop) -> None:
        """Compile the body; it happens at the first call."""
        self.loop = loop
        self._wanted = [place for place, wanted in enumerate(loop.path) if wanted]
        self._step = torch.compile(_with_slots(loop, self._wanted), dynamic=False, fullgraph=True)
        returned = next(node for node in loop.body.call.graph.nodes if node.op == "output").args[0]
        self._kept = [node.meta["val"] for node in list(returned)[loop.carried :]]  # type: ignore[arg-type, union-attr]

    def __call__(self, carry: Sequence[Tensor], fixed: Sequence[Tensor], along: Sequence[Tensor]) -> Ran:
        """Run the loop from `carry`, with `along (time, ...)`."""
        loop, carry, steps = self.loop, list(carry), len(along[0])
        device = along[0].device
        kept = [torch.empty((steps, *fake.shape), dtype=fake.dtype, device=device) for fake in self._kept]
        paths = [carry[place].new_empty((steps + 1, *carry[place].shape)) for place in self._wanted]
        for path, place in zip(paths, self._wanted, strict=True):
            path[steps if loop.backward else 0].copy_(carry[place])
        for t in loop.order(steps):
            after = t if loop.backward else t + 1
            slots = [*(path[after] for path in paths), *(values[t] for values in kept)]
            carry = list(self._step(*carry, *fixed, *(stream[t] for stream in along), *slots))
        found = dict(zip(self._wanted, paths, strict=True))
        return Ran(carry, [found.get(place) for place in range(loop.carried)], kept)


def _with_slots(loop: Loop, wanted: Sequence[int]) -> fx.GraphModule:
    """Return the body with a place to write to for each value that is kept; it returns what it carries on."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(loop.body.call.graph, copied)
    results = list(returned) if isinstance(returned, tuple | list) else [returned]
    first = next(node for node in graph.nodes if node.op != "placeholder") if len(copied) else None
    kept = [*(results[place] for place in wanted), *results[loop.carried :]]
    with graph.inserting_before(first):
        slots = [graph.placeholder(f"slot_{number}") for number in range(len(kept))]
    for slot, value in zip(slots, kept, strict=True):
        graph.call_function(aten.copy_.default, (slot, value))
    # What is carried on must be memory of its own: a body may hand on what it was given.
    on = [
        graph.call_function(aten.clone.default, (v,)) if v.op == "placeholder" else v for v in results[: loop.carried]
    ]
    graph.output(tuple(on))
    return fx.GraphModule({}, graph)
