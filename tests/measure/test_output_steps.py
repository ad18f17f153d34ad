"""Which axis of an output is time, whatever the head."""

import pytest
import torch
from torch import nn

from hiddenstate.errors import BadInput
from hiddenstate.measure import memory
from hiddenstate.measure.output_steps import steps_second

STEPS, ROWS = 30, 5


class Tagger(nn.Module):
    """Scores of classes at each step, turned as its loss wants them."""

    def __init__(self, turn, *, kind=nn.GRU, classes=2, batch_first=True):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.fc = kind(3, 8, batch_first=batch_first), nn.Linear(8, classes)
        self.turn = turn

    def forward(self, x):
        return self.turn(self.fc(self.rnn(x)[0]))


class LoopingTagger(nn.Module):
    """The same with a cell in a loop."""

    def __init__(self, turn):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.fc, self.turn = nn.GRUCell(3, 8), nn.Linear(8, 2), turn

    def forward(self, x):
        h, seen = None, []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            seen.append(self.fc(h))
        return self.turn(torch.stack(seen, 1))


def plain(out):
    return out


@pytest.mark.parametrize("classes", [2, ROWS, STEPS, STEPS // 2])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_head_turned_for_cross_entropy_is_measured_like_the_unturned(kind, classes):
    x = torch.randn(ROWS, STEPS, 3)
    expected = memory(Tagger(plain, kind=kind, classes=classes), x)
    for turn in (
        lambda out: out.transpose(1, 2),
        lambda out: out.permute(0, 2, 1).unsqueeze(1),
        lambda out: out[..., None],
    ):
        found = memory(Tagger(turn, kind=kind, classes=classes), x)
        assert found.length == expected.length
        torch.testing.assert_close(found.curve, expected.curve)


@pytest.mark.parametrize("turn", [lambda out: out.permute(1, 2, 0), lambda out: out.transpose(0, 1), plain])
def test_time_first_models_may_turn_it_too(turn):
    x = torch.randn(STEPS, ROWS, 3)
    expected = memory(Tagger(plain, batch_first=False), x)
    torch.testing.assert_close(memory(Tagger(turn, batch_first=False), x).curve, expected.curve)


def test_a_loop_and_a_layer_of_its_own_with_an_output_turned():
    x = torch.randn(ROWS, STEPS, 3)
    torch.testing.assert_close(
        memory(LoopingTagger(lambda out: out.mT), x).curve, memory(LoopingTagger(plain), x).curve
    )
    layer = nn.GRU(3, 8, batch_first=True)
    torch.testing.assert_close(memory(layer, x, output=lambda out: out.mT).curve, memory(layer, x).curve)


@pytest.mark.parametrize("steps", [10, 12])
def test_as_many_classes_as_steps_are_no_steps(steps):
    model, x = Tagger(lambda out: out[:, -1], classes=10), torch.randn(ROWS, steps, 3)
    slow = memory(model, x, output=lambda out: out.unsqueeze(1).expand(ROWS, 3, 10))
    torch.testing.assert_close(memory(model, x).curve * 3**0.5, slow.curve)


def test_a_model_of_one_number_of_steps_is_read_by_sizes():
    class Fixed(Tagger):
        def forward(self, x):
            assert x.size(1) == STEPS
            return super().forward(x)

    x = torch.randn(ROWS, STEPS, 3)
    expected = memory(Tagger(plain), x)
    for turn in (plain, lambda out: out.mT):
        torch.testing.assert_close(memory(Fixed(turn), x).curve, expected.curve)
    with pytest.raises(BadInput, match=r"axes 2 and 3 are as long as the input, 30 steps.*output=lambda out"):
        memory(Fixed(lambda out: torch.stack([out.mT] * STEPS, 3)), x)


@pytest.mark.parametrize("turn", [lambda out: out[:, 1:], lambda out: out[:, ::2], lambda out: out[:, 1:].mT])
def test_an_output_of_another_length_asks_which_entry_is_meant(turn):
    with pytest.raises(BadInput, match=r"not one for each step, so which of them is the last is not told.*out\[:, "):
        memory(Tagger(turn), torch.randn(ROWS, STEPS, 3))


def test_what_is_said_there_is_right():
    model, x = Tagger(lambda out: out[:, 1:]), torch.randn(ROWS, STEPS, 3)
    found = memory(model, x, output=lambda out: out[:, -1])
    torch.testing.assert_close(found.curve, memory(Tagger(plain), x).curve)


def test_the_number_of_rows_never_decides():
    valid = torch.ones(4, 4, dtype=torch.bool)
    output = torch.randn(4, 4, 2)
    turned, by_step = steps_second(output, valid, time_axis=1, again=lambda steps: output[:steps])
    assert by_step
    assert torch.equal(turned, output.transpose(0, 1))


FLAT = [
    lambda out: out.flatten(0, 1),
    lambda out: out.flatten(0, 1).log_softmax(1).exp(),
    lambda out: out[..., 0].flatten(),
]


@pytest.mark.parametrize("flatten", FLAT)
@pytest.mark.parametrize("turn", [plain, lambda out: out.transpose(0, 1)])
@pytest.mark.parametrize("batch_first", [True, False])
def test_rows_and_steps_on_one_axis_are_parted_in_whatever_order(batch_first, turn, flatten):
    x = torch.randn(ROWS, STEPS, 3) if batch_first else torch.randn(STEPS, ROWS, 3)
    shaped = Tagger(lambda out: flatten(out).unflatten(0, out.shape[:2]), batch_first=batch_first)
    found = memory(Tagger(lambda out: flatten(turn(out)), batch_first=batch_first), x)
    torch.testing.assert_close(found.curve, memory(shaped, x).curve)


def test_where_no_order_is_known_it_is_asked_for():
    model = nn.Sequential(nn.GRU(3, 8, batch_first=True, bidirectional=True))
    with pytest.raises(BadInput, match=r"All steps in one axis are parted by output=lambda out: out.view\(5, 30, -1\)"):
        memory(model, torch.randn(ROWS, STEPS, 3), output=lambda out: out[0].flatten(0, 1))


@pytest.mark.parametrize("classes_first", [True, False])
@pytest.mark.parametrize("told", [{}, {"time_axis": 2, "batch_axis": 0}])
def test_time_behind_the_features_as_convolutions_have_it(told, classes_first):
    class Convolved(Tagger):
        def forward(self, x):  # (batch, feature, time)
            out = super().forward(x.transpose(1, 2))
            return out.transpose(1, 2) if classes_first else out

    x = torch.randn(ROWS, STEPS, 3)
    found = memory(Convolved(plain), x.transpose(1, 2), **told)
    assert (found.axes.time, found.axes.batch) == (2, 0)
    torch.testing.assert_close(found.curve, memory(Tagger(plain), x).curve)
