"""Which models may be served, and how they are called."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.cells import Adapter, Spec, listeners
from hiddenstate.errors import NotServable
from hiddenstate.serve import Engine
from hiddenstate.serve.fingerprint import fingerprint
from hiddenstate.serve.model import Served
from tests.support.calling import WAYS, Calling
from tests.support.models import Chunked, Deep, Siamese, Stepping, TimeFirst, ZerosInside


class BatchNormalized(nn.Module):
    """Normalizes over the rows of the batch, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.gru(x)[0]
        return out - out.mean(0, keepdim=True) if len(x) > 1 else out


class LastOnly(nn.Module):
    """Gives the last step's output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0][:, -1]


class Convolved(nn.Module):
    """Mixes steps before the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gru = nn.Conv1d(3, 3, 3, padding=1), nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.mix(x.transpose(1, 2)).transpose(1, 2))[0]


class Summed(nn.Module):
    """Gives one number for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0].sum()


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        (nn.LSTM(3, 4), (1, 0)),
        (nn.LSTM(3, 4, batch_first=True), (0, 1)),
        (Deep(), (0, 1)),
        (TimeFirst(), (1, 0)),
        (Stepping(nn.GRUCell(3, 4)), (0, 1)),
        (Chunked(), (0, 1)),
        (nn.LSTMCell(3, 4), (0, None)),
        (hs.Recurrent(nn.GRUCell, 3, 4), (0, 1)),
        (LastOnly(), (0, 1)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_rows_and_steps_are_found(model, axes):
    served = Served(model)
    try:
        assert (served.layout.rows_axis, served.layout.steps_axis) == axes
        assert served.layout.step_shape == (3,)
    finally:
        served.close()


@pytest.mark.parametrize("example", [torch.randn(1, 1, 3), torch.randn(4, 6, 3), torch.randn(5, 5, 3)])
def test_an_example_of_any_size_will_do(example):
    for model, axes in ((nn.GRU(3, 4), (1, 0)), (nn.GRU(3, 4, batch_first=True), (0, 1))):
        served = Served(model, example=example)
        assert (served.layout.rows_axis, served.layout.steps_axis) == axes
        served.close()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(3, 4), "Linear has no recurrent layer"),
        (nn.GRU(3, 4, bidirectional=True), "fed in pieces would not equal one call.*both directions"),
        (ZerosInside(), "fed in pieces would not equal one call.*zeros made in forward"),
        (Convolved(), "fed in pieces would not equal one call.*mixes steps"),
        (BatchNormalized(), r"what it gives for a row changes by .* with the rows beside it \(in output 0\)"),
        (Summed(), "no axis has one entry for each row"),
        (Siamese(), "no input could be made up that Siamese takes.*Engine\\(model, example=x\\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason_and_comes_back(model, reason):
    model.train()
    with pytest.raises(NotServable, match=reason):
        Served(model)
    assert all(module.training for module in model.modules())
    assert not any(listeners(module) for module in model.modules())


def test_layers_that_see_other_rows_are_named():
    class Words(nn.Module):
        """Words within sentences: the inner layer runs more rows than there are callers."""

        def __init__(self):
            super().__init__()
            self.outer, self.inner = nn.GRU(3, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)

        def forward(self, x):
            return self.inner(self.outer(x)[0].repeat(2, 1, 1))[0][: len(x)]

    with pytest.raises(NotServable, match="with 2 rows in, inner saw 4, outer saw 2"):
        Served(Words())


def test_an_example_that_does_not_fit_is_said_so():
    with pytest.raises(NotServable, match=r"GRU does not take inputs like the example \(2, 5, 7\)"):
        Served(nn.GRU(3, 4), example=torch.randn(2, 5, 7))


@pytest.mark.parametrize("model", [Deep(), TimeFirst(), Stepping(nn.LSTMCell(3, 4)), nn.GRUCell(3, 4)])
def test_lengths_may_differ_where_that_is_exact(model):
    served = Served(model)
    served.close()
    assert served.ragged


def test_lengths_may_not_differ_where_an_output_is_that_of_the_last_step():
    served = Served(LastOnly())
    served.close()
    assert not served.ragged


# Fingerprints.


def changed_weight(model: Deep) -> None:
    with torch.no_grad():
        model.head.bias[0] += 1e-6


def changed_buffer(model: Deep) -> None:
    model.register_buffer("scale", torch.ones(1))


def changed_dtype(model: Deep) -> None:
    model.double()


@pytest.mark.parametrize("change", [changed_weight, changed_buffer, changed_dtype])
def test_a_fingerprint_tells_models_apart(change):
    torch.manual_seed(0)
    model = Deep()
    before = fingerprint(model)
    assert fingerprint(model) == before
    change(model)
    assert fingerprint(model) != before


def test_a_fingerprint_knows_what_is_not_in_the_weights():
    one, other = nn.RNN(3, 4, nonlinearity="tanh"), nn.RNN(3, 4, nonlinearity="relu")
    other.load_state_dict(one.state_dict())
    assert fingerprint(one) != fingerprint(other)


def test_a_fingerprint_does_not_know_mode_or_gradients():
    model = Deep()
    before = fingerprint(model)
    model(torch.randn(1, 2, 3)).sum().backward()
    model.eval()
    assert fingerprint(model) == before


class Decaying(nn.Module):
    """A fused layer of the user's own, its arguments named in its own way."""

    axis = 1  # of time

    def __init__(self):
        super().__init__()
        self.drive = nn.Linear(3, 4)

    def forward(self, sequence, memory=None):
        memory = sequence.new_zeros(1, sequence.shape[1 - self.axis], 4) if memory is None else memory
        outputs = []
        for step in sequence.unbind(self.axis):
            memory = 0.5 * memory + torch.tanh(self.drive(step))
            outputs.append(memory[0])
        return torch.stack(outputs, dim=self.axis), memory


