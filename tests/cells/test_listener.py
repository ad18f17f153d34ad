"""Calls are heard however they are made, and listening leaves no trace: in copies, in pickles, in compiled code."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hiddenstate.cells import Listener, Rank, around, attributes, layers, listen, listeners, unheard
from hiddenstate.errors import HiddenStateError
from tests.support.calling import WAYS
from tests.support.models import Deep, Stepping
from tests.support.untouched import untouched

X = torch.randn(2, 3, 3)


class Noting(Listener):
    """Writes down what it hears."""

    def __init__(self, name="", rank=Rank.OBSERVE, into=None):
        self.name, self.rank, self.heard = name, rank, [] if into is None else into

    def model_call(self, entry, run):
        self.heard.append(f"{self.name}in {type(entry.module).__name__}")
        try:
            return run()
        finally:
            self.heard.append(f"{self.name}out")

    def layer_call(self, call, proceed):
        self.heard.append(f"{self.name}{call.layer.label}")
        return proceed(call)

    def recompute(self, call, proceed):
        self.heard.append(f"{self.name}again {call.layer.label}")
        return proceed(call)


def heard(model, noting=None):
    noting = noting or Noting()
    return noting, listen(model, layers(model), noting)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_call_a_layer_is_heard_alike(way, kind):
    layer = kind(3, 4, batch_first=True)
    state = torch.randn(1, 2, 4) if kind is not nn.LSTM else (torch.randn(1, 2, 4), torch.randn(1, 2, 4))
    seen = []

    class Reading(Listener):
        def layer_call(self, call, proceed):
            done = proceed(call)
            seen.append((done.x, done.given, done.output, done.state, done.steps, done.rows))
            return done

    handle = listen(layer, layers(layer), Reading())
    way(layer, X.clone().requires_grad_(), state)
    handle.remove()
    ((x, given, output, after, steps, rows),) = seen
    expected, last = layer(X, state)
    torch.testing.assert_close(x, X)
    torch.testing.assert_close(output, expected)
    parts = (last,) if isinstance(last, torch.Tensor) else last
    for part, value in zip(after.values(), parts, strict=True):
        torch.testing.assert_close(part, value)
    assert (list(given), steps, rows) == (list(after), 3, 2)


def test_the_outermost_call_of_any_module_that_holds_a_layer_is_a_call_of_the_model():
    class Lightning(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Deep()

    model = Lightning()
    noting, handle = heard(model)
    model.net(X)
    model.net.encoder["lstm"](torch.randn(2, 3, 6))
    model.net.forward(X)
    handle.remove()
    deep = ["in Deep", "net.encoder.lstm", "net.gru", "out"]
    assert noting.heard == [*deep, "in LSTM", "net.encoder.lstm", "out", *deep]


def test_outermost_first_carry_then_observers_then_acceleration_whoever_came_first():
    layer, heard = nn.GRU(3, 4), []
    handles = [listen(layer, layers(layer), Noting(f"{rank.name} ", rank, heard)) for rank in reversed(Rank)]
    layer(X)
    for handle in handles:
        handle.remove()
    names = ["CARRY", "OBSERVE", "ACCELERATE"]
    expected = [f"{name} {what}" for name in names for what in ("in GRU", "the model itself")]
    assert heard == [*expected, *(f"{name} out" for name in reversed(names))]


def test_a_listener_may_change_what_a_layer_takes_and_gives():
    class Doubling(Listener):
        def layer_call(self, call, proceed):
            done = proceed(call.fed(call.input * 2))
            output, state = done.result
            return done.returned((output + 1, state))

    layer = nn.GRU(3, 4)
    expected = layer(X * 2)[0] + 1
    handle = listen(layer, layers(layer), Doubling())
    torch.testing.assert_close(layer(X)[0], expected)
    torch.testing.assert_close(layer(input=X)[0], expected)
    handle.remove()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_runs_again_in_a_backward_pass_is_told_apart(reentrant):
    model = Deep()
    noting, handle = heard(model)
    checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
    handle.remove()
    assert noting.heard == ["in Deep", "encoder.lstm", "gru", "out", "again encoder.lstm", "again gru"]


def test_nobody_hears_what_is_called_unheard():
    model = Deep()
    noting, handle = heard(model)
    with unheard():
        model(X)
        model.gru.forward(torch.randn(2, 3, 5))
    handle.remove()
    assert noting.heard == []


def test_an_error_passes_through_and_the_next_call_is_heard_from_outside_again():
    model = Deep()
    noting, handle = heard(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 3, 99))
    model(X)
    handle.remove()
    assert noting.heard == ["in Deep", "out", "in Deep", "encoder.lstm", "gru", "out"]


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: saved_and_loaded(model),
}


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [lambda: nn.GRUCell(3, 4), lambda: nn.LSTM(3, 4)], ids=["cell", "layer"])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_module_is_not_heard_and_has_nothing_of_ours(copied, make):
    module = make()
    noting, handle = heard(module)
    twin = copied(module)
    assert set(vars(twin)) == set(vars(make()))
    x = X[:, 0] if isinstance(module, nn.GRUCell) else X
    twin(x)
    assert noting.heard == []
    handle.remove()
    torch.testing.assert_close(twin(x), module(x))


def test_listening_leaves_the_module_as_it_was():
    model = Stepping(nn.GRUCell(3, 4))
    with untouched(model):
        first, second = heard(model)[1], heard(model)[1]
        first.remove()
        first.remove()  # twice is once
        model(X)
        second.remove()


def test_a_forward_of_the_users_own_is_heard_and_put_back():
    layer = nn.GRU(3, 4)
    plain = layer.forward
    own = lambda x, h=None: plain(x * 2, h)  # noqa: E731
    layer.forward = own
    noting, handle = heard(layer)
    torch.testing.assert_close(layer(X)[0], plain(X * 2)[0])
    handle.remove()
    assert layer.forward is own
    assert noting.heard == ["in GRU", "the model itself", "out"]


def test_somebody_elses_wrapper_around_ours_survives_and_ours_lets_everything_pass():
    layer = nn.GRU(3, 4)
    noting, handle = heard(layer)
    inner = layer.forward
    layer.forward = lambda x: inner(x * 2)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(layer(X)[0], nn.GRU.forward(layer, X * 2)[0])
    assert noting.heard == []


def test_the_signature_of_forward_stays_readable():
    layer = nn.GRU(3, 4)
    before = inspect.signature(layer.forward)
    handle = heard(layer)[1]
    assert inspect.signature(layer.forward) == before
    assert layer.forward.__name__ == "forward"
    handle.remove()


def test_attributes_are_those_of_the_user():
    layer = nn.GRU(3, 4)
    handle = heard(layer)[1]
    assert set(attributes(layer)) == set(vars(nn.GRU(3, 4)))
    assert [type(one) for one in listeners(layer)] == [Noting]
    handle.remove()
    assert attributes(layer) is vars(layer)
    assert listeners(layer) == []


def test_replicas_of_data_parallel_are_refused_by_name():
    model = Deep()
    handle = heard(model)[1]
    with pytest.raises(HiddenStateError, match=r"nn.DataParallel copies the model.*Noting, attached to LSTM"):
        model.encoder["lstm"]._replicate_for_data_parallel()
    handle.remove()
    model.encoder["lstm"]._replicate_for_data_parallel()


def test_any_module_can_be_wrapped():
    layer = nn.Linear(3, 2)
    handle = around(layer, lambda arguments, run: run(((arguments[0][0] * 2,), arguments[1])) + 1)
    out = layer(X)
    handle.remove()
    torch.testing.assert_close(out, layer(X * 2) + 1)


WAYS_TO_COMPILE = {
    "a wrapper": lambda model, backend: torch.compile(model, backend=backend),
    "in place": lambda model, backend: (model.compile(backend=backend), model)[1],
    "a function around it": lambda model, backend: torch.compile(lambda x: model(x), backend=backend),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks there
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS_TO_COMPILE.values(), ids=WAYS_TO_COMPILE)
def test_compiled_code_hears_listeners_come_and_go_and_is_not_made_over_and_over(way, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, graphs = Stepping(nn.GRUCell(3, 4)), []
    plain = model(X)
    compiled = way(model, backend)
    for _ in range(3):
        torch.testing.assert_close(compiled(X), plain)
        noting, handle = heard(model)
        torch.testing.assert_close(compiled(X), plain)
        handle.remove()
        assert noting.heard == ["in Stepping", "cell", "cell", "cell", "out"]
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.testing.assert_close(compiled(X), plain)
    assert len(noting.heard) == 5
    assert graphs[1] == graphs[2]  # nothing is compiled over and over
