"""`check_cell`: every cell of ours passes, and for each law there is a cell that breaks it and is told so."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput, LawBroken
from hiddenstate.testing import check_cell
from hiddenstate.testing.check_cell import LAWS
from tests.support.cells import CELLS, HIDDEN, INPUT, TanhCell


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_every_cell_keeps_the_laws(sample):
    check_cell(sample.cell(), sample.x())
    check_cell(sample.cell(torch.float32))


def test_cells_made_of_others_keep_the_laws():
    check_cell(hs.regularize.Zoneout(TanhCell(), 0.3))


class Rowless(TanhCell):
    def initial_state(self, batch):
        return torch.zeros(3, self.hidden_size)


class Growing(TanhCell):
    def initial_state(self, batch):
        return torch.zeros(batch, self.hidden_size, dtype=torch.float64)

    def forward(self, x, h):
        return super().forward(x, h.float())


class Scalar(TanhCell):
    def initial_state(self, batch):
        return torch.zeros(batch, self.hidden_size)

    def forward(self, x, h):
        h = super().forward(x, h)
        return h.sum(), h


class Writing(TanhCell):
    def forward(self, x, h):
        return h.mul_(0.5).add_(super().forward(x, h))


class WritingInput(TanhCell):
    def forward(self, x, h):
        return super().forward(x.add_(1), h)


class Keeping(TanhCell):
    kept = 0.0

    def forward(self, x, h):
        self.kept = h = super().forward(x, h) + self.kept
        return h


class Noisy(TanhCell):
    def forward(self, x, h):
        return super().forward(x, h) + torch.randn_like(h)


class Mixing(TanhCell):
    def initial_state(self, batch):
        return torch.zeros(batch, self.hidden_size)

    def forward(self, x, h):
        return super().forward(x - x.mean(0), h)


class Hiding(TanhCell):
    """Has a state beside its state, that a first state of zeros begins anew."""

    def forward(self, x, h):
        if not h.any():
            self.steps = 0
        self.steps += 1
        return super().forward(x, h) * self.steps


BROKEN = {
    "first state": (Rowless, r"it can be told what its state is. .*no axis has one entry for each row"),
    "form": (Growing, r"form, shapes and dtypes.*'h' was \(3, 4\) torch.float64 on cpu and is .* torch.float32"),
    "output": (Scalar, r"its output is a tensor \(batch, \.\.\.\).*returned an output of shape \(\) for 3 rows"),
    "writing": (Writing, r"does not write into what it is given. Part 'h' of the state is another after the step"),
    "writing input": (WritingInput, r"does not write into what it is given. The input is another after the step"),
    "kept": (Keeping, r"depends on input and state alone.*run twice.*differs by up to .*kept in an attribute"),
    "noise": (Noisy, r"depends on input and state alone.*the output differs by up to"),
    "rows": (Mixing, r"a row does not depend on other rows. Row 0 among 3 rows, and alone: the output differs"),
    "cuts": (Hiding, r"cut anywhere.*others run in between. Cut after step 1 of 5: the output differs"),
}


@pytest.mark.parametrize(("kind", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_law_is_told_with_what_was_seen(kind, message):
    cell = kind()
    with pytest.raises(AssertionError, match=message) as caught:
        check_cell(cell, torch.randn(3, 5, INPUT))
    assert isinstance(caught.value, LawBroken)
    assert str(caught.value).startswith(f"{kind.__name__} breaks a law: ")


def test_what_is_no_cell_of_one_step_is_refused():
    with pytest.raises(LawBroken, match=r"LSTM breaks a law: a cell takes one step.*check_adapter"):
        check_cell(nn.LSTM(INPUT, HIDDEN))
    with pytest.raises(LawBroken, match="Linear is no recurrent layer or cell"):
        check_cell(nn.Linear(INPUT, HIDDEN))
    with pytest.raises(LawBroken, match=r"it takes a step of x from its own first state. RuntimeError"):
        check_cell(TanhCell(), torch.randn(3, 5, INPUT + 4))


def test_an_input_that_cannot_show_anything_is_refused():
    with pytest.raises(BadInput, match=r"x has shape \(1, 5, 3\), but .*2 rows and 2 steps"):
        check_cell(TanhCell(), torch.randn(1, 5, INPUT))


def test_the_cell_comes_back_as_it_was():
    cell = TanhCell().train()
    before, random = {name: value.clone() for name, value in cell.state_dict().items()}, torch.get_rng_state()
    calls = []
    cell.register_forward_hook(lambda *_: calls.append(1))
    check_cell(cell)
    assert cell.training
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in cell.state_dict().items())


def test_laws_are_sentences():
    assert all(law[0].islower() and not law.endswith(".") for law in LAWS)