class DecayingTimeFirst(Decaying):
    axis = 0


class DecayingAdapter(Adapter):
    kind, fused = "decaying", True

    def spec(self, module):
        return Spec(("m",), {"m": 4}, input_size=3, batch_first=module.axis == 1)

    def initial(self, module, batch):
        return hs.State({"m": torch.zeros(1, batch, 4)}, 1)

    def to_state(self, module, native, *, batch=None):
        return hs.State({"m": native}, 1)

    def to_native(self, module, state, *, batched=True):
        return state["m"]

    def split(self, module, result):
        return result


class TimeFirstAdapter(DecayingAdapter):
    def rows(self, module, args, kwargs):
        x = args[0] if args else kwargs["sequence"]
        return x.shape[1], True


class WithDecay(nn.Module):
    def __init__(self, kind, way):
        super().__init__()
        self.inner, self.read, self.way = kind(), nn.Linear(4, 2), way

    def forward(self, x):
        x = x.transpose(0, 1 - self.inner.axis)
        return self.read(self.way(self.inner, x)[0].transpose(0, 1 - self.inner.axis))


OWN_WAYS = {
    "by position": lambda layer, x: layer(x),
    "by name": lambda layer, x: layer(memory=None, sequence=x),
    "by forward": lambda layer, x: layer.forward(sequence=x),
}


@pytest.fixture
def registered():
    hs.register(Decaying, DecayingAdapter())
    hs.register(DecayingTimeFirst, TimeFirstAdapter())


def pieces_equal_the_whole(model, x, cuts):
    """Feed a session in pieces and compare what it is answered with one call."""
    wanted = model.eval()(x.unsqueeze(0))
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted)[0].detach()
    with Engine(model) as engine:
        for session in ("one", "other"):
            engine.open(session)
        given = [engine.push("one", piece) for piece in x.split(cuts)]
        engine.push("other", x[:1])
    torch.testing.assert_close(torch.cat(given), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", OWN_WAYS)
@pytest.mark.parametrize("kind", [Decaying, DecayingTimeFirst])
@pytest.mark.usefixtures("registered")
def test_a_registered_fused_layer_is_served(kind, way):
    pieces_equal_the_whole(WithDecay(kind, OWN_WAYS[way]), torch.randn(7, 3), [3, 1, 2, 1])


@pytest.mark.parametrize("way", OWN_WAYS)
@pytest.mark.parametrize("kind", [Decaying, DecayingTimeFirst])
@pytest.mark.usefixtures("registered")
def test_a_registered_fused_layer_is_carried(kind, way):
    model, x = WithDecay(kind, OWN_WAYS[way]), torch.randn(2, 7, 3)
    whole, (_, ended) = model(x), model.inner(x[1:, :4].transpose(0, 1 - model.inner.axis))
    with hs.Carry(model) as carry:
        pieces = [model(piece) for piece in x.split([3, 1, 3], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
        assert list(carry.state) == ["inner.m"]
    with hs.Carry(model) as carry:
        carry.mark(lengths=torch.tensor([7, 4]))
        model(x)
        torch.testing.assert_close(carry.state["inner.m"][0, 1], ended[0, 0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of checkpoints without gradients
@settings(max_examples=5)
@given(kind=st.sampled_from([nn.RNN, nn.LSTM, nn.GRU]), cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_however_a_layer_is_called_a_session_in_pieces_is_the_whole(way, kind, cuts):
    pieces_equal_the_whole(Calling(kind(3, 4, batch_first=True), way), torch.randn(sum(cuts), 3), cuts)
