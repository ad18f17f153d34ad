"""Where a forward takes its input and its state, whatever it calls them and whatever else it takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import as_layer
from hiddenstate.cells.signature import StateArgument, arguments, first_input, give_state, given_state, state_argument
from hiddenstate.errors import LawBroken, NotRecurrent
from tests.support.calling import SUBCLASSES, subclassed


def module(forward):
    return type("Own", (nn.Module,), {"forward": forward})()


# forward -> where its state goes, where the kind calls it hx, and of a kind of the user's own
FORWARDS = [
    (lambda self, x, hx=None: 0, ("hx", 1, True), ("hx", 1, True)),
    (lambda self, x, state: 0, ("state", 1, False), ("state", 1, False)),
    (lambda self, x, context: 0, None, ("context", 1, False)),
    (lambda self, x, mask=None, hx=None: 0, ("hx", 2, True), ("hx", 2, True)),
    (lambda self, x, mask=None, prev_state=None, return_state=False: 0, ("prev_state", 2, True), None),
    (lambda self, x, hid, memory: 0, ("memory", 2, False), ("hid", 1, False)),
    (lambda self, x, mask, *, hx=None: 0, ("hx", None, True), ("mask", 1, False)),
    (lambda self, x, *, prev=None: 0, ("prev", None, True), ("prev", None, True)),
    (lambda self, x, h, /: 0, (None, 1, False), (None, 1, False)),
    (lambda self, *args, **kwargs: 0, ("hx", 1, True), None),
    (lambda self, x, mask=None, **kwargs: 0, ("hx", None, True), ("mask", 1, True)),
    (lambda self, x, lengths, *rest: 0, (None, 2, True), ("lengths", 1, False)),
    (lambda self, x, h0=None, c0=None: 0, None, ("h0", 1, True)),
    (lambda self, x, n=None: 0, None, ("n", 1, True)),
    (lambda self, x: 0, None, None),
]


@pytest.mark.parametrize(("forward", "of_torch", "own"), FORWARDS)
def test_the_state_is_told_from_what_else_a_forward_takes(forward, of_torch, own):
    kind = type(module(forward))
    assert state_argument(kind, "hx") == (None if of_torch is None else StateArgument(*of_torch))
    expected = ("prev_state", 2, True) if "prev_state" in arguments(kind) else own
    assert state_argument(kind) == (None if expected is None else StateArgument(*expected))


@pytest.mark.parametrize("name", ["hx", None])
@pytest.mark.parametrize(("forward", "of_torch", "own"), FORWARDS)
def test_what_is_given_is_found_where_it_arrives(forward, of_torch, own, name):
    made, x, h = module(forward), torch.randn(2, 3), torch.randn(2, 4)
    taken = state_argument(type(made), name)
    for args in ((x,), (x, None), (x, None, None)):
        if taken is None or (taken.name is None and len(args) < taken.place):
            with pytest.raises(NotRecurrent, match="Own was to be handed a state"):
                give_state(made, (args, {}), h, name)
            continue
        call = give_state(made, (args, {}), h, name)
        assert given_state(made, (args, {}), name) is None
        assert given_state(made, call, name) is h
        assert first_input(made, *call) is x


def test_the_first_input_is_found_by_the_name_that_a_forward_gives_it():
    x = torch.randn(2, 3)
    assert first_input(module(lambda self, sequence, hx=None: 0), (), {"hx": x[0], "sequence": x}) is x
    assert first_input(module(lambda self, *, sequence, hx=None: 0), (), {"hx": x[0], "sequence": x}) is x
    assert first_input(module(lambda self, *args, **kwargs: 0), (), {"hx": x[0], "input": x}) is x
    with pytest.raises(NotRecurrent, match="Own was called with NoneType as its first argument, but a tensor"):
        first_input(module(lambda self, *args, **kwargs: 0), (), {"x": x})


@pytest.mark.parametrize("forward", SUBCLASSES)
@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("engine", ["loop", "auto"])
@pytest.mark.filterwarnings("ignore::hiddenstate.errors.UnrollWarning")
def test_a_cell_is_stepped_with_its_state_where_it_takes_it(forward, kind, engine):
    cell = subclassed(kind, forward)(3, 4)
    plain = kind(3, 4)
    plain.load_state_dict(cell.state_dict())
    x = torch.randn(4, 9, 3)  # as many rows as units
    ours, theirs = hs.unroll(cell, x, engine=engine), hs.unroll(plain, x, engine="loop")
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(dict(ours[1]), dict(theirs[1]))


def stateless(self, x, mask=None):
    return nn.GRU.forward(self, x)


def apart(self, x, h0=None, c0=None):
    return nn.LSTM.forward(self, x, None if h0 is None else (h0, c0))


@pytest.mark.parametrize(
    ("kind", "forward", "message"),
    [
        (nn.GRU, stateless, r"at the layer '0': StatelessGRU was to be handed a state, but of forward\(x, mask=None\) "
         r"none of its arguments is named like one\. Let forward take the whole state as hx=None and hand it on"),
        (nn.LSTM, apart, r"ApartLSTM.*of forward\(x, h0=None, c0=None\) which of h0 and c0 takes it is unclear\. Let"),
    ],
)  # fmt: skip
def test_a_subclass_without_a_place_for_a_state_is_refused_by_name(kind, forward, message):
    model, x = nn.Sequential(subclassed(kind, forward)(3, 4, batch_first=True)), torch.randn(2, 6, 3)
    with hs.Carry(model), pytest.raises(NotRecurrent, match=message):
        [model(piece) for piece in x.split(3, dim=1)]
    with hs.record(model) as rec:  # what it is not handed it can still be seen to do
        model(x)
    assert rec["0.l0"].h.shape == (2, 6, 4)


def test_of_a_registered_kind_the_adapter_may_name_it():
    class Named(type(as_layer(nn.GRU(3, 4)).adapter)):
        state_name = "start"

    adapter = Named("gru")
    own = subclassed(nn.GRU, lambda self, x, memory=None, start=None: 0)(3, 4)
    assert adapter.give(own, (torch.ones(1),), {}, "h")[1] == {"start": "h"}


class StateFirst(nn.Module):
    """A cell as some write it, of equal widths: nothing but the names tells its input from its state."""

    def __init__(self, input_size=4, hidden_size=4):
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.inner = nn.Linear(input_size + hidden_size, hidden_size)

    def forward(self, hidden, x):
        return self.inner(torch.cat([x, hidden], dim=1)).tanh()


def stepped_by_hand(cell):
    hidden = torch.zeros(2, 4)
    for step in torch.randn(5, 2, 4):
        hidden = cell(hidden, step)


def recorded(cell):
    with hs.record(cell):
        stepped_by_hand(cell)


@pytest.mark.parametrize(
    "use",
    [
        lambda cell: hs.unroll(cell, torch.randn(2, 5, 4)),
        lambda cell: hs.Recurrent(type(cell), 4, 4)(torch.randn(2, 5, 4)),
        lambda cell: hs.measure.memory(cell, torch.randn(2, 5, 4)),
        lambda cell: hs.testing.check_cell(cell, torch.randn(2, 5, 4)),
        lambda cell: hs.testing.check_equations(cell, "rnn"),
        lambda cell: hs.regularize.Penalty(cell, temporal=1.0),
        recorded,
    ],
)
def test_a_cell_that_takes_its_state_first_is_refused_and_never_run_the_wrong_way_round(use):
    with pytest.raises((NotRecurrent, LawBroken), match=r"forward\(hidden, x\) takes its state first"):
        use(StateFirst())


@pytest.mark.parametrize("names", ["x, hidden", "prev_token, state", "h_below, s_prev", "h, c", "hidden, context"])
def test_other_names_do_not_stop_a_cell(names):
    namespace = {"torch": torch}
    exec(f"def forward(self, {names}): return torch.tanh(self.inner(torch.cat([{names}], dim=1)))", namespace)
    cell = type("Own", (StateFirst,), {"forward": namespace["forward"]})()
    outputs, _ = hs.unroll(cell, torch.randn(2, 5, 4))
    assert outputs.shape == (2, 5, 4)
