"""One rule for the time axis: whatever takes an input gives the same for a model and for its time-first twin."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.errors import BadInput

measure = hs.measure


class Net(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.rnn = kind(3, 5, batch_first=True)  # type: ignore[call-arg]
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head, self.axis = nn.LSTMCell(3, 5), nn.Linear(5, 2), 1

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in x.unbind(self.axis):
            state = self.cell(step, state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs, self.axis)


def twin(model: nn.Module) -> nn.Module:
    """The same weights, taking (time, batch, ...)."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if hasattr(module, "batch_first"):
            module.batch_first = False
        if isinstance(module, Looped):
            module.axis = 0
    return other


MODELS = {"gru": lambda: Net(), "lstm": lambda: Net(nn.LSTM), "loop": Looped}
LAYERS = {
    "rnn": lambda: nn.RNN(3, 5, batch_first=True),
    "lstm": lambda: nn.LSTM(3, 5, num_layers=2, batch_first=True),
    "recurrent": lambda: hs.Recurrent(nn.GRUCell, 3, 5, batch_first=True),
}
ON_MODELS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "memory": lambda model, x: measure.memory(model, x).rows,
    "compare": lambda model, x: (
        measure.compare(model=model, inputs=[torch.linspace(0, n, 3 * n).reshape(n, 3) for n in (4, 9, 6)]).states
    ),
    "check_split": lambda model, x: torch.tensor([bool(hs.check_split(model, x)), hs.check_split(model, x).at]),
}
ON_LAYERS = {
    "memory": ON_MODELS["memory"],
    "jacobians": lambda layer, x: measure.jacobians(layer, x).values,
    "lyapunov": lambda layer, x: measure.lyapunov(layer, x, k=2).exponents,
    "positions": lambda layer, x: measure.positions(layer, x).distances,
    "check_split": ON_MODELS["check_split"],
}


@pytest.mark.parametrize("shape", [(2, 12, 3), (12, 2, 3), (7, 7, 3)], ids=str)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("ask", ON_MODELS.values(), ids=ON_MODELS)
def test_a_time_first_model_is_measured_as_its_twin_is(ask: Any, make: Any, shape: tuple[int, ...]) -> None:
    model, x = make(), torch.randn(shape)
    torch.testing.assert_close(ask(twin(model), x.transpose(0, 1)), ask(model, x))


@pytest.mark.parametrize("shape", [(2, 12, 3), (12, 2, 3), (7, 7, 3)], ids=str)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("ask", ON_LAYERS.values(), ids=ON_LAYERS)
def test_a_time_first_layer_is_measured_as_its_twin_is(ask: Any, make: Any, shape: tuple[int, ...]) -> None:
    layer, x = make(), torch.randn(shape)
    torch.testing.assert_close(ask(twin(layer), x.transpose(0, 1)), ask(layer, x))


@pytest.mark.parametrize("make", [*LAYERS.values(), lambda: nn.GRUCell(3, 5)], ids=[*LAYERS, "cell"])
def test_unroll_takes_x_as_the_layer_does(make: Any) -> None:
    layer, x = make(), torch.randn(3, 8, 3)
    out, state = hs.unroll(layer, x)
    for other, told in ((twin(layer), {}), (layer, {"time_axis": 0}), (layer, {"batch_axis": 1})):
        if isinstance(layer, nn.GRUCell) and not told:
            continue
        theirs, last = hs.unroll(other, x.transpose(0, 1), lengths=None, **told)
        torch.testing.assert_close(theirs.transpose(0, 1), out)
        assert all(torch.allclose(last[part], state[part]) for part in state)
    if not isinstance(layer, nn.GRUCell):
        torch.testing.assert_close(hs.unroll(twin(layer), x.transpose(0, 1))[0], twin(layer)(x.transpose(0, 1))[0])


@pytest.mark.parametrize("lengths", [None, [8, 3, 5]])
def test_unroll_keeps_lengths_and_resets_in_either_layout(lengths: list[int] | None) -> None:
    layer, x, resets = nn.LSTM(3, 5, batch_first=True), torch.randn(3, 8, 3), torch.rand(3, 8) < 0.3
    out, _ = hs.unroll(layer, x, lengths=lengths, resets=resets)
    theirs, _ = hs.unroll(twin(layer), x.transpose(0, 1), lengths=lengths, resets=resets)
    torch.testing.assert_close(theirs.transpose(0, 1), out)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("k1", "k2"), [(3, 3), (4, 8), (2, 5)])
def test_tbptt_cuts_the_time_of_a_time_first_model(make: Any, k1: int, k2: int) -> None:
    model, x, y = make(), torch.randn(9, 9, 3), torch.randn(9, 9, 2)
    other = twin(model)
    ours = list(hs.tbptt(model, x, y, nn.functional.mse_loss, k1=k1, k2=k2))
    theirs = list(hs.tbptt(other, x.transpose(0, 1), y.transpose(0, 1), nn.functional.mse_loss, k1=k1, k2=k2))
    torch.testing.assert_close(torch.stack(theirs), torch.stack(ours))
    for mine, their in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(their.grad, mine.grad)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_recurrent_may_be_time_first_as_torchs_layers_are(bidirectional: bool) -> None:
    stack = hs.Recurrent(nn.LSTMCell, 3, 5, num_layers=2, bidirectional=bidirectional)
    other = hs.Recurrent(nn.LSTMCell, 3, 5, num_layers=2, bidirectional=bidirectional, batch_first=False)
    other.load_state_dict(stack.state_dict())
    x = torch.randn(4, 7, 3)
    out, (h, c) = stack(x, lengths=[7, 2, 5, 1])
    theirs, (h2, c2) = other(x.transpose(0, 1), lengths=[7, 2, 5, 1])
    torch.testing.assert_close((theirs.transpose(0, 1), h2, c2), (out, h, c))
    torch.testing.assert_close(other(x[0])[0], stack(x[0])[0])
    packed = nn.utils.rnn.pack_padded_sequence(x, [7, 5, 2, 1], batch_first=True)
    torch.testing.assert_close(other(packed)[0].data, stack(packed)[0].data)
    with hs.record(other) as ours, torch.no_grad():
        other(x.transpose(0, 1))
    with hs.record(stack) as recorded, torch.no_grad():
        stack(x)
    torch.testing.assert_close(ours["l1"].h, recorded["l1"].h)
    assert "batch_first=False" in repr(other)
    assert "batch_first" not in repr(stack)


def test_a_carried_time_first_recurrent_goes_on_where_it_was() -> None:
    stack, x = hs.Recurrent(nn.GRUCell, 3, 5, batch_first=False), torch.randn(8, 2, 3)
    whole = stack(x)[0]
    with hs.Carry(stack):
        torch.testing.assert_close(torch.cat([stack(x[:3])[0], stack(x[3:])[0]]), whole)


def test_what_was_assumed_is_said() -> None:
    model, x = twin(Net()), torch.randn(12, 2, 3)
    assert "time on axis 0, rows on axis 1: so rnn took it" in str(hs.check_split(model, x))
    assert "time on axis 0" in str(measure.memory(model, x))
    assert "time on axis" not in str(hs.check_split(Net(), x))
    with pytest.raises(BadInput, match=r"along axis 0, one target for each step \(time on axis 0.*so rnn took it"):
        hs.tbptt(model, x, torch.randn(2, 12, 2), nn.functional.mse_loss, k1=3)
