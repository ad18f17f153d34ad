"""Every small model: found as what it is, with the values of its own equations, and left as it was."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from hiddenstate.cells.behavior import Found, find
from tests.cells.behavior import models as m
from tests.cells.behavior.noting import noted
from tests.support.untouched import untouched

B, T, X, H = m.B, m.T, m.X, m.H


def seq(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (B, T, X)))


def mask() -> torch.Tensor:
    return (torch.arange(T)[None] < torch.tensor([6, 4, 5])[:, None]).float()


@dataclass
class Case:
    """A model with what must be found: kinds and modules by the parts that the model notes."""

    make: type
    inputs: tuple
    expected: list  # (kind, module, {noted name: batch axis})
    known: list = field(default_factory=list)


CASES = [
    Case(m.Elman, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.ElmanTimeFirst, (seq(T, B, X),), [("loop", "", {"h": 0})]),
    Case(m.Matrices, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.LearnedStart, (seq(),), [("cell", "cell", {"h": 0})]),
    Case(m.Pair, (seq(),), [("cell", "cell", {"h": 0, "c": 0})]),
    Case(m.Stacked, (seq(),), [("cell", f"cells.{i}", {n: 0}) for i, n in enumerate("abc")]),
    Case(m.LayerByLayer, (seq(),), [("loop", "", {"h0": 0}), ("loop", "", {"h1": 0})]),
    Case(m.BothWays, (seq(),), [("cell", "forth", {"h": 0}), ("cell", "back", {"k": 0})]),
    Case(m.Masked, (seq(), mask()), [("cell", "cell", {"h": 0, "c": 0})]),
    Case(m.Buffered, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.InPlace, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.Clockwork, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.Dicts, (seq(),), [("loop", "", {"fast": 0, "slow": 0})]),
    Case(m.Named, (seq(),), [("loop", "", {"mean": 0, "spread": 0})]),
    Case(m.Rssm, (seq(),), [("cell", "cell", {"deter": 0}), ("loop", "", {"stoch": 0})]),
    Case(m.Complex, (seq(),), [("loop", "", {"s": 0})]),
    Case(m.FastWeights, (seq(),), [("loop", "", {"m": 0})]),
    Case(m.SelectiveScan, (seq(),), [("loop", "", {"x": 0})]),
    Case(m.LastSeen, (seq(), mask()), [("cell", "cell", {"h": 0}), ("loop", "", {"last": 0})]),
    Case(m.InputFeeding, (seq(B, 7, H), seq()), [("cell", "cell", {"h": 0, "c": 0}), ("loop", "", {"feed": 0})]),
    Case(
        m.AttentionSums,
        (seq(B, 7, H), seq()),
        [("cell", "cell", {"hidden": 0}), ("loop", "", {"weights": 0, "total": 0, "context": 0})],
    ),
    Case(m.ConvLstm, (seq(B, T, 2, 4, 4),), [("loop", "", {"h": 0, "c": 0})]),
    Case(m.Graph, (seq(B, T, 4, X),), [("cell", "cell", {"h": 0})]),
    Case(m.SpikingNet, (seq(),), [("attribute", "lif", {"mem": 0})]),
    Case(m.Reduced, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.Accumulated, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.Generated, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.WrittenOut, (seq(),), [("cell", "cell", {"h": 0})]),
    Case(m.Recursive, (seq(),), [("cell", "cell", {"h": 0})]),
    Case(m.While, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.Chunked, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.Unfolds, (seq(),), [("loop", "", {"v": 0})]),
    Case(m.StackedTensor, (seq(),), [("cell", "a", {"a": 0}), ("cell", "b", {"b": 0})]),
    Case(m.SecondOrder, (seq(),), [("loop", "", {"h1": 0, "h2": 0})]),
    Case(m.WithLoss, (seq(), seq(B, T)), [("cell", "cell", {"h": 0, "c": 0})]),
    Case(m.Dropped, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.Tokens, (torch.randint(0, 9, (B, T)),), [("cell", "cell", {"h": 0})]),
    Case(m.WithMyGru, (seq(),), [("layer", "gru", {"h": 0})]),
    Case(m.EmptyStart, (seq(),), [("cell", "cell", {"h": 0})]),
    Case(m.Whole, (torch.randint(0, 5, (B, T)),), [("loop", "", {"q": 0})]),
    Case(m.Scalar, (seq(),), [("loop", "", {"h": 0, "scale": None})]),
    Case(m.OneHand, (seq(),), [("cell", "cell", {"h": 0, "c": 0})]),
    Case(m.Normed, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.Branches, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.Detaches, (seq(),), [("loop", "", {"h": 0, "v": 0})]),
    Case(m.Restarts, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.BrokenOff, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.RowsLeft, (seq(),), [("loop", "", {"h": 0})]),
    Case(m.SharedCell, (seq(),), [("cell", "cell", {n: 0}) for n in "abc"]),
    Case(m.MemoriesNet, (seq(),), [("attribute", "node", {"v": 0})]),
    Case(m.Memory, (seq(),), [("cell", "controller", {"h": 0, "c": 0}), ("loop", "", {"memory": 0, "read": 0})]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.make.__name__)
def test_a_model_is_found_as_what_it_is(case: Case) -> None:
    torch.manual_seed(0)
    model = case.make()
    noted()
    torch.manual_seed(1)
    with torch.no_grad():
        model(*case.inputs)
    own = noted()
    torch.manual_seed(1)
    with untouched(model):
        found = find(model, case.inputs)
    noted()
    check(found, case.expected, own)


def check(found: Found, expected: list, own: dict) -> None:
    text = found.explain()
    assert len(found.recurrences) == len(expected), text
    for kind, module, parts in expected:
        same = [r for r in found.recurrences if (r.kind, r.module) == (kind, module)]
        assert same, f"no {kind} in {module!r}\n{text}"
        fits = [r for r in same if all(any(equal(p.values, own[name]) for p in r.parts) for name in parts)]
        assert len(fits) == 1, f"{sorted(parts)} differ from the model's own equations\n{text}"
        assert len(fits[0].parts) == len(parts), text
        assert fits[0].steps == len(own[next(iter(parts))]), text
        for name, axis in parts.items():
            part = next(p for p in fits[0].parts if equal(p.values, own[name]))
            assert part.batch_axis == axis, f"{name}: {part.batch_axis}\n{text}"


def equal(one: tuple, other: list) -> bool:
    if len(one) != len(other):
        return False
    return all(
        a.shape == b.shape and torch.allclose(a, b.to(a.dtype), atol=1e-6) for a, b in zip(one, other, strict=True)
    )
