"""Styles met in public code, as small as they get: each found as what it is, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.cells.behavior import find
from hiddenstate.errors import RecordingWarning


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(7, 4)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.mix(torch.cat([x, h], 1)))


class VariableOfTheLoopSetAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for frame in x.split(1, 1):
            frame = frame.squeeze(1)
            h = self.step(frame, h)
        return h


class VariableOfTheLoopIsTheState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        f, z = self.gate(x).chunk(2, 2)
        previous, out = None, []
        for i, h in enumerate(z.tanh().unbind(1)):
            h = h if previous is None else h + f[:, i].sigmoid() * previous
            previous = h = h.view(len(x), 4)
            out.append(h)
        return torch.stack(out, 1)


class VariableOfTheLoopSetInALoopWithin(nn.Module):
    """All that is done is done in the inner loop: only its beginning anew tells the outer one's turns."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        h, out = [x.new_zeros(len(x), 3) for _ in self.mix], []
        for frame in x.unbind(1):
            for k, mix in enumerate(self.mix):
                frame = h[k] = torch.tanh(mix(frame) + 0.5 * h[k])
            out.append(frame)
        return torch.stack(out, 1)


class MadeOnceInTheFirstStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mix, self.encoded = nn.Linear(3, 4), nn.Linear(7, 4), None

    def forward(self, x: Tensor) -> Tensor:
        self.encoded, h = None, x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            if self.encoded is None:
                self.encoded = self.encode(x)
            weights = (self.encoded * h[:, None]).sum(-1).softmax(-1)
            h = torch.tanh(self.mix(torch.cat([step, (weights[..., None] * self.encoded).sum(1)], 1)))
        return h


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (VariableOfTheLoopSetAgain, ("cell", 6, ("h",))),
        (VariableOfTheLoopIsTheState, ("loop", 6, ("previous",))),
        (VariableOfTheLoopSetInALoopWithin, ("loop", 6, ("h[0]", "h[1]", "h[2]"))),
        (MadeOnceInTheFirstStep, ("loop", 6, ("h",))),
    ],
)
def test_what_crosses_is_found_and_nothing_else(make, expected):
    found = find(make(), (torch.randn(2, 6, 3),))
    seen = [(each.kind, each.steps, tuple(part.name for part in each.parts)) for each in found.recurrences]
    assert seen == [expected], found.explain()
    assert found.unsure == (), found.explain()


