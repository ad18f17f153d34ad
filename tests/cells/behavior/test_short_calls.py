"""A call of a step or two says where a state may hide; what shows no start and holds known layers alone does not."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs

X = torch.randn(3, 12, 3)


class Stepping(nn.Module):
    """A model whose steps are taken in some way."""

    def __init__(self, run) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(3 + 4, 4), nn.Linear(4, 2)
        self.cell, self.gru, self.run = nn.GRUCell(3, 4), nn.GRU(3, 4, batch_first=True), run

    def step(self, h: Tensor, frame: Tensor) -> Tensor:
        return torch.tanh(self.mix(torch.cat([frame, h], -1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x, x.new_zeros(len(x), 4))


def by_index(model, x, h):
    for t in range(x.shape[1]):
        h = model.step(h, x[:, t])
    return h


def by_slices(model, x, h):
    for t in range(x.shape[1]):
        h = model.step(h, x[:, t : t + 1].squeeze(1))
    return h


def by_while(model, x, h):
    t = 0
    while t < x.shape[1]:
        h, t = model.step(h, x[:, t]), t + 1
    return h


def by_comprehension(model, x, h):
    return torch.stack([h := model.step(h, frame) for frame in x.unbind(1)], 1)


def by_reduce(model, x, h):
    return functools.reduce(model.step, x.unbind(1), h)


def by_accumulate(model, x, h):
    return torch.stack(list(itertools.accumulate(x.unbind(1), model.step, initial=h))[1:], 1)


def along_the_first_axis(model, x, h):
    for frame in x.transpose(0, 1):
        h = model.step(h, frame)
    return h


def from_nothing(model, x, _):
    h = None
    for frame in x.unbind(1):
        h = model.mix(torch.cat([frame, torch.ones(len(x), 4)], -1)) if h is None else model.step(h, frame)
    return h


def beside_a_cell(model, x, h):
    for frame in x.unbind(1):
        h = model.cell(frame + model.out(h)[:, :1], h)
    return h


UNDECIDED = [by_index, by_slices, by_while, by_comprehension, by_reduce, by_accumulate]
UNDECIDED += [along_the_first_axis, from_nothing, beside_a_cell]


@pytest.mark.parametrize("run", UNDECIDED)
def test_one_step_leaves_it_undecided_and_names_the_line(run):
    (why,) = hs.layers(Stepping(run), X[:, :1]).undecided()
    assert "test_short_calls.py:" in why
    assert "only one repetition: call the model with three or more" in why


@pytest.mark.parametrize("run", [run for run in UNDECIDED if run is not beside_a_cell])
def test_two_steps_too_and_three_decide(run):
    assert "only two repetitions" in hs.layers(Stepping(run), X[:, :2]).undecided()[0]
    assert not hs.layers(Stepping(run), X[:, :4]).undecided()


def a_layer(model, x, h):
    return model.out(model.gru(x, h[None])[0][:, -1])


def a_cell(model, x, h):
    out = []
    for frame in x.unbind(1):
        h = model.cell(frame, h)
        out.append(model.out(h))
    return torch.stack(out, 1)


def no_recurrence(model, x, _):
    return model.out(torch.tanh(model.mix(torch.cat([x, x[..., :1].expand(-1, -1, 4)], -1))))


@pytest.mark.parametrize("run", [a_layer, a_cell, no_recurrence])
def test_known_layers_and_models_without_steps_leave_nothing_undecided(run):
    assert not hs.layers(Stepping(run), X[:, :1]).undecided()


def test_lines_of_which_other_calls_have_told_can_be_left_out():
    model = Stepping(by_index)
    told = hs.layers(model, X).seen.examined
    assert not hs.layers(model, X[:, :1]).undecided(told)
