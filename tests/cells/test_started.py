"""Models whose forward insists on a state, as articles write them: called with a sequence alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.cells import started
from hiddenstate.errors import BadInput


class PassesOn(nn.Module):
    """The state goes to the layer as it is: None will do."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.rnn, self.fc = nn.GRU(3, 6, batch_first=batch_first), nn.Linear(6, 2)

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        out, hidden = self.rnn(x, hidden)
        return self.fc(out), hidden

    def init_hidden(self, batch_size: int) -> Tensor:
        return torch.zeros(1, batch_size, 6)


class TakesApart(nn.Module):
    """The state is taken apart on its way: None will not do."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.rnn, self.fc = nn.LSTM(3, 6, num_layers=2, batch_first=batch_first), nn.Linear(6, 2)

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        h, c = hidden
        out, hidden = self.rnn(x, (h, c))
        return self.fc(out), hidden


class TwoArguments(TakesApart):
    def forward(self, x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        out, (h, c) = self.rnn(x, (h0, c0))
        return self.fc(out), h, c


class OwnStart(TakesApart):
    """Its own first state is no state of zeros."""

    def init_hidden(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.full((2, batch_size, 6), 0.5), torch.full((2, batch_size, 6), -0.5)


class StepsACell(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.axis, self.cell, self.fc = int(batch_first), nn.GRUCell(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for step in x.unbind(self.axis):
            state = self.cell(step, state)
            outputs.append(self.fc(state))
        return torch.stack(outputs, self.axis), state


STYLES = [PassesOn, TakesApart, TwoArguments, OwnStart, StepsACell]
X, Y = torch.randn(4, 12, 3), torch.randn(4, 12, 2)


def first_state(model: nn.Module, rows: int) -> tuple[Any, ...]:
    if isinstance(model, PassesOn):
        return (torch.zeros(1, rows, 6),)
    if isinstance(model, StepsACell):
        return (torch.zeros(rows, 6),)
    if isinstance(model, OwnStart):
        return (model.init_hidden(rows),)
    zeros = torch.zeros(2, rows, 6)
    return (zeros, zeros) if isinstance(model, TwoArguments) else ((zeros, zeros),)


def laid_out(x: Tensor, batch_first: bool) -> Tensor:
    return x if batch_first else x.transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_a_model_gets_the_first_state_it_insists_on(style: Any, batch_first: bool) -> None:
    model, x = style(batch_first), laid_out(X, batch_first)
    torch.testing.assert_close(started(model, x)(x)[0], model(x, *first_state(model, 4))[0])


@pytest.mark.parametrize("style", STYLES)
def test_trying_changes_nothing(style: Any) -> None:
    model = style().train()
    stream = torch.get_rng_state()
    started(model, X)
    assert model.training
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(parameter.grad is None for parameter in model.parameters())


def by_hand(model: nn.Module, x: Tensor, y: Tensor, k: int, axis: int) -> list[Tensor]:
    """Truncated backpropagation as an article writes it."""
    state, losses = first_state(model, 4), []
    for begin in range(0, x.shape[axis], k):
        out, *state = model(x.narrow(axis, begin, k), *state)
        loss = (out - y.narrow(axis, begin, k)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        state = [tuple(h.detach() for h in part) if isinstance(part, tuple) else part.detach() for part in state]
    return losses


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_tbptt_hands_the_state_on_as_a_loop_by_hand_does(style: Any, batch_first: bool) -> None:
    model, x, y = style(batch_first), laid_out(X, batch_first), laid_out(Y, batch_first)
    losses = by_hand(model, x, y, 4, int(batch_first))
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    found = list(hs.tbptt(model, x, y, lambda out, y: (out[0] - y).square().mean(), k1=4))
    torch.testing.assert_close(found, losses)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


@pytest.mark.parametrize("style", STYLES)
def test_tbptt_reaches_as_far_back_as_the_whole_sequence(style: Any) -> None:
    model = style()
    (model(X, *first_state(model, 4))[0] - Y)[:, 8:].square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    for _ in hs.tbptt(model, X, Y, lambda out, y: (out[0] - y).square().mean(), k1=4, k2=12):
        last = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
    torch.testing.assert_close(last, expected)


@pytest.mark.parametrize("style", STYLES)
def test_what_takes_a_sequence_alone_takes_such_models(style: Any) -> None:
    model = style()
    assert hs.check_split(model, X)
    assert hs.measure.memory(model, X).rows.shape == (4, 12)
    with hs.record(model) as recording, torch.no_grad():
        model(X, *first_state(model, 4))
    track = recording[list(recording)[-1]]
    torch.testing.assert_close(hs.measure.compare(model=model, inputs=list(X)).states, track.h[:, -1])


class Masked(PassesOn):
    def forward(self, x: Tensor, mask: Tensor, hidden: Any) -> Tensor:  # type: ignore[override]
        return self.rnn(x * mask, hidden)[0]


class OfItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 6, batch_first=True)

    def forward(self, x: Tensor, hidden: Any) -> Tensor:
        return self.rnn(x, hidden["slow"] + hidden["fast"])[0]


def test_what_cannot_be_handed_in_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"Masked.forward needs 'mask' and 'hidden' besides.*'mask' is not named like"):
        started(Masked(), X)
    message = (
        r"OfItsOwn.forward needs 'hidden' besides the sequence, and takes neither None for it \(TypeError.*init_hid"
    )
    for ask in (
        lambda: hs.tbptt(OfItsOwn(), X, Y, lambda out, y: out.sum(), k1=3),
        lambda: hs.check_split(OfItsOwn(), X),
        lambda: hs.measure.compare(model=OfItsOwn(), inputs=list(X)),
        lambda: hs.measure.memory(OfItsOwn(), X),
    ):
        with pytest.raises(BadInput, match=message):
            ask()


class OwnForm(OfItsOwn):
    def init_hidden(self, batch: int) -> dict[str, Tensor]:
        return {"slow": torch.zeros(1, batch, 6), "fast": torch.zeros(1, batch, 6)}


def test_a_state_in_a_form_of_the_models_own_starts_it_but_does_not_carry_it() -> None:
    assert hs.measure.memory(OwnForm(), X).rows.shape == (4, 12)
    for ask in (
        lambda: hs.tbptt(OwnForm(), X, Y, lambda out, y: out.sum(), k1=3),
        lambda: hs.check_split(OwnForm(), X),
    ):
        with pytest.raises(BadInput, match=r"takes neither None nor the states of its layers, so .* cannot go on from"):
            ask()


def test_a_cell_is_refused_by_tbptt_with_a_way_out() -> None:
    with pytest.raises(BadInput, match=r"GRUCell takes one step at a time.*hs.Recurrent\(GRUCell, input_size, hidden"):
        hs.tbptt(nn.GRUCell(3, 2), X, Y, lambda out, y: out.sum(), k1=3)