class TwoParts(nn.Module):
    """A cell whose second part comes one step later than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)

    def forward(self, x: Tensor, one: Tensor | None = None, two: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        y = self.mix(x) + (0 if one is None else one) + (two[0] if two else 0)
        return y, torch.sin(y), torch.tanh(y)


class OnePartLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = TwoParts()

    def forward(self, x: Tensor) -> Tensor:
        one, two = None, ()
        for frame in x.unbind(1):
            y, new, other = self.step(frame, one, two)
            two = () if one is None else (other,)
            one = new
        return y


def test_a_part_that_comes_later_than_another_has_no_start_and_breaks_nothing():
    found = find(OnePartLater(), (torch.randn(2, 8, 3),))
    (cell,) = found.recurrences
    assert [part.initial for part in cell.parts] == [None, None], found.explain()
    assert {len(part.values) for part in cell.parts} == {8}


class RowByRow(nn.Module):
    """Each row is run alone, from an attribute that is put back after it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.state = nn.Linear(3, 4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(*x.shape[:2], 4)
        for i, row in enumerate(x):
            for j, step in enumerate(row):
                self.state = 0.9 * self.state + self.mix(step)
                out[i, j] = self.state
            self.state = torch.zeros_like(self.state)
        return out


def test_rows_that_are_run_one_by_one_are_all_told():
    model, x = RowByRow(), torch.randn(3, 8, 3)
    runs = find(model, (x,)).recurrences
    assert [each.kind for each in runs] == ["loop"] * 3
    for each, row in zip(runs, model(x), strict=True):
        torch.testing.assert_close(torch.stack(each.parts[0].values), row.detach())


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.up = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return self.leaf(x)
        return torch.tanh(self.up(self(x[: len(x) // 2]) + self(x[len(x) // 2 :])))


class TreeInAFunction(Tree):
    def forward(self, x: Tensor) -> Tensor:
        def up(x: Tensor) -> Tensor:
            if len(x) == 1:
                return self.leaf(x)
            return torch.tanh(self.up(sum([up(half) for half in x.tensor_split(2)])))

        return up(x)


class CalledOnBothSides(Tree):
    """It calls itself, and makes nothing of it with its weights."""

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return self(x, both=False) + self(x.flip(1), both=False) if both else self.leaf(x)


@pytest.mark.parametrize(("make", "name"), [(Tree, "forward"), (TreeInAFunction, "up")])
def test_a_recursion_is_said_by_name(make, name):
    found = find(make(), (torch.randn(8, 3),))
    assert found.recurrences == ()
    assert f"{name} calls itself: a recursion, which was not examined" in {each.why for each in found.unsure}


def test_a_module_that_calls_itself_for_something_else_is_none():
    assert find(CalledOnBothSides(), (torch.randn(8, 3),)).unsure == ()


class MemoryOfAnotherSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden_size, self.input_size = 6, 3
        self.mix, self.keep = nn.Linear(14, 6), nn.Linear(8, 5)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, m = state
        m = torch.tanh(self.keep(torch.cat([x, m], 1)))
        return torch.tanh(self.mix(torch.cat([x, h, m], 1))), m


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden_size, self.input_size, self.mix = 6, 3, nn.Linear(9, 6)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        x = x[:, None].expand(-1, h.shape[1], -1) if h.dim() == 3 else x
        return torch.tanh(self.mix(torch.cat([x, h], -1)))


class Stepped(nn.Module):
    def __init__(self, cell: nn.Module, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.cell, self.shapes = cell, shapes

    def forward(self, x: Tensor) -> Tensor:
        zeros = tuple(x.new_zeros(len(x), *shape) for shape in self.shapes)
        state = zeros if len(zeros) > 1 else zeros[0]
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize(
    ("model", "sizes"),
    [(Stepped(MemoryOfAnotherSize(), (6,), (5,)), [6, 5]), (Stepped(Grouped(), (4, 6)), [24])],
)
def test_sizes_are_those_that_were_seen_whatever_the_names_let_guess(model, sizes):
    (layer,) = hs.layers(model, torch.randn(2, 9, 3))
    assert list(layer.spec.sizes.values()) == sizes
    assert [part[0].numel() for part in layer.initial(3).values()] == sizes


class Attending(nn.Module):
    """It bears the names of a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size, self.input_size, self.mix = 4, 4, nn.Linear(4, 4)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.mix(x) + memory), x + memory


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.inner = nn.Linear(3, 4), Attending()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.inner(self.encode(x), self.encode(-x) if memory is None else memory)


def test_a_module_with_the_names_of_a_cell_is_none_where_nothing_could_be_handed_back():
    found = hs.layers(Around(), torch.randn(2, 3))
    assert list(found) == []
    assert "inner, test_strangers.py" in found.doubts()[0]
    assert "nothing it gave was handed back" in found.doubts()[0]


def test_a_cell_that_is_handed_what_the_model_was_handed_may_be_one():
    memory = torch.randn(2, 4)
    assert [layer.kind for layer in hs.layers(Around(), torch.randn(2, 3), memory)] == ["cell"]
    assert [layer.kind for layer in hs.layers(Attending(), torch.randn(2, 4), memory)] == ["cell"]


class GatedOutputs(nn.Module):
    """A layer that gives out something else than its state, and keeps its last input beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size, self.input_size, self.gates, self.kept = 4, 3, nn.Linear(3, 12), None

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z, f, o = self.gates(x if self.kept is None else x + self.kept).chunk(3, 2)
        c = x.new_zeros(len(x), 4) if hidden is None else hidden
        out = []
        for t in range(x.shape[1]):
            c = f[:, t].sigmoid() * c + z[:, t].tanh()
            out.append(c)
        self.kept = x[:, -1:].data
        return o.sigmoid() * torch.stack(out, 1), c


def test_outputs_are_not_recorded_as_a_state_that_they_are_not():
    model, x = GatedOutputs(), torch.randn(2, 6, 3)
    with hs.record(model) as rec:
        with pytest.warns(RecordingWarning) as caught:
            model(x)
        _, c = model(x)
    assert any("l0 is not recorded" in str(each.message) for each in caught)
    loop, attribute = rec
    torch.testing.assert_close(rec.runs(loop)[-1].h[:, -1], c.detach())
    torch.testing.assert_close(rec.runs(attribute)[-1].h[:, -1], x[:, -1])


class FirstStepApart(nn.Module):
    """The first step is written before the loop; `start` makes it with weights of its own, or of the loop's."""

    def __init__(self, *, alike: bool) -> None:
        super().__init__()
        self.read, self.keep, self.begin = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(3, 4)
        self.start = self.read if alike else self.begin

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        h = torch.tanh(self.start(x[:, 0]))
        out = [h]
        for t in range(1, x.shape[1]):
            h = torch.tanh(self.read(x[:, t]) + self.keep(h))
            out.append(h)
        return torch.stack(out, 1)


@pytest.mark.parametrize("alike", [True, False])
def test_a_first_step_before_the_loop_is_a_step_where_it_does_what_a_turn_does(alike):
    model, x = FirstStepApart(alike=alike), torch.randn(2, 6, 3)
    (loop,) = find(model, (x,)).recurrences
    (part,), states = loop.parts, list(model(x).detach().unbind(1))
    said = [each for each in loop.evidence if "before the loop" in each]
    assert len(said) == 1
    assert loop.steps == len(part.values) == (6 if alike else 5)
    for value, state in zip(part.values, states if alike else states[1:], strict=True):
        torch.testing.assert_close(value, state)
    assert (part.initial is None) == alike
    assert alike or torch.equal(part.initial, states[0])


class OnAGraph(nn.Module):
    """A cell over the nodes of one graph: there is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(7, 4)
        self.register_buffer("edges", torch.rand(5, 5))

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        h = x.new_zeros(5, 4) if h is None else h
        return torch.tanh(self.mix(self.edges @ torch.cat([x, h], 1)))


class SteppedOnAGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = OnAGraph()

    def forward(self, x: Tensor) -> Tensor:
        h, out = None, []
        for step in x:
            h = self.cell(step, h)
            out.append(h)
        return torch.stack(out)


def test_a_cell_without_a_batch_is_recorded_as_one_row_and_that_is_said():
    model, x = SteppedOnAGraph(), torch.randn(8, 5, 3)
    with (
        pytest.warns(RecordingWarning, match="the rows of h in cell, which could not be told"),
        hs.record(model) as rec,
    ):
        out = model(x)
    torch.testing.assert_close(rec["cell"].h, out.detach().flatten(1)[None])


class KeepsUnseen(GatedOutputs):
    def forward(self, x: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = super().forward(x, hidden)
        self.kept = torch.from_numpy(x[:, -1:].detach().numpy().copy())
        return out


def test_what_a_layer_known_by_its_names_keeps_and_could_not_be_told_is_said():
    assert any("kept" in doubt for doubt in hs.layers(KeepsUnseen(), torch.randn(2, 6, 3)).doubts())
    assert hs.layers(GatedOutputs(), torch.randn(2, 2, 3)).doubts() == []
