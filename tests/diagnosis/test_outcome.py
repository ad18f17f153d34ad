"""The calls of a model's layers: the same is collected, and measured in training, however a layer is called."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import hiddenstate as hs
from hiddenstate.cells import layers
from hiddenstate.diagnosis.outcome import collected
from tests.support.untouched import untouched

WAYS = {
    "layer(x, h)": lambda layer, x, h: layer(x, h),
    "layer(x, hx=h)": lambda layer, x, h: layer(x, hx=h),
    "layer(input=x, hx=h)": lambda layer, x, h: layer(input=x, hx=h),
    "layer(hx=h, input=x)": lambda layer, x, h: layer(hx=h, input=x),
    "layer.forward(x, h)": lambda layer, x, h: layer.forward(x, h),
    "layer.forward(hx=h, input=x)": lambda layer, x, h: layer.forward(hx=h, input=x),
    "checkpoint(layer, x, h)": lambda layer, x, h: checkpoint(layer, x, h, use_reentrant=False),
    "checkpoint(layer, hx=h, input=x)": lambda layer, x, h: checkpoint(
        lambda a, b: layer(hx=b, input=a), x, h, use_reentrant=False
    ),
    "checkpoint(layer, x, h), reentrant": lambda layer, x, h: checkpoint(layer, x, h, use_reentrant=True),
    "checkpoint(layer.forward, x, h), reentrant": lambda layer, x, h: checkpoint(
        layer.forward, x, h, use_reentrant=True
    ),
}
KINDS = {
    "gru": lambda: nn.GRU(3, 8, batch_first=True),
    "gru, time first": lambda: nn.GRU(3, 8),
    "lstm": lambda: nn.LSTM(3, 8, batch_first=True),
    "rnn of two layers": lambda: nn.RNN(3, 8, 2, batch_first=True),
    "gru cell": lambda: nn.GRUCell(3, 8),
}


class Calling(nn.Module):
    """A model that calls its layer in some way, with a first state of its own."""

    def __init__(self, layer, way):
        super().__init__()
        self.layer, self.way = layer, WAYS[way]

    def forward(self, x):
        if isinstance(self.layer, nn.RNNBase):
            rows = x.shape[0 if self.layer.batch_first else 1]
            h = x.new_full((self.layer.num_layers, rows, 8), 0.1)
            return self.way(self.layer, x, (h, h) if self.layer.mode == "LSTM" else h)[0]
        h, outputs = x.new_full((len(x), 8), 0.1), []
        for step in x.unbind(1):
            h = self.way(self.layer, step, h)
            outputs.append(h)
        return torch.stack(outputs, 1)


def heard(kind, way, x):
    torch.manual_seed(0)
    model = Calling(KINDS[kind](), way)
    with untouched(model), collected(model, layers(model), leaves=True) as calls:
        model(x)
    assert calls.unread == {}
    return calls


@pytest.mark.parametrize("kind", KINDS)
@given(way=st.sampled_from(sorted(WAYS)), rows=st.integers(1, 3), steps=st.integers(1, 5))
def test_a_call_is_collected_alike_however_it_is_made(kind, way, rows, steps):
    x = torch.randn(rows, steps, 3, requires_grad=True)
    x = x if kind != "gru, time first" else x.transpose(0, 1)
    plain, calls = heard(kind, "layer(x, h)", x), heard(kind, way, x)
    assert len(calls) == len(plain) == (steps if kind == "gru cell" else 1)
    for a, b in zip(plain, calls, strict=True):
        assert (a.rows, a.steps, a.layer.name) == (b.rows, b.steps, b.layer.name) == (rows, b.steps, "layer")
        close = torch.testing.assert_close  # without gradients torch has another kernel for an LSTM
        close(b.x, a.x, rtol=0, atol=0)
        close(b.output, a.output)
        close(dict(b.given), dict(a.given), rtol=0, atol=0)
        close(dict(b.state), dict(a.state))


def measured(kind, way, x):
    torch.manual_seed(0)
    model = Calling(KINDS[kind](), way)
    with untouched(model), hs.Monitor(model, every=1) as monitor:
        for _ in range(2):
            out = model(x)
            (out * torch.linspace(1, 2, out.numel()).view_as(out)).sum().backward()
            model.zero_grad()
    assert monitor.step == 2
    return {name: numbers for name, numbers in monitor.history.items() if name != "graph"}


@pytest.mark.parametrize("kind", KINDS)
@given(way=st.sampled_from(sorted(WAYS)), rows=st.integers(1, 3), steps=st.integers(2, 5))
def test_a_monitor_measures_alike_however_a_layer_is_called(kind, way, rows, steps):
    x = torch.randn(rows, steps, 3)
    x = (x if kind != "gru, time first" else x.transpose(0, 1)).requires_grad_()
    plain, numbers = measured(kind, "layer(x, h)", x), measured(kind, way, x)
    assert {"layer.gradient_first", "layer.gradient_last", "layer.norm"} < set(plain)
    assert set(plain) == set(numbers)
    for name, values in plain.items():
        torch.testing.assert_close(torch.tensor(numbers[name]), torch.tensor(values), rtol=1e-4, atol=1e-6)


def test_what_steps_are_checkpointed_in_pieces_keeps_its_order():
    class Pieces(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.cell, self.reentrant = nn.GRUCell(3, 8), reentrant

        def forward(self, x):
            def piece(steps, h):
                for step in steps.unbind(1):
                    h = self.cell(step, h)
                return h

            h = x.new_zeros(len(x), 8)
            for steps in x.split(2, dim=1):
                h = (
                    piece(steps, h)
                    if self.reentrant is None
                    else checkpoint(piece, steps, h, use_reentrant=self.reentrant)
                )
            return h

    seen = []
    x = torch.ones(2, 6, 3, requires_grad=True)  # the same at every step: only their states tell them apart
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = Pieces(reentrant)
        with hs.Monitor(model, every=1) as monitor:
            model(x).sum().backward()
        seen.append([monitor.history[f"cell.gradient_{end}"].item() for end in ("first", "last")])
    assert seen[0][0] < seen[0][1]
    assert seen[1] == pytest.approx(seen[0])
    assert seen[2] == pytest.approx(seen[0])


def test_under_a_checkpoint_the_input_stays_without_a_gradient():
    model = Calling(nn.GRU(3, 8, batch_first=True), "checkpoint(layer, x, h)")
    x = torch.randn(2, 4, 3)
    with hs.Monitor(model, every=1) as monitor:
        model(x).sum().backward()  # which fails where another number of tensors was saved than is saved again
    assert "layer.norm" in monitor.history
    assert "layer.gradient_first" not in monitor.history


@pytest.mark.parametrize("way", WAYS)
def test_an_examination_finds_the_same_however_a_layer_is_called(way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Calling(nn.GRU(3, 8, batch_first=True), way), nn.Linear(8, 2))
    report = hs.diagnose(model, torch.randn(4, 6, 3))
    assert report.ok, report.text()
    assert not any("not used" in note for note in report.assumed)
    if "reentrant" not in way:
        assert report.failed == {}
    assert all("use_reentrant=True" in why for why in report.failed.values())  # torch itself refuses, by name


def test_packed_sequences_are_collected_with_the_steps_of_each_row():
    gru = nn.GRU(3, 8, batch_first=True)
    packed = pack_padded_sequence(torch.randn(3, 6, 3), torch.tensor([2, 6, 1]), batch_first=True, enforce_sorted=False)
    with collected(gru, layers(gru), leaves=True) as calls:
        gru(hx=torch.zeros(1, 3, 8), input=packed)
    (call,) = calls
    assert call.lengths.tolist() == [2, 6, 1]
    assert call.x.shape == (3, 6, 3)
    assert call.input.data.requires_grad


def test_a_state_that_is_written_into_is_noticed():
    class InPlace(nn.Module):
        hidden_size = 4

        def __init__(self):
            super().__init__()
            self.map = nn.Linear(3, 4)

        def forward(self, x, h):
            h += self.map(x)
            return h

    cell, fair = InPlace(), nn.GRUCell(3, 4)
    model = nn.ModuleList([cell, fair])
    with torch.no_grad(), collected(model, layers(model)) as calls:
        cell(torch.randn(2, 3), torch.zeros(2, 4))
        fair(torch.randn(2, 3), torch.zeros(2, 4))
    assert [call.layer.name for call in calls] == ["0", "1"]
    assert [call.layer.name for call in calls.overwritten] == ["0"]


def test_what_cannot_be_read_is_named_and_the_model_runs():
    class Odd(nn.Module):
        hidden_size = 4

        def __init__(self):
            super().__init__()
            self.map = nn.Linear(3, 4)

        def forward(self, x, hidden=None):
            return {"y": self.map(x["x"])}

    model = nn.Sequential(Odd())
    found = [hs.layers(nn.Sequential(nn.GRUCell(3, 4)))[0]]
    odd = type(found[0])("0", model[0], found[0].adapter)
    with collected(model, [odd]) as calls:
        assert model({"x": torch.randn(2, 3)})["y"].shape == (2, 4)
    assert list(calls) == []
    assert "NotRecurrent: Odd returned dict" in calls.unread["0"]


def test_embeddings_are_collected_too():
    model = nn.Sequential(nn.Embedding(5, 3), nn.GRU(3, 4, batch_first=True))
    model[0].requires_grad_(False)
    tokens = torch.randint(5, (2, 6))
    with collected(model, layers(model), leaves=True) as calls:
        model(tokens)
    (embedded,) = calls.embedded
    assert embedded.name == "0"
    assert embedded.tokens is tokens
    assert embedded.vectors.requires_grad
    assert calls[0].input is embedded.vectors


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_layer_is_not_heard_and_nothing_breaks():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 8, batch_first=True)

        def forward(self, x):
            return self.gru(x)[0]

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.scripted = torch.jit.script(Inside())
            self.gru = nn.GRU(8, 4, batch_first=True)

        def forward(self, x):
            return self.gru(self.scripted(x))[0]

    report = hs.diagnose(Around(), torch.randn(4, 6, 3))
    assert report.ok, report.text()
    assert report.failed == {}


def test_a_layer_on_top_of_another_is_known_again_though_its_input_differs_in_the_last_bits():
    class Stack(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.first, self.second = nn.LSTM(3, 64, batch_first=True), nn.LSTM(64, 64, batch_first=True)
            self.reentrant = reentrant

        def both(self, x):
            return self.second(self.first(x)[0])[0][:, -1]

        def forward(self, x):
            return checkpoint(self.both, x, use_reentrant=True) if self.reentrant else self.both(x)

    x, seen = torch.randn(4, 20, 3, requires_grad=True), []
    for reentrant in (False, True):
        torch.manual_seed(0)
        model = Stack(reentrant)
        with hs.Monitor(model, every=1) as monitor:
            model(x).sum().backward()
        seen.append([monitor.history[f"{layer}.gradient_first"].item() for layer in ("first", "second")])
    assert seen[1] == pytest.approx(seen[0], rel=1e-3)
