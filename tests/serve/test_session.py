"""A session from outside: its name, and the file that it is exported to."""

import pytest
import torch
from torch import nn

from hiddenstate.errors import BadInput, SessionLost, StateFileError, StateMismatch
from hiddenstate.serve.futures import ResultFuture
from hiddenstate.serve.session import checked, named, read_import, with_facts
from hiddenstate.serve.trial import prepare
from hiddenstate.state import State, from_bytes, to_bytes


@pytest.fixture
def model():
    served = prepare(nn.GRU(3, 4, batch_first=True))
    yield served
    served.close()


def imported(model, state, *, any_model: bool = False):
    return read_import("a", ResultFuture(1), state, model=model, any_model=any_model)


def test_a_session_survives_its_file(model):
    state = State({"h": torch.randn(1, 1, 4)}, 1)
    facts = {"fingerprint": model.fingerprint, "seq": 7, "steps": 9, "anew": False}
    data = with_facts(to_bytes(state), facts)
    assert torch.equal(from_bytes(data)["h"], state["h"])  # still a file of a state
    op = imported(model, data)
    assert (op.session, op.seq, op.steps, op.row) == ("a", 7, 9, model.format.rows(state)[0])
    assert imported(model, with_facts(to_bytes(state), {**facts, "anew": True})).row is None


def test_a_file_of_another_model_or_of_none_is_refused_unless_wanted(model):
    data = to_bytes(model.initial())
    other = with_facts(data, {"fingerprint": "other", "seq": 1, "steps": 1, "anew": False})
    for given, message in ((data, "does not say which model it belongs to"), (other, "belongs to other")):
        with pytest.raises(SessionLost, match=f"{message}.*any_model=True"):
            imported(model, given)
        assert imported(model, given, any_model=True).row is not None


def test_what_is_no_state_of_one_session_is_refused(model):
    with pytest.raises(StateFileError, match="these bytes are no safetensors file"):
        imported(model, b"nothing", any_model=True)
    with pytest.raises(StateFileError, match="not of which model, or not how far it came"):
        imported(model, with_facts(to_bytes(model.initial()), {"seq": -1}), any_model=True)
    with pytest.raises(StateMismatch, match="this model's are one row of"):
        imported(model, State({"h": torch.zeros(1, 2, 4)}, 1))


def test_names():
    assert checked("a" * 512)
    assert named("a") == "a"
    assert named(None) != named(None)
    for name in ("", "a" * 513, 7):
        with pytest.raises(BadInput, match="but a name of 1 to 512 characters is needed"):
            checked(name)
