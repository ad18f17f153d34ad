"""Finding recurrent layers in models that know nothing of this library."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import Adapter, Spec, as_layer, unwrap
from hiddenstate.errors import NotRecurrent
from tests.support.cells import CELLS, NestedCell, PairCell, TanhCell


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"rnn": nn.LSTM(3, 4)}))
        self.head = nn.ModuleList([nn.GRUCell(4, 4), TanhCell(4, 4)])


def names(model):
    return [layer.name for layer in hs.layers(model)]


def test_layers_are_found_however_deep():
    assert names(Tagger()) == ["body.1.rnn", "head.0", "head.1"]
    assert [layer.kind for layer in hs.layers(Tagger())] == ["lstm", "gru_cell", "cell"]


def test_a_model_that_is_itself_a_layer_has_no_name():
    (layer,) = hs.layers(nn.LSTM(3, 4))
    assert layer.name == ""
    assert layer.part("h") == "h"
    assert hs.layers(Tagger())[0].part("h") == "body.1.rnn.h"


def test_a_shared_layer_is_found_once():
    model = Tagger()
    model.again = model.body
    model.twice = nn.ModuleList([model.head[0], model.head[0]])
    assert names(model) == ["body.1.rnn", "head.0", "head.1"]


def test_a_model_without_recurrence_has_no_layers():
    found = hs.layers(nn.Sequential(nn.Linear(3, 4), nn.Transformer(8, 2, 1, 1, 8, batch_first=True)))
    assert found == []
    assert str(found) == "no recurrent layers"


@pytest.mark.parametrize("name", [name for name in CELLS if name not in {"readout", "tokens"}])
def test_users_own_cells_are_found_whole(name):
    (layer,) = hs.layers(nn.ModuleList([CELLS[name].cell()]))
    assert layer.name == "0"
    assert layer.spec.parts == CELLS[name].parts


@pytest.mark.parametrize("module", [nn.Bilinear(3, 4, 5), nn.CosineSimilarity(), nn.MSELoss(), nn.PReLU()])
def test_a_module_that_merely_takes_two_tensors_is_no_cell(module):
    assert hs.layers(module) == []


def test_a_hidden_size_alone_makes_no_cell():
    class Mixer(nn.Module):
        hidden_size = 4

        def forward(self, x, y):
            return x + y

    class Three(nn.Module):
        hidden_size = 4

        def forward(self, x, state, mask):
            return state

    class Encoder(nn.Module):
        hidden_size = 4

        def forward(self, x):
            return x

    assert hs.layers(nn.ModuleList([Mixer(), Three(), Encoder()])) == []


@pytest.mark.parametrize(
    "argument", ["state", "hidden", "h", "hx", "prev", "carry", "prev_state", "lstm_hidden", "h_prev"]
)
def test_a_second_argument_named_like_a_state_makes_a_cell(argument):
    namespace = {}
    exec(f"def forward(self, x, {argument}):\n    return {argument}", namespace)
    kind = type("Cell", (nn.Module,), {"hidden_size": 4, "forward": namespace["forward"]})
    assert len(hs.layers(kind())) == 1


class DecoderRNN(nn.Module):
    """As the tutorial has it."""

    def __init__(self, hidden_size=4, output_size=6):
        super().__init__()
        self.hidden_size = hidden_size
        self.embedding = nn.Embedding(output_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, output_size)

    def forward(self, input, hidden):
        output, hidden = self.gru(self.embedding(input).view(1, 1, -1), hidden)
        return self.out(output[0]), hidden


def test_a_wrapper_around_a_layer_is_no_cell_the_layer_is():
    assert names(nn.ModuleDict({"decoder": DecoderRNN()})) == ["decoder.gru"]
    assert names(CELLS["readout"].cell()) == ["step"]


def test_a_wrapper_with_an_initial_state_of_its_own_is_the_cell():
    assert names(nn.ModuleDict({"cell": NestedCell()})) == ["cell"]


def test_subclasses_of_torchs_layers_are_found():
    class MyLSTM(nn.LSTM):
        pass

    assert hs.layers(nn.Sequential(MyLSTM(3, 4)))[0].kind == "lstm"


def test_wrappers_of_torch_are_looked_through():
    model = Tagger()
    compiled = torch.compile(model)
    assert unwrap(compiled) is model
    assert names(compiled) == names(model)
    assert names(nn.DataParallel(model)) == names(model)
    assert names(nn.Sequential(torch.compile(nn.GRU(3, 4)))) == ["0"]


def test_printing_layers_is_a_table():
    assert str(hs.layers(Tagger())).splitlines() == [
        "name        kind      state     layers  directions  input",
        "body.1.rnn  lstm      h 4, c 4  1       1           3",
        "head.0      gru_cell  h 4       1       1           4",
        "head.1      cell      h 4       1       1           4",
    ]
    assert "(the model)" in repr(hs.layers(nn.GRU(3, 4)))


class Oscillator(nn.Module):
    """A layer that nothing known fits: it keeps its state in a list, and returns it first."""

    def forward(self, x, phase=None):
        phase = [x.new_zeros(x.shape[0], 2)] if phase is None else phase
        phase = [phase[0] + x]
        return phase, phase[0].sin()


class OscillatorAdapter(Adapter):
    kind = "oscillator"

    def spec(self, module):
        return Spec(("phase",), {"phase": 2})

    def initial(self, module, batch):
        return hs.State({"phase": torch.zeros(batch, 2)})

    def to_state(self, module, native, *, batch=None):
        return hs.State({"phase": native[0]})

    def to_native(self, module, state, *, batched=True):
        return [state["phase"]]

    def split(self, module, result):
        return result[1], result[0]


@pytest.fixture
def registry(monkeypatch):
    from hiddenstate.cells import discovery

    monkeypatch.setattr(discovery, "_registered", dict(discovery._registered))


def test_a_new_kind_can_be_taught(registry):
    assert hs.layers(Oscillator()) == []
    hs.register(Oscillator, OscillatorAdapter())
    (layer,) = hs.layers(nn.ModuleList([Oscillator()]))
    assert layer.kind == "oscillator"
    x = torch.randn(3, 4, 2)
    out, state = hs.unroll(Oscillator(), x)
    torch.testing.assert_close(state["phase"], x.sum(1))
    torch.testing.assert_close(out, x.cumsum(1).sin())
    out, _ = hs.unroll(Oscillator(), x, lengths=[1, 4, 2], resets=torch.rand(3, 4) < 0.5)
    assert (out[0, 1:] == 0).all()


def test_a_registered_type_needs_no_adapter_to_be_a_cell(registry):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size = 3

        def forward(self, x, z):
            return x + 0.5 * z

    assert hs.layers(Odd()) == []
    hs.register(Odd)
    assert hs.layers(Odd())[0].kind == "cell"
    assert hs.unroll(Odd(), torch.ones(1, 2, 3))[0][0, :, 0].tolist() == [1.0, 1.5]


def test_the_nearest_registered_type_counts(registry):
    class Special(PairCell):
        pass

    hs.register(Special, OscillatorAdapter())
    assert hs.layers(Special())[0].kind == "oscillator"
    assert hs.layers(PairCell())[0].kind == "cell"


def test_only_types_and_adapters_can_be_registered():
    with pytest.raises(NotRecurrent, match=r"takes a type of nn\.Module, but this is .*give its type"):
        hs.register(nn.GRU(3, 4))
    with pytest.raises(NotRecurrent, match=r"is an instance of hiddenstate\.cells\.Adapter.*hs\.register\(PairCell\)"):
        hs.register(PairCell, "adapter")


def test_what_is_no_layer_says_what_is_needed_and_what_it_holds():
    with pytest.raises(NotRecurrent, match=r"Tagger is no recurrent layer or cell.*It holds 3 recurrent layers"):
        as_layer(Tagger())
    with pytest.raises(NotRecurrent, match=r"str is no recurrent layer or cell: needed is an nn\.RNN"):
        as_layer("lstm")
