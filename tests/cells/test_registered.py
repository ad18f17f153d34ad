"""A kind of layer that users teach the library: fused, with names and a layout of its own."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import layers
from hiddenstate.serve import Engine
from tests.support.registered import LEAKY, Leaky, Reader

X = torch.randn(9, 2, 3)  # (time, batch, feature)


def test_it_is_found_with_its_own_kind():
    (layer,) = layers(Reader())
    assert (layer.name, layer.kind, layer.fused, layer.tracks) == ("leaky", "leaky", True, ("leaky.l0",))


@pytest.mark.parametrize("kind", LEAKY)
@pytest.mark.parametrize("call", [lambda m, x: m(x), lambda m, x: m(sequence=x), lambda m, x: m.forward(x)])
def test_its_state_is_carried(call, kind):
    model = Reader(kind)
    whole = model(X)
    with hs.Carry(model) as carry:
        torch.testing.assert_close(torch.cat([call(model, X[:4]), call(model, X[4:])]), whole)
        assert list(carry.state) == ["leaky.memory"]
        carry.reset()
        carry.mark(lengths=torch.tensor([9, 5]))
        call(model, X)
        torch.testing.assert_close(carry.state["leaky.memory"][1:], model.leaky.run_alone(X[:5, 1:]))
    assert hs.check_split(model, X, time_axis=0)


@pytest.mark.parametrize("kind", LEAKY)
@pytest.mark.parametrize("call", [lambda m, x: m(x), lambda m, x: m(sequence=x), lambda m, x: m.forward(x)])
def test_its_states_are_recorded(call, kind):
    model = Reader(kind)
    with hs.record(model) as rec:
        call(model, X)
    h = rec["leaky"].h
    assert h.shape == (2, 9, 4)
    for t in range(9):
        torch.testing.assert_close(h[:, t], model.leaky.run_alone(X[: t + 1]))


def test_two_layers_of_it_are_told_apart_and_one_is_stepped():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Leaky(3, 4), Leaky(4, 4)

        def forward(self, sequence):
            memory, outs = None, []
            for step in self.first(sequence)[0].split(1):
                out, memory = self.second(step, memory)
                outs.append(out)
            return torch.cat(outs)

    model = Two()
    with hs.record(model) as rec:
        out = model(X)
    torch.testing.assert_close(rec["second"].h.transpose(0, 1), out)
    assert len(rec.runs("first")) == 1


@pytest.mark.parametrize("kind", LEAKY)
def test_wherever_it_takes_its_state_it_is_run_from_it(kind):
    layer = kind(3, 4)
    rows, lengths = X.transpose(0, 1), torch.tensor([4, 9])
    _, middle = hs.unroll(layer, rows[:, :3], time_axis=1)
    _, last = hs.unroll(layer, rows[:, 3:], middle, lengths=lengths - 3, time_axis=1)
    torch.testing.assert_close(last["memory"][1:], layer.run_alone(X[:, 1:]))
    torch.testing.assert_close(last["memory"][:1], layer.run_alone(X[:4, :1]))
    found = hs.measure.jacobians(layer, rows)
    torch.testing.assert_close(found.values[0, 0], 0.7 * torch.eye(4, dtype=found.values.dtype))
    model = Reader(kind)
    with Engine(model) as engine:
        engine.open("one")
        pieces = [engine.push("one", piece) for piece in X[:, 0].split([3, 6])]
    torch.testing.assert_close(torch.cat(pieces), model(X)[:, 0])
