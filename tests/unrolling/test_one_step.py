"""A step of a cell that was stepped like this before takes a short way, and gives what the long way gives."""

import copy
import gc
import pickle
import sys
import weakref

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import CellAdapter, as_layer
from hiddenstate.errors import BadInput, NotRecurrent, StateMismatch
from hiddenstate.unrolling import one_step
from hiddenstate.unrolling.checks import read
from hiddenstate.unrolling.loop import run_loop
from hiddenstate.unrolling.one_step import StepForm, is_single, known_form, remember_step, step_again
from tests.support.cells import CELLS, HIDDEN, INPUT, ReadoutCell, TanhCell

TORCHS = {"lstm cell": nn.LSTMCell, "gru cell": nn.GRUCell, "rnn cell": nn.RNNCell}
MADE = {name: sample.cell for name, sample in CELLS.items()}
MADE |= {name: lambda kind=kind: kind(INPUT, HIDDEN) for name, kind in TORCHS.items()}


def input_of(name):
    return CELLS[name].x(batch=3, steps=1) if name in CELLS else torch.randn(3, 1, INPUT)


def long_way(cell, x, state=None):
    layer = as_layer(cell, x[:, 0])
    return run_loop(layer, read(layer, x, state, lengths=None, resets=None))


def outcome(cell, result):
    out, state = result
    loss = sum(value.cos().sum() for value in (out, *state.values()) if value.requires_grad)
    wanted = [parameter for parameter in cell.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
    return [out, *state.values(), *(grad for grad in grads if grad is not None)], state.batch_axis


@pytest.mark.parametrize("name", MADE)
def test_every_further_step_gives_what_the_first_gave_with_its_gradients(name):
    cell, x = MADE[name](), input_of(name)
    _, state = long_way(cell, x)
    state = state.detach()
    native = as_layer(cell).to_native(state)
    for given in (None, state, native):
        expected = outcome(cell, long_way(cell, x, given))
        for _ in range(2):
            found = outcome(cell, hs.unroll(cell, x, given, engine="loop"))
            assert found[1] == expected[1]
            torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(hs.unroll(cell, x, state)[0], long_way(cell, x, state)[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["TanhCell", *TORCHS])
def test_the_short_way_is_taken_from_the_second_step_on(name, monkeypatch):
    cell, x = MADE.get(name, TanhCell)(), torch.randn(3, 1, INPUT)
    assert known_form(cell, x) is None
    _, state = hs.unroll(cell, x)
    assert isinstance(known_form(cell, x), StepForm)
    monkeypatch.delattr(sys.modules["hiddenstate.unrolling.unroll"], "layer_for")  # which only the long way needs
    for given in (None, state, as_layer(cell).to_native(state)):
        hs.unroll(cell, x, given)
    assert step_again(cell, x.double(), state, timed=False) is None


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2}, {"bidirectional": True, "num_layers": 2}])
@pytest.mark.parametrize("kind", [TanhCell, ReadoutCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_stack_gives_the_same_at_every_step(kind, settings, batch_first):
    torch.manual_seed(0)
    if kind is ReadoutCell and settings:
        settings = {}  # its output is of another width
    stack = hs.Recurrent(kind, INPUT, HIDDEN, batch_first=batch_first, **settings)
    x = torch.randn(3, 1, INPUT) if batch_first else torch.randn(1, 3, INPUT)
    first, state = stack(x)
    again, after = stack(x)
    torch.testing.assert_close((again, after), (first, state), rtol=0, atol=0)
    expected = copy.deepcopy(stack)(x, state)
    found = stack(x, state)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    grads = [
        torch.autograd.grad(out.sum(), list(made.parameters()), allow_unused=True) for out, made in ((found[0], stack),)
    ]
    assert any(grad is not None for grad in grads[0])
    with pytest.raises(StateMismatch):
        stack(x, torch.zeros(7, 7, 7))


def refused(call):
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of whichever kind: the same as at first
        call()
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("name", ["tanh", "lstm cell", "gru cell"])
@pytest.mark.parametrize("wrong", ["rows", "units", "dtype", "parts", "axis", "width", "nothing"])
def test_what_is_wrong_is_refused_as_at_the_first_step(name, wrong):
    def make():
        torch.manual_seed(0)
        return MADE.get(name, TanhCell)()

    def given(cell):
        x = torch.randn(3, 1, INPUT + (wrong == "width"))
        rows = 2 if wrong == "rows" else 3
        parts = {part: torch.zeros(rows, HIDDEN + (wrong == "units")) for part in as_layer(cell).spec.parts}
        if wrong == "dtype":
            parts = {part: value.double() for part, value in parts.items()}
        if wrong == "parts":
            parts = {f"other {part}": value for part, value in parts.items()}
        if wrong == "axis":
            parts = {part: value.T for part, value in parts.items()}
        state = hs.State(parts, 1 if wrong == "axis" else 0)
        return x, "no state" if wrong == "nothing" else state

    fresh, known = make(), make()
    for _ in range(2):
        hs.unroll(known, torch.randn(3, 1, INPUT))
    torch.manual_seed(1)
    x, state = given(fresh)
    expected = refused(lambda: hs.unroll(fresh, x, state))
    assert refused(lambda: hs.unroll(known, x, state)) == expected


def test_a_state_that_does_not_fit_weights_of_another_dtype_any_more_is_refused():
    cell, x = nn.LSTMCell(INPUT, HIDDEN), torch.randn(3, 1, INPUT)
    _, state = hs.unroll(cell, x)
    hs.unroll(cell, x, state)
    with pytest.raises(StateMismatch, match=r"part 'h' of the state is torch\.float32, but LSTMCell works in"):
        hs.unroll(cell.double(), x.double(), state)


def test_hooks_see_every_step_and_may_change_it():
    cell, x = TanhCell(), torch.randn(3, 1, INPUT)
    hs.unroll(cell, x)
    seen = []
    cell.register_forward_hook(lambda module, args, result: seen.append(args[0].shape) or result * 2)
    plain = copy.deepcopy(cell)
    plain._forward_hooks.clear()
    with torch.no_grad():
        torch.testing.assert_close(hs.unroll(cell, x)[0], 2 * hs.unroll(plain, x)[0], rtol=0, atol=0)
    assert seen == [(3, INPUT)]


def test_a_cell_that_returns_something_else_than_before_is_parted_as_the_long_way_parts_it():
    class Changing(TanhCell):
        how = "state"

        def forward(self, x, h):
            h = super().forward(x, h)
            return {"state": h, "pair": (h * 2, h), "list": [h * 3, h], "wrong": {"h": h}}[self.how]

    cell, x = Changing(), torch.randn(3, 1, INPUT)
    _, h = hs.unroll(cell, x)
    for how, factor in (("pair", 2), ("list", 3), ("state", 1)):
        cell.how = how
        out, after = hs.unroll(cell, x)
        torch.testing.assert_close((out[:, 0], after["h"]), (h["h"] * factor, h["h"]))
    cell.how = "wrong"
    with pytest.raises(NotRecurrent, match=r"Changing returned a dict of h, but its state is a tensor"):
        hs.unroll(cell, x)


def test_the_output_is_nobody_elses():
    cell, x = TanhCell(), torch.randn(3, 1, INPUT)
    for _ in range(2):
        out, state = hs.unroll(cell, x)
        assert out.untyped_storage().data_ptr() != state["h"].untyped_storage().data_ptr()


def test_a_type_that_is_registered_later_is_called_as_its_adapter_says():
    class Late(TanhCell):
        pass

    class Doubled(CellAdapter):
        def split(self, module, result):
            return result * 2, result

    cell, x = Late(), torch.randn(3, 1, INPUT)
    out, _ = hs.unroll(cell, x)
    hs.unroll(cell, x)
    hs.register(Late, Doubled())
    torch.testing.assert_close(hs.unroll(cell, x)[0], 2 * out)


def test_what_is_known_keeps_no_cell_and_is_not_in_it():
    cell, x = TanhCell(), torch.randn(3, 1, INPUT)
    hs.unroll(cell, x)
    pickle.dumps(cell)
    gone = weakref.ref(cell)
    del cell
    gc.collect()
    assert gone() is None


def test_few_kinds_of_calls_are_remembered(monkeypatch):
    monkeypatch.setattr(one_step, "_MOST", 2)
    cell = TanhCell()
    inputs = [torch.randn(3, 1, INPUT), torch.randn(3, 1, 2, INPUT), torch.randn(3, 1, 3, 2, INPUT)]
    _, state = hs.unroll(cell, inputs[0])
    layer = as_layer(cell)
    for x in inputs:
        remember_step(layer, x, state)
    assert [known_form(cell, x) is None for x in inputs] == [True, False, False]


def test_one_step_is_one_step_of_a_plain_tensor():
    assert is_single(torch.zeros(2, 1, 3))
    assert not any(map(is_single, (torch.zeros(2, 2, 3), torch.zeros(3), nn.Parameter(torch.zeros(2, 1, 3)), None)))


def test_the_time_of_single_steps_counts_until_a_schedule_is_due():
    cell, x = TanhCell(), torch.randn(3, 1, INPUT)
    for _ in range(3):
        hs.unroll(cell, x)
    form = known_form(cell, x)
    assert form.spent.calls == 3
    assert form.spent.seconds > 0
    hs.unroll(cell, x, engine="loop")
    assert form.spent.calls == 3
    state = hs.unroll(cell, x)[1]
    form.spent.paid = True
    assert step_again(cell, x, state, timed=True) is None
    form.spent.fewest = 2  # as is found where the schedule is no faster for one step
    assert step_again(cell, x, state, timed=True) is not None


def test_the_environment_is_asked_at_every_step(monkeypatch):
    cell, x = TanhCell(), torch.randn(3, 1, INPUT)
    hs.unroll(cell, x)
    monkeypatch.setenv("HIDDENSTATE_ENGINE", "quick")
    with pytest.raises(BadInput, match=r"HIDDENSTATE_ENGINE is 'quick'"):
        hs.unroll(cell, x)
