"""The patient: called as often as one likes, and given back as it was; each probe is measured once."""

import copy
import importlib

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.diagnosis import diagnose as examination
from hiddenstate.diagnosis.patient import PatientProbe
from hiddenstate.diagnosis.rule import Rule
from tests.diagnosis.patients.healthy import HEALTHY, Classifier, floats
from tests.diagnosis.patients.sick import SICK
from tests.support.untouched import untouched

TRACED = [
    "batch norm in training mode",
    "heavy dropout",
    "stateful with reset",
    "learned initial state that is trained",
    "packed inside with lengths",
]


@pytest.mark.parametrize("name", TRACED)
def test_the_model_comes_back_as_it_was(name):
    model, inputs, options = HEALTHY[name]()
    optimizer = torch.optim.Adam(model.parameters())
    out = model(*inputs)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    optimizer.step()
    model.train()
    before = copy.deepcopy(optimizer.state_dict())
    kept = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    with untouched(model):
        hs.diagnose(model, *inputs, **{**options, "optimizer": optimizer})
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True) if isinstance(a, torch.Tensor))


def test_a_state_kept_by_the_model_is_there_afterwards():
    model, (x,), _ = SICK["hidden state kept with its graph"][1]()
    model(x)
    kept = model.hidden
    hs.diagnose(model, x)
    assert model.hidden is kept
    assert model.hidden[0].grad_fn is not None


def test_a_tensor_that_the_model_would_change_in_place_stays_as_it_was():
    model, (x, state), _ = SICK["state changed in place"][1]()
    before = [part.clone() for part in state]
    hs.diagnose(model, x, state)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


def test_a_carried_model_gets_a_note_and_goes_on_where_it_was():
    model = Classifier()
    with hs.Carry(model) as carry:
        model(floats())
        before = {name: part.clone() for name, part in carry.state.items()}
        (note,) = hs.diagnose(model, floats())
        assert (note.code, note.severity) == ("HS201", "note")
        assert "hs.Carry" in note.cause
        assert all(torch.equal(before[name], part) for name, part in carry.state.items())


def test_it_works_where_gradients_are_off():
    with torch.inference_mode():
        assert hs.diagnose(Classifier(), floats()).ok
    with torch.no_grad():
        model, inputs, _ = SICK["detached inside the loop"][1]()
        assert hs.diagnose(model, *inputs).codes == ("HS105",)


def examination_module():
    """The module, which the function that it promises hides from an import."""
    return importlib.import_module(examination.__module__)


def test_a_probe_is_measured_once_and_its_failure_is_raised_for_everyone_who_asks(monkeypatch):
    class Failing(PatientProbe):
        measured = 0

        @classmethod
        def measure(cls, patient):
            cls.measured += 1
            raise ValueError(f"measured {cls.measured} times")

    checks = [Rule(f"HS90{k}", "a toy", lambda patient: patient[Failing], probes=(Failing,)) for k in range(3)]
    monkeypatch.setattr(examination_module(), "RULES", tuple(checks))
    report = hs.diagnose(nn.GRU(3, 4, batch_first=True), torch.randn(4, 6, 3))
    assert report.failed == {f"HS90{k}": "ValueError: measured 1 times" for k in range(3)}
