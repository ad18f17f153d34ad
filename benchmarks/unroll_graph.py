"""A cell inside a graph of torch's against the same call outside of it, and one step against the cell itself.

python benchmarks/unroll_graph.py
"""

import time
from collections.abc import Callable

import torch
from torch import nn

import hiddenstate as hs
from timing import compare
from unroll_rivals import KINDS

BATCH, STEPS, SIZE = 32, 100, 128


def graph() -> None:
    """Compare a model of a stack and a head, as it is and compiled whole."""
    stack, head = hs.Recurrent(nn.GRUCell, SIZE, SIZE, engine="fast"), nn.Linear(SIZE, 10)
    x = torch.randn(BATCH, STEPS, SIZE)

    def loss() -> torch.Tensor:
        return head(stack(x)[0]).cos().sum()

    compiled = torch.compile(loss, fullgraph=True)
    print(compare({"outside": lambda: loss().backward(), "in a graph": lambda: compiled().backward()}, clock=clock))
    with torch.no_grad():
        print(compare({"outside, forward": loss, "in a graph": compiled}, clock=clock))


def one_step() -> None:
    """Compare one step by us with the cell's own."""
    x, h = torch.randn(BATCH, 1, SIZE), torch.zeros(BATCH, SIZE)
    given: dict[str, object] = {"lstm": (h, h), "gru": h}
    for kind, native in given.items():
        cell = KINDS[kind][2](SIZE)
        stack = hs.Recurrent(lambda *_, cell=cell: cell, SIZE, SIZE)
        state, stacked = hs.unroll(cell, x)[1], stack(x)[1]
        rivals: dict[str, Callable[[], object]] = {
            f"{kind} by hand, itself": lambda cell=cell, native=native: cell(x[:, 0], native),
            "hs.unroll": lambda cell=cell, state=state: hs.unroll(cell, x, state),
            "hs.unroll, engine='loop'": lambda cell=cell, state=state: hs.unroll(cell, x, state, engine="loop"),
            "hs.Recurrent": lambda stack=stack, stacked=stacked: stack(x, stacked),
            "hs.Recurrent, no state given": lambda stack=stack: stack(x),
        }
        with torch.no_grad():
            print(compare(rivals, clock=clock))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    clock = time.process_time  # on a machine shared with other work
    graph()
    one_step()
