"""Cells: steps joined along time, one run for each call of the model."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs


class Leaky(nn.Module):
    """A cell of the user's own, with a nested state and a gate it names."""

    def __init__(self, features=3, hidden_size=4):
        super().__init__()
        self.hidden_size = hidden_size
        self.inner = nn.Linear(features + hidden_size, hidden_size)

    def initial_state(self, batch):
        return {"h": torch.zeros(batch, self.hidden_size), "age": torch.zeros(batch, 1)}

    def forward(self, x, state):
        keep = hs.tap("keep", torch.sigmoid(self.inner(torch.cat([x, state["h"]], -1))))
        return {"h": keep * state["h"] + (1 - keep) * x[:, :1], "age": state["age"] + 1}


class Stepping(nn.Module):
    """A model with its own loop over a cell."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x, state=None):
        states = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state) if state is not None else self.cell(x[:, t])
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, 1)


FUSED = {nn.LSTMCell: nn.LSTM, nn.GRUCell: nn.GRU, nn.RNNCell: nn.RNN}


def fused_like(cell):
    layer = FUSED[type(cell)](cell.input_size, cell.hidden_size, batch_first=True, bias=cell.bias)
    for name, parameter in cell.named_parameters():
        getattr(layer, f"{name}_l0").data.copy_(parameter.data)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", FUSED)
def test_a_cell_in_the_users_loop_is_recorded_like_the_layer_it_is(kind, bias):
    model, x = Stepping(kind(3, 4, bias=bias)), torch.randn(2, 6, 3)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            plain = model(x)
            for _ in range(2):
                with hs.record(model, gates=True) as rec:
                    assert torch.equal(model(x), plain)
    layer = fused_like(model.cell)
    with hs.record(layer, gates=True) as expected:
        layer(x)
    seen, wanted = rec["cell"], expected["l0"]
    assert torch.equal(seen.h, plain)
    torch.testing.assert_close(seen.h, wanted.h)
    assert set(seen.gates) == set(wanted.gates)
    for name, gate in wanted.gates.items():
        torch.testing.assert_close(seen.gates[name], gate)
    if kind is nn.LSTMCell:
        torch.testing.assert_close(seen.c, wanted.c)
    assert all(not part.any() and part.shape == (2, 4) for part in seen.initial.values())


@pytest.mark.parametrize("kind", FUSED)
def test_a_cells_gradients_are_those_of_a_plain_run_to_the_bit(kind):
    model, x = Stepping(kind(3, 4)), torch.randn(2, 6, 3)

    def train(context):
        model.zero_grad()
        with context:
            model(x).sin().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = train(torch.enable_grad())
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(train(hs.record(model, gates=True)), plain, strict=True))


def test_every_call_of_the_model_is_a_run_of_its_own():
    model = Stepping(nn.GRUCell(3, 4))
    with hs.record(model) as rec:
        outs = [model(torch.randn(2, steps, 3)) for steps in (5, 1, 3)]
    assert [run.h.shape[1] for run in rec.runs("cell")] == [5, 1, 3]
    assert all(torch.equal(run.h, out) for run, out in zip(rec.runs("cell"), outs, strict=True))
    with pytest.raises(hs.errors.SeveralRuns, match=r"'cell' has 3 runs.*rec.runs\('cell'\)"):
        rec["cell"]


def test_a_cell_that_is_the_model_itself_starts_anew_where_its_state_does():
    cell, x, learned = nn.LSTMCell(3, 4), torch.randn(2, 6, 3), torch.ones(2, 4)
    with hs.record(cell) as rec:
        for start in ((learned, learned), (learned, learned), None, (torch.zeros(2, 4), torch.zeros(2, 4)), None):
            state = start
            for t in range(6):
                state = cell(x[:, t], state) if state is not None else cell(x[:, t])
                state = tuple(part.detach() * 2 if t % 2 else part for part in state)  # changed: it goes on
    assert [run.h.shape[1] for run in rec.runs("l0")] == [6] * 5


def test_a_custom_cell_shows_its_parts_and_what_it_taps():
    cell, x = Leaky(), torch.randn(2, 5, 3)
    states = [cell.initial_state(2)]
    for t in range(5):
        states.append(cell(x[:, t], states[-1]))
    with hs.record(cell, gates=True) as rec:
        state = cell.initial_state(2)
        for t in range(5):
            state = cell(x[:, t], state)
    run = rec["l0"]
    assert torch.equal(run.h, torch.stack([s["h"] for s in states[1:]], 1))
    assert torch.equal(run.others["age"], torch.arange(1.0, 6).view(1, 5, 1).expand(2, 5, 1))
    assert run.gates["keep"].shape == (2, 5, 4)
    assert set(run.initial) == {"h", "age"}
    assert run.kind == "cell"


def test_a_batch_that_shrinks_on_the_way_has_rows_that_ended_early():
    model = nn.Module()
    model.cell = nn.GRUCell(3, 4)

    def forward(x, lengths):
        h = torch.zeros(len(lengths), 4)
        for t in range(max(lengths)):
            alive = sum(length > t for length in lengths)
            h = model.cell(x[:alive, t], h[:alive])

    model.forward = forward
    with hs.record(model, gates=True) as rec:
        model(torch.randn(3, 5, 3), [5, 3, 1])
    run = rec["cell"]
    assert run.lengths.tolist() == [5, 3, 1]
    assert not run.h[~run.valid].any()
    assert not run.gates["update"][~run.valid].any()


@given(every=st.integers(1, 7), steps=st.integers(1, 9))
def test_every_keeps_steps_by_their_number(every, steps):
    model, x = Stepping(nn.LSTMCell(3, 4)), torch.randn(2, steps, 3)
    with hs.record(model, gates=True) as whole, hs.record(model, gates=True, every=every) as thin:
        model(x)
    assert torch.equal(thin["cell"].h, whole["cell"].h[:, ::every])
    assert torch.equal(thin["cell"].gates["forget"], whole["cell"].gates["forget"][:, ::every])
    assert thin["cell"].valid.all()
    assert thin["cell"].every == every


def test_a_run_under_way_can_be_read_as_far_as_it_has_come():
    cell = nn.GRUCell(3, 4)
    with hs.record(cell) as rec:
        h = cell(torch.randn(2, 3))
        assert rec["l0"].h.shape == (2, 1, 4)
        cell(torch.randn(2, 3), h)
        assert rec["l0"].h.shape == (2, 2, 4)
    assert rec["l0"].h.shape == (2, 2, 4)


def test_unbatched_steps_are_a_batch_of_one():
    cell = nn.LSTMCell(3, 4)
    with hs.record(cell, gates=True, grads=True) as rec:
        state = cell(torch.randn(3))
        state = cell(torch.randn(3), state)
        state[0].sum().backward()
    run = rec["l0"]
    assert run.h.shape == run.c.shape == run.gates["input"].shape == (1, 2, 4)
    assert torch.equal(run.grads["h"][0, 1], torch.ones(4))


@pytest.mark.parametrize("lengths", [None, [2, 5, 3], [5, 5, 5]], ids=str)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, Leaky])
def test_a_recurrent_stack_is_recorded_in_the_order_of_rows_and_positions(cell, both, lengths):
    stack, x = hs.Recurrent(cell, 3, 4, num_layers=2, bidirectional=both), torch.randn(3, 5, 3)
    given_lengths = None if lengths is None else torch.tensor(lengths)
    with hs.record(stack, gates=True, grads=True) as rec:
        out, _ = stack(x, lengths=given_lengths)
        out.square().sum().backward()
    assert list(rec) == (["l0", "l0_reverse", "l1", "l1_reverse"] if both else ["l0", "l1"])
    top = [rec[track] for track in rec][-(2 if both else 1) :]
    assert torch.equal(torch.cat([run.h for run in top], -1), out.detach())
    for run in rec.values():
        assert run.lengths.tolist() == (lengths or [5, 5, 5])
        assert not run.h[~run.valid].any()
        for gate in run.gates.values():
            assert gate.shape == (3, 5, 4)
            assert not gate[~run.valid].any()
    torch.testing.assert_close(top[-1].grads["h"][1, 0 if both else 4], 2 * top[-1].h[1, 0 if both else 4])


def test_a_recurrent_stack_in_a_model_has_tracks_of_its_own():
    model = nn.ModuleDict({"stack": hs.Recurrent(nn.GRUCell, 3, 4), "head": nn.Linear(4, 2)})
    model.forward = lambda x: model["head"](model["stack"](x)[0])
    with hs.record(model) as rec:
        model(torch.randn(2, 5, 3))
        model(torch.randn(2, 5, 3))
    assert [len(rec.runs(track)) for track in rec] == [2]
    assert list(rec) == ["stack.l0"]


def test_a_thinned_reverse_track_keeps_positions_not_computations():
    stack, x = hs.Recurrent(nn.GRUCell, 3, 4, bidirectional=True), torch.randn(2, 7, 3)
    with hs.record(stack) as whole, hs.record(stack, every=3) as thin:
        stack(x, lengths=torch.tensor([4, 7]))
    for track in whole:
        assert torch.equal(thin[track].h, whole[track].h[:, ::3])
        assert thin[track].lengths.tolist() == [2, 3]


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, Leaky])
def test_rows_of_an_unrolled_cell_are_in_the_users_order(cell):
    cell, x, lengths = cell(3, 4), torch.randn(3, 5, 3), torch.tensor([2, 5, 3])
    with hs.record(cell, gates=True, every=2) as thin, hs.record(cell, gates=True) as rec:
        out, _ = hs.unroll(cell, x, lengths=lengths)
    run = rec["l0"]
    assert torch.equal(run.h, out.detach())
    assert run.lengths.tolist() == [2, 5, 3]
    assert torch.equal(thin["l0"].h, run.h[:, ::2])
    assert thin["l0"].lengths.tolist() == [1, 3, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's tracing asks for it
@pytest.mark.parametrize("wrap", [False, True], ids=["unroll", "Recurrent"])
def test_a_cell_that_runs_by_a_schedule_goes_on_running_by_it(wrap):
    model, x, lengths = Leaky(), torch.randn(3, 6, 3), torch.tensor([2, 6, 3])
    if wrap:
        model = hs.Recurrent(Leaky, 3, 4, num_layers=2, bidirectional=True)

    def run():
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        out, _ = hs.unroll(model, leaf, lengths=lengths, engine="fast")
        out.sin().sum().backward()
        return [out.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]

    for _ in range(2):  # recorded while it is traced, and afterwards
        with hs.record(model, gates=True) as rec:
            recorded = run()
        plain = run()
        assert all(torch.equal(a, b) for a, b in zip(recorded, plain, strict=True))
        top = [rec[track] for track in rec][-(2 if wrap else 1) :]
        torch.testing.assert_close(torch.cat([run.h for run in top], -1), plain[0])
        for run_of in rec.values():
            assert run_of.lengths.tolist() == [2, 6, 3]
            assert run_of.gates["keep"].shape == (3, 6, 4)


class Lookalike(nn.Module):
    """Takes something named like a state, but gives back no such thing."""

    hidden_size = 4

    def forward(self, x, hidden):
        return {"scores": x, "note": "no state"}


@pytest.mark.parametrize("filter", ["always", "error"])
def test_what_only_looks_like_a_cell_runs_on_unrecorded(filter):
    model = nn.ModuleDict({"attention": Lookalike(), "gru": nn.GRU(3, 4)})
    model.forward = lambda x: (model["gru"](x)[0], model["attention"](x[0], torch.zeros(2, 4)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter(filter)
        with hs.record(model, tracks=["attention", "gru"]) as rec:
            for _ in range(2):
                _, other = model(torch.randn(6, 2, 3))
    assert other["note"] == "no state"
    assert list(rec) == ["gru.l0"]
    if filter == "always":
        (warning,) = seen
        assert issubclass(warning.category, hs.errors.RecordingWarning)
        said = str(warning.message)
        assert "'attention' is not recorded: Lookalike returned a dict" in said  # the layer is named once
        assert said.count("'attention'") == 1


def test_a_state_that_changes_its_size_starts_a_new_run():
    class Growing(nn.Module):
        hidden_size = 2

        def initial_state(self, batch):
            return torch.zeros(batch, 2)

        def forward(self, x, state):
            return torch.cat([state, x], -1) if x.shape[-1] == 1 else state + 1

    model = nn.ModuleDict({"cell": Growing()})

    def forward(plan):
        state = torch.zeros(3, 2)
        for width in plan:
            state = model["cell"](torch.ones(3, width), state)

    model.forward = forward
    with hs.record(model) as rec:
        model([2, 2, 1, 3, 3])
    assert [tuple(run.h.shape) for run in rec.runs("cell")] == [(3, 2, 2), (3, 3, 3)]
