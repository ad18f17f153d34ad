"""The states of a call: those that a recording shows, and what they show."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.diagnosis.probes.states import (
    ConstantStates,
    IdenticalRows,
    RecordedStates,
    SaturatedStates,
    VariedStates,
    real,
)
from tests.support.admitted import admitted
from tests.support.models import Chunked


class Net(nn.Module):
    """A layer, and what is done with its input beforehand."""

    def __init__(self, before=lambda x: x, scale=1.0):
        super().__init__()
        self.lstm, self.before, self.scale = nn.LSTM(3, 4, batch_first=True), before, scale
        with torch.no_grad():
            for weight in self.lstm.parameters():
                weight.mul_(scale)

    def forward(self, x):
        return self.lstm(self.before(x))[0]


X = torch.randn(5, 7, 3)


def test_they_are_those_of_a_recording_and_of_another_input():
    model = Net()
    with hs.record(model) as recording:
        model(X)
    with admitted(model, X) as patient:
        assert torch.equal(patient[RecordedStates]["lstm.l0"].h, recording["lstm.l0"].h)
        varied = patient[VariedStates]["lstm.l0"].h
        assert (varied != recording["lstm.l0"].h).flatten(1).any(1).all()


def test_runs_of_one_step_each_are_one_trajectory():
    class Stepped(Chunked):
        def forward(self, x):
            state, outs = None, []
            for step in x.split(1, dim=1):
                out, state = self.lstm(step, state)
                outs.append(out)
            return torch.cat(outs, dim=1)

    model = Stepped()
    with admitted(model, X) as patient:
        track = patient[RecordedStates]["lstm.l0"]
        torch.testing.assert_close(track.h, model.lstm(X)[0].detach())
        assert track.c.shape == track.gates["forget"].shape == (5, 7, 4)


def test_a_track_with_nan_is_left_out_of_the_finite_ones():
    with admitted(Net(lambda x: x.sqrt()), X) as patient:
        assert set(patient[RecordedStates]) == {"lstm.l0"}
        assert patient[RecordedStates].finite() == {}


def test_padding_is_not_real():
    track = hs.Trajectory(torch.arange(6.0).reshape(2, 3, 1), torch.tensor([3, 1]))
    assert real(track, track.h).flatten().tolist() == [0, 1, 2, 3]


def resting():
    """A layer that is at rest from its first step on: it forgets all, and writes the same."""
    model = Net(scale=0.0)
    with torch.no_grad():
        model.lstm.bias_ih_l0.copy_(torch.tensor([9.0, -90.0, 9.0, 0.0]).repeat_interleave(4))
    return model


SEEN = {
    "nothing": (Net, set()),
    "pressed against its bounds": (lambda: Net(scale=500.0), {"SaturatedStates"}),
    "the same in all rows": (lambda: Net(lambda x: x.mean(0, keepdim=True).expand_as(x)), {"IdenticalRows"}),
    "the same at all steps": (resting, {"IdenticalRows", "ConstantStates"}),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_is_wrong_with_them_is_named_with_its_track_and_nothing_else_is(name):
    make, wanted = SEEN[name]
    probes = (SaturatedStates, IdenticalRows, ConstantStates)
    with admitted(make(), X) as patient:
        tracks = {probe.__name__: patient[probe].track for probe in probes}
    assert tracks == {probe.__name__: "lstm.l0" if probe.__name__ in wanted else "" for probe in probes}
