"""Which models may be served, and where their rows and steps are found."""

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.cells import listeners
from hiddenstate.errors import NotServable
from hiddenstate.serve.trial import prepare
from tests.support.models import Chunked, Deep, Siamese, Stepping, TimeFirst, ZerosInside


class BatchNormalized(nn.Module):
    """Normalizes over the rows of the batch, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.gru(x)[0]
        return out - out.mean(0, keepdim=True) if len(x) > 1 else out


class LastOnly(nn.Module):
    """Gives the last step's output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0][:, -1]


class Convolved(nn.Module):
    """Mixes steps before the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gru = nn.Conv1d(3, 3, 3, padding=1), nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.mix(x.transpose(1, 2)).transpose(1, 2))[0]


class Summed(nn.Module):
    """Gives one number for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0].sum()


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        (nn.LSTM(3, 4), (1, 0)),
        (nn.LSTM(3, 4, batch_first=True), (0, 1)),
        (Deep(), (0, 1)),
        (TimeFirst(), (1, 0)),
        (Stepping(nn.GRUCell(3, 4)), (0, 1)),
        (Chunked(), (0, 1)),
        (nn.LSTMCell(3, 4), (0, None)),
        (hs.Recurrent(nn.GRUCell, 3, 4), (0, 1)),
        (LastOnly(), (0, 1)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_rows_and_steps_are_found(model, axes):
    served = prepare(model)
    try:
        assert (served.layout.rows_axis, served.layout.steps_axis) == axes
        assert served.layout.step_shape == (3,)
    finally:
        served.close()


@pytest.mark.parametrize("example", [torch.randn(1, 1, 3), torch.randn(4, 6, 3), torch.randn(5, 5, 3)])
def test_an_example_of_any_size_will_do(example):
    for model, axes in ((nn.GRU(3, 4), (1, 0)), (nn.GRU(3, 4, batch_first=True), (0, 1))):
        served = prepare(model, example=example)
        assert (served.layout.rows_axis, served.layout.steps_axis) == axes
        served.close()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(3, 4), "Linear has no recurrent layer"),
        (nn.GRU(3, 4, bidirectional=True), "fed in pieces would not equal one call.*both directions"),
        (ZerosInside(), "fed in pieces would not equal one call.*zeros made in forward"),
        (Convolved(), "fed in pieces would not equal one call.*mixes steps"),
        (BatchNormalized(), r"what it gives for a row changes by .* with the rows beside it \(in output 0\)"),
        (Summed(), "no axis has one entry for each row"),
        (Siamese(), "no input could be made up that Siamese takes.*Engine\\(model, example=x\\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason_and_comes_back(model, reason):
    model.train()
    with pytest.raises(NotServable, match=reason):
        prepare(model)
    assert all(module.training for module in model.modules())
    assert not any(listeners(module) for module in model.modules())


def test_layers_that_see_other_rows_are_named():
    class Words(nn.Module):
        """Words within sentences: the inner layer runs more rows than there are callers."""

        def __init__(self):
            super().__init__()
            self.outer, self.inner = nn.GRU(3, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)

        def forward(self, x):
            return self.inner(self.outer(x)[0].repeat(2, 1, 1))[0][: len(x)]

    with pytest.raises(NotServable, match="with 2 rows in, inner saw 4, outer saw 2"):
        prepare(Words())


def test_an_example_that_does_not_fit_is_said_so():
    with pytest.raises(NotServable, match=r"GRU does not take inputs like the example \(2, 5, 7\)"):
        prepare(nn.GRU(3, 4), example=torch.randn(2, 5, 7))


@pytest.mark.parametrize("model", [Deep(), TimeFirst(), Stepping(nn.LSTMCell(3, 4)), nn.GRUCell(3, 4)])
def test_lengths_may_differ_where_that_is_exact(model):
    served = prepare(model)
    served.close()
    assert served.ragged


def test_lengths_may_not_differ_where_an_output_is_that_of_the_last_step():
    served = prepare(LastOnly())
    served.close()
    assert not served.ragged


class Insists(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, x, hidden):
        return self.rnn(x, hidden)[0]


class MayBegin(Insists):
    def forward(self, x, hidden=None):
        return self.rnn(x, hidden)[0]


def test_a_model_that_insists_on_a_state_is_refused_with_a_way_out():
    for example in (None, torch.randn(2, 5, 3), (torch.randn(2, 5, 3), torch.zeros(1, 2, 4))):
        with pytest.raises(NotServable, match=r"Insists.forward insists on 'hidden', but .* let it be hidden=None"):
            prepare(Insists(), example=example)


def test_an_example_may_be_the_arguments_of_a_call_with_a_state_among_them():
    x, h = torch.randn(2, 5, 3), torch.zeros(1, 2, 4)
    for example in ((x, h), [x, h], (x, (h, h)), (x, None)):
        prepared = prepare(MayBegin(), example=example)
        assert prepared.layout.step_shape == (3,)
        prepared.close()
    with pytest.raises(NotServable, match=r"is a tuple of \(Tensor, str\), but a session pushes one tensor"):
        prepare(MayBegin(), example=(x, "fast"))


def test_a_model_that_reads_steps_by_their_number_is_told_so():
    class Taps(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.out = nn.GRU(3, 8, batch_first=True), nn.Linear(16, 2)

        def forward(self, x):
            states, _ = self.gru(x)
            return self.out(torch.cat([states[:, 0], states[:, 10]], dim=1))

    with pytest.raises(NotServable, match=r"like the example \(1, 1, 3\).*reads steps by their number"):
        prepare(Taps(), example=torch.randn(1, 1, 3))
    said = r"no input could be made up that Taps takes.*reads steps by their number.*cannot be fed in pieces"
    with pytest.raises(NotServable, match=said):
        hs.serve.Engine(Taps())
    with pytest.raises(NotServable, match=r"a session fed in pieces would not equal one call|steps by their number"):
        hs.serve.Engine(Taps(), example=torch.randn(1, 30, 3))


@pytest.mark.parametrize("shape", [(1, 3), (1, 1, 3)])
def test_a_cell_of_ones_own_is_told_to_become_a_layer(shape):
    class Elman(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size = 4
            self.step = nn.Linear(7, 4)

        def forward(self, now, hidden):
            hidden = torch.tanh(self.step(torch.cat([now, hidden], 1)))
            return hidden, hidden

    with pytest.raises(NotServable, match=r"Elman takes one step and its state.*hs\.Recurrent\(Elman, input_size"):
        prepare(Elman(), example=torch.randn(shape))
