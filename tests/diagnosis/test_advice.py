"""Advice is code that runs, and fits the kind of layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.diagnosis.advice import CLIPPING, FILLING, detaching, freezing, remembering
from hiddenstate.diagnosis.rules import RULES
from tests.diagnosis.patients.followed import FOLLOWED, RUN, count, followed, names, sick

LAYERS = {
    "rnn": lambda: nn.RNN(3, 4),
    "gru": lambda: nn.GRU(3, 4),
    "lstm": lambda: nn.LSTM(3, 4),
    "three layers": lambda: nn.LSTM(3, 4, 3),
    "two layers of a GRU": lambda: nn.GRU(3, 4, 2, bidirectional=True),
    "without bias": lambda: nn.LSTM(3, 4, bias=False),
    "lstm cell": lambda: nn.LSTMCell(3, 4),
    "gru cell": lambda: nn.GRUCell(3, 4),
    "rnn cell": lambda: nn.RNNCell(3, 4, bias=False),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_remembering_runs_and_changes_the_layer_alone(kind, inside):
    layer = LAYERS[kind]()
    model = nn.Sequential(nn.Linear(3, 3), layer) if inside else layer
    before = {name: p.clone() for name, p in model.named_parameters()}
    exec(remembering(hs.layers(model)[0]), {"torch": torch, "model": model})
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("_hh" in name or "bias_ih" in name for name in moved)


@pytest.mark.parametrize("kind", ["lstm", "gru", "three layers", "lstm cell", "gru cell"])
def test_a_gated_layer_then_passes_on_more_of_its_gradient(kind):
    layer = LAYERS[kind]()

    def reach():
        state = torch.zeros(getattr(layer, "num_layers", 1), 1, 4)
        x = 0.1 * torch.ones(30, 1, 3, requires_grad=True)
        if isinstance(layer, nn.RNNBase):
            out = layer(x)[0]
        else:
            state = None
            for x_t in x:
                out = state = layer(x_t, state)
            out = out[0] if isinstance(out, tuple) else out
            out = out.unsqueeze(0)
        sizes = torch.autograd.grad(out[-1].square().sum(), x)[0].norm(dim=(1, 2))
        return float(sizes[0] / sizes[-1])

    before = reach()
    exec(remembering(hs.layers(layer)[0]), {"torch": torch, "model": layer})
    assert reach() > before


def test_a_cell_of_ones_own_gets_words():
    assert remembering(None).startswith("#")


@pytest.mark.parametrize("kind", LAYERS)
def test_detaching_fits_what_the_layer_takes(kind):
    layer = LAYERS[kind]()
    x = torch.randn(2, 3) if "cell" in kind else torch.randn(5, 2, 3)
    result = layer(x)
    hidden = result if "cell" in kind else result[1]
    names = {"hidden": hidden}
    exec(detaching([], hs.layers(layer)), names)
    again = layer(x, names["hidden"])
    assert not any(part.requires_grad for part in hs.State(dict(enumerate_parts(names["hidden"]))).values())
    assert again is not None


def enumerate_parts(hidden):
    return ((f"p{i}", part) for i, part in enumerate(hidden if isinstance(hidden, tuple) else (hidden,)))


def test_freezing_names_the_module_or_the_parameter():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "left": nn.Linear(2, 2)})
    advice = freezing(["left.weight", "left.bias"], model)
    assert advice.startswith("model.left.requires_grad_(False)")
    exec(freezing(["used.bias"], model), {"model": model})
    assert model["used"].weight.requires_grad
    assert not model["used"].bias.requires_grad


def test_the_lines_that_are_always_the_same_run():
    model = nn.GRU(3, 4)
    model(torch.randn(5, 2, 3))[0].sum().backward()
    names = {"torch": torch, "model": model, "x": torch.tensor([float("nan"), 1.0])}
    exec(CLIPPING, names)
    exec(FILLING, names)
    assert names["x"].tolist() == [0.0, 1.0]


ROWS = [(code, name, change) for code, rows in FOLLOWED.items() for name, change in rows]


@pytest.mark.sample(28)
@pytest.mark.filterwarnings("ignore:.*not used in this call:hiddenstate.errors.HiddenStateWarning")
@pytest.mark.parametrize(("code", "name", "change"), ROWS, ids=[f"{code} {name}" for code, name, _ in ROWS])
def test_a_patient_whose_advice_is_followed_is_cured_and_gets_nothing_else(code, name, change):
    torch.manual_seed(0)
    model, inputs, options = sick(name)
    before = hs.diagnose(model, *inputs, **options)
    finding = next(finding for finding in before if finding.code == code)
    if change is RUN:
        lines = finding.advice.partition("  #")[0]
        exec(lines, {**names(), "model": model, "optimizer": options.get("optimizer")})
    else:
        torch.manual_seed(0)
        model, inputs, options = followed(name, change)
    after = hs.diagnose(model, *inputs, **options)
    assert after.ok, f"{finding}\n\n{after.text()}"
    assert after.failed == {}


def test_advice_of_every_code_is_tried_out_on_three_patients():
    few = {rule.code: count(rule.code) for rule in RULES if not rule.monitored and count(rule.code) < 3}
    assert few == {}
