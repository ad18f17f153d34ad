"""What the first edition wrote still opens: recordings, checkpoints, states and sessions."""

import shutil

import pytest
import torch

import hiddenstate as hs
from tests.support.first_edition import DATA, Model, X


@pytest.fixture
def model():
    return Model().eval()


def test_its_recordings_open_and_hold_what_a_recording_holds_now(model):
    old = hs.load_recording(DATA / "recording")
    with torch.no_grad(), hs.record(model, gates=True) as new:
        model(X)
        model(X[:, :4])
    assert list(old) == list(new) == ["lstm.l0", "lstm.l1", "cell"]
    for track in new:
        for one, other in zip(old.runs(track), new.runs(track), strict=True):
            assert (one.kind, one.states.keys(), one.gates.keys()) == (
                other.kind,
                other.states.keys(),
                other.gates.keys(),
            )
            for name, value in {**other.states, **other.gates}.items():
                torch.testing.assert_close({**one.states, **one.gates}[name], value)


def test_its_checkpoints_of_a_carry_go_on(model):
    with torch.no_grad(), hs.Carry(model) as carry:
        carry.load_state_dict(torch.load(DATA / "carry.pt"))
        out = model(X[:, 4:])
    with torch.no_grad():
        torch.testing.assert_close(out[:1], model(X[:1])[:, 4:])
        torch.testing.assert_close(out[1:], model(X[1:, 4:]))  # that row was reset


def test_its_states_go_on(model):
    with torch.no_grad(), hs.Carry(model) as carry:
        carry.state = hs.load(DATA / "state.safetensors")
        out = model(X[:, 4:])
    with torch.no_grad():
        torch.testing.assert_close(out, model(X)[:, 4:])


def test_its_sessions_go_on(model, tmp_path):
    shutil.copy(DATA / "sessions.sqlite", tmp_path)
    with hs.serve.Engine(model, f"sqlite:///{tmp_path / 'sessions.sqlite'}", example=X) as engine:
        out = engine.push("one", X[0, 4:])
    with torch.no_grad():
        torch.testing.assert_close(out, model(X)[0, 4:])
