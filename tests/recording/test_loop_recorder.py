"""Loops are recorded as the user's own calls run them: once, with gradients, in every call."""

from __future__ import annotations

import random
import warnings
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.errors import RecordingWarning

B, H = 3, 4


class Elman(nn.Module):
    """A loop over time, whose state is also `divided` by a number that a caller may choose."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 + H, H)

    def forward(self, x: Tensor, scale: float = 1.0, h: Tensor | None = None) -> Tensor:
        h = x.new_zeros(len(x), H) if h is None else h
        out = []
        for frame in x.unbind(1):
            h = torch.tanh(self.mix(torch.cat([frame, h], 1)))
            if scale != 1.0:
                h = h * scale
            out.append(h)
        return torch.stack(out, 1)


class Stacked(nn.Module):
    """Two layers of the same code, of which the second one starts from where the first one ended."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.inner, self.high = Elman(), nn.Linear(H, 2), Elman()

    def forward(self, x: Tensor) -> Tensor:
        low = self.low(x)
        return self.high(self.inner(low), h=low[:, -1])


@given(steps=st.lists(st.integers(3, 9), min_size=4, max_size=7), rows=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_every_call_is_recorded_as_it_ran_however_long_it_is(steps, rows):
    model = Elman()
    with hs.record(model) as rec:
        outputs = [model(torch.randn(rows, n, 2)).detach() for n in steps]
    (track,) = rec
    for run, out in zip(rec.runs(track), outputs, strict=True):
        torch.testing.assert_close(run.h, out)
        assert run.initial is not None
        assert not run.initial["h"].any()


def test_loops_of_the_same_code_are_told_apart_in_every_call():
    model = Stacked()
    with hs.record(model) as rec:
        for n in (5, 7, 4, 6, 3):
            out = model(torch.randn(B, n, 2)).detach()
            low, high = (rec.runs(track)[-1] for track in rec)
            torch.testing.assert_close(high.h, out)
            torch.testing.assert_close(high.initial["h"], low.h[:, -1])


def test_from_the_third_call_on_only_the_places_that_make_states_are_tapped(monkeypatch):
    from hiddenstate.cells.behavior.model_call import ModelCall

    traced, real = [], ModelCall.real
    monkeypatch.setattr(ModelCall, "real", lambda *args: (traced.append(1), real(*args))[1])
    model = Elman()
    with hs.record(model) as rec:
        for _ in range(6):
            model(torch.randn(B, 5, 2))
    assert len(traced) == 2
    assert [len(rec.runs(track)) for track in rec] == [6]


def test_a_call_that_takes_another_way_is_not_recorded_wrongly_but_said_and_the_next_one_is_seen():
    model = Elman()
    with hs.record(model) as rec:
        for _ in range(3):
            model(torch.randn(B, 5, 2))
        with pytest.warns(RecordingWarning, match="took another way through its loops"):
            model(torch.randn(B, 5, 2), scale=0.5)
        (track,) = rec
        assert len(rec.runs(track)) == 3
        out = model(torch.randn(B, 5, 2), scale=0.5).detach()
    torch.testing.assert_close(rec.runs(track)[-1].h, out)


def test_at_most_one_call_is_lost_to_another_way():
    model = Elman()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hs.record(model) as rec:
            for number in range(12):
                model(torch.randn(B, 5, 2), scale=0.5 if number % 4 == 3 else 1.0)
    (track,) = rec
    assert len(rec.runs(track)) == 11
    assert ["took another way" in str(each.message) for each in caught] == [True]


def test_a_recording_that_begins_beside_another_one_sees_all_of_its_first_call():
    model = Stacked()
    with hs.record(model) as first:
        for _ in range(4):
            model(torch.randn(B, 5, 2))
        with hs.record(model) as second:
            out = model(torch.randn(B, 6, 2)).detach()
    for rec in (first, second):
        assert [run.h.shape[1] for run in (rec.runs(track)[-1] for track in rec)] == [6, 6]
        torch.testing.assert_close(rec.runs("high.loop" + list(rec)[1].rpartition("loop")[2])[-1].h, out)


def test_gradients_of_a_loop_are_those_that_reach_its_states():
    model, x = Elman(), torch.randn(B, 5, 2)
    for _ in range(3):
        with hs.record(model, grads=True) as rec:
            for _ in range(3):
                out = model(x)
                out.square().sum().backward()
        (track,) = rec
        states = []
        h = torch.zeros(B, H)
        for frame in x.unbind(1):
            h = torch.tanh(model.mix(torch.cat([frame, h], 1)))
            h.retain_grad()
            states.append(h)
        torch.stack(states, 1).square().sum().backward()
        expected = torch.stack([h.grad for h in states], 1)
        for run in rec.runs(track):
            torch.testing.assert_close(run.grads["h"], expected)


def test_a_recorded_call_moves_nothing_of_the_users_twice():
    numbers, drawn, ticks, seen = random.Random(0), random.Random(0), count(1), []

    class Impure(Elman):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(next(ticks))
            return super().forward(x * numbers.random())

    model, x = Impure(), torch.randn(B, 5, 2)
    fired = []
    model.mix.register_forward_hook(lambda *_: fired.append(1))
    with hs.record(model):
        outputs = [model(x) for _ in range(5)]
    assert seen == [1, 2, 3, 4, 5]
    assert len(fired) == 5 * 5
    for out in outputs:
        assert torch.equal(out, Elman.forward(model, x * drawn.random()))


class Neuron(nn.Module):
    """One step a call, with its state in an attribute that the first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.level = nn.Parameter(torch.ones(2)), None

    def forward(self, x: Tensor) -> Tensor:
        self.level = x if self.level is None else 0.9 * self.level + self.weight * x
        return self.level


def test_what_is_kept_from_call_to_call_is_recorded_from_the_first_call_on():
    model, calls = Neuron(), []
    with hs.record(model) as rec:
        for _ in range(4):
            calls.append(model(torch.randn(B, 2)).detach())
    (track,) = rec
    torch.testing.assert_close([run.h[:, -1] for run in rec.runs(track)], calls)


def test_one_call_does_not_tell_whether_what_is_kept_is_read_and_that_is_said():
    model = Neuron()
    with pytest.warns(RecordingWarning, match="level is kept by a call that found nothing there"), hs.record(model):
        model(torch.randn(B, 2))


def test_a_backward_pass_after_a_watched_call_finds_everything_as_the_call_left_it():
    """Our own work after the call writes into no tensor that its graph needs."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.norm = nn.Linear(2 + H, H), nn.BatchNorm1d(H)
            self.register_buffer("mean", torch.zeros(H))

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(len(x), H)
            for frame in x.unbind(1):
                h = torch.tanh(self.norm(self.mix(torch.cat([frame, h], 1))))
            self.mean.lerp_(h.detach().mean(0), 0.1)
            return h * self.mean

    plain, seen = Normed(), Normed()
    seen.load_state_dict(plain.state_dict())
    x = torch.randn(B, 5, 2)
    plain(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        with hs.record(seen):
            seen(x).sum().backward()
    for one, other in zip(plain.parameters(), seen.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(plain.buffers(), seen.buffers(), strict=True):
        assert torch.equal(one, other)
