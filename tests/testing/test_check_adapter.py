"""`check_adapter`: our adapters tell the truth, and one that does not is told which law it breaks."""

import itertools

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import Spec, as_layer
from hiddenstate.errors import BadInput, LawBroken
from hiddenstate.testing import check_adapter
from tests.support.cells import CELLS
from tests.support.registered import LEAKY, Leaky, LeakyAdapter

TORCHS = {
    "rnn": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": 2}),
}


def adapter_of(module):
    return as_layer(module).adapter


@pytest.mark.parametrize(("layers", "both", "first"), list(itertools.product((1, 3), (False, True), (False, True))))
@pytest.mark.parametrize(("kind", "options"), TORCHS.values(), ids=TORCHS)
def test_the_adapters_of_torchs_layers_keep_the_laws(kind, options, layers, both, first):
    def make():
        return kind(3, 4, layers, bidirectional=both, batch_first=first, **options)

    check_adapter(kind, adapter_of(make()), make=make)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_the_adapters_of_torchs_cells_keep_the_laws(kind):
    check_adapter(kind, adapter_of(kind(3, 4)), make=lambda: kind(3, 4))


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_the_adapter_of_users_own_cells_keeps_the_laws(sample):
    cell, x = sample.cell(), sample.x()[:, 0]
    check_adapter(type(cell), as_layer(cell, x).adapter, make=lambda: cell, x=x)


def test_the_adapter_of_stacks_keeps_the_laws():
    def make():
        return hs.Recurrent(nn.LSTMCell, 3, 4, num_layers=2)

    check_adapter(hs.Recurrent, adapter_of(make()), make=make)


@pytest.mark.parametrize("kind", LEAKY)
def test_an_adapter_that_somebody_registered_keeps_the_laws(kind):
    check_adapter(kind, adapter_of(kind(3, 4)), make=lambda: kind(3, 4))


class NoSizes(LeakyAdapter):
    def spec(self, module):
        return Spec(("memory",), {}, input_size=3, batch_first=False)


class OtherSize(LeakyAdapter):
    def spec(self, module):
        return Spec(("memory",), {"memory": 7}, input_size=3, batch_first=False)


class OneRow(LeakyAdapter):
    def initial(self, module, batch):
        return super().initial(module, 1)


class OtherRows(LeakyAdapter):
    def rows(self, module, args, kwargs):
        return args[0].shape[0], True


class ByPosition(LeakyAdapter):
    def rows(self, module, args, kwargs):
        return args[0].shape[1], True


class Losing(LeakyAdapter):
    def give(self, module, args, kwargs, native):
        return args, kwargs


class Seeing(LeakyAdapter):
    def given(self, module, args, kwargs):
        return super().given(module, args, kwargs) if len(args) > 1 or kwargs else args[0]


class Turned(LeakyAdapter):
    def join(self, module, output, native):
        return output, -native


class Scaling(LeakyAdapter):
    def to_native(self, module, state, *, batched=True):
        return state["memory"] + 1


class Renaming(LeakyAdapter):
    def to_state(self, module, native, *, batch=None):
        return hs.State({"h": native})


class OtherStart(LeakyAdapter):
    def initial(self, module, batch):
        return hs.State({"memory": torch.ones(batch, 4)})


class Sideways(LeakyAdapter):
    """Takes the units for the rows."""

    def to_state(self, module, native, *, batch=None):
        return hs.State({"memory": native.flip(0)})

    def to_native(self, module, state, *, batched=True):
        return state["memory"].flip(0)


class Forgetting(Leaky):
    def forward(self, sequence, memory=None):
        return super().forward(sequence, None if len(sequence) < 3 else memory)


BROKEN = {
    "spec": (Leaky, NoSizes, r"names every part, each with its size. The parts are \('memory',\).*sizes of \(\)"),
    "sizes": (Leaky, OtherSize, r"parts and sizes of the spec.*'memory' has 4 numbers for each row, but 7 units"),
    "first rows": (Leaky, OneRow, r"as many rows as were asked for. It was asked for 4 rows and made 1"),
    "counted": (Leaky, OtherRows, r"the rows of a call are counted. An input .*gave \(5, True\), not \(3, True\)"),
    "given": (Leaky, Losing, r"is found in it.*None was found in a call with 1 arguments"),
    "none given": (Leaky, Seeing, r"none where there is none. A state was found in a call that had none"),
    "named": (
        Leaky,
        ByPosition,
        r"whose input is named.*A call with sequence=x cannot be read: IndexError: tuple index",
    ),
    "join": (Leaky, Turned, r"split takes apart what join puts together. h differs by up to"),
    "back": (Leaky, Scaling, r"goes to names and back as it was. h differs by up to 1"),
    "names": (Leaky, Renaming, r"goes to names and back.*memory with 3 rows were expected, and State\(h"),
    "start": (Leaky, OtherStart, r"a call without a state begins from the first state. h differs by"),
    "rows": (Leaky, Sideways, r"the rows of a state are where it says. Row 0 among 3 rows, and alone: the output"),
    "cuts": (Forgetting, LeakyAdapter, r"cut anywhere, with the state handed on. Cut after step 3 of 5"),
}


@pytest.mark.parametrize(("kind", "adapter", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_law_is_told_with_what_was_seen(kind, adapter, message):
    with pytest.raises(AssertionError, match=message) as caught:
        check_adapter(kind, adapter(), make=lambda: kind(3, 4))
    assert isinstance(caught.value, LawBroken)
    assert str(caught.value).startswith(f"{adapter.__name__} for {kind.__name__} breaks a law: ")


def test_how_a_module_is_made_has_to_be_said():
    with pytest.raises(BadInput, match=r"Leaky\(\) fails.*make=lambda: Leaky\(3, 4\)"):
        check_adapter(Leaky, LeakyAdapter())
    with pytest.raises(BadInput, match=r"make returned Linear, but a Leaky is needed"):
        check_adapter(Leaky, LeakyAdapter(), make=lambda: nn.Linear(3, 4))
