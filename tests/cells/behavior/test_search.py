"""What `find` says of models without time, with state from call to call, and of what it cannot see."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from torch import nn

from hiddenstate.cells.behavior import find
from tests.cells.behavior import models, others
from tests.support.untouched import untouched

B, T, X, H = others.B, others.T, others.X, others.H


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(B, T, X)


def parts_of(found) -> set[tuple[str, str, str]]:
    return {(each.kind, each.module, part.name) for each in found.recurrences for part in each.parts}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (others.Raft, {("iteration", "cell", "h"), ("iteration", "", "flow")}),
        (others.Shared, {("iteration", "block", "x")}),
        (others.Sampler, {("iteration", "", "z")}),
        (others.Slots, {("iteration", "cell", "slots")}),
        (others.Unrolled, {("iteration", "", "z")}),
        (others.Sinkhorn, {("iteration", "", "a")}),
        (others.Greedy, {("iteration", "cell", "h"), ("iteration", "", "token")}),
        (others.Keeps, {("attribute", "", "h")}),
        (others.KeepsBuffer, {("attribute", "", "h")}),
        (others.KeepsInDict, {("attribute", "", "h")}),
        (others.LoopsOn, {("attribute", "", "h")}),
        (others.Segments, {("attribute", "", "memory")}),
        (others.KeyCache, {("cache", "", "keys")}),
        (others.KeysInLoop, {("cache", "", "keys")}),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_what_repeats_is_called_what_it_is(make, expected, x):
    model = make()
    with untouched(model):
        found = find(model, (x,))
    assert parts_of(found) == expected, found.explain()
    assert found.unsure == (), found.explain()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (others.Halting, r"leaves for Python \(__bool__ at others.py:\d+\)"),
        (others.ThroughNumpy, r"leaves for Python \(numpy"),
        (others.InNumbers, r"numbers leave for Python within the loop"),
        (others.WrittenOutByHand, r"u.weight is used 3 times, each on what the time before gave, without a loop"),
        (others.Mapped, r"no operation seen from Python has made"),
        (others.InThread, r"called in another thread, whose operations are not seen"),
        (others.Scan, r"logcumsumexp runs along an axis: a scan without a loop"),
        (others.Shrinking, r"changes its size from repetition to repetition"),
        (others.Fused, r"a fused recurrent kernel \(lstm\)"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_what_cannot_be_seen_is_said_by_name_and_never_claimed(make, reason, x):
    model = make()
    with untouched(model):
        found = find(model, (x,))
    assert found.recurrences == (), found.explain()
    assert any(re.search(reason, each.why) for each in found.unsure), found.explain()
    assert any(re.search(reason, line) for line in found.explain().splitlines())


def test_two_repetitions_decide_nothing_and_say_so(x):
    found = find(models.Elman(), (x[:, :2],))
    assert found.recurrences == ()
    assert "only two repetitions: call the model with three or more" in found.unsure[0].why


def test_a_loop_that_ran_once_is_named_as_not_examined(x):
    found = find(models.Elman(), (x[:, :1],))
    assert found.recurrences == ()
    assert re.search(r"not examined:\n  models.py:\d+: a loop that ran once", found.explain())


def test_a_scripted_model_is_refused_by_name(x):
    with pytest.warns(DeprecationWarning, match="script"):
        model = torch.jit.script(nn.GRUCell(X, H))
    assert "scripted" in find(model, (x[:, 0],)).unsure[0].why


def test_known_modules_are_one_operation_and_their_crossing_state_is_noted(x):
    model = models.OneHand()
    found = find(model, (x,), known=[model.cell])
    assert found.recurrences == ()
    assert found.unsure == ()
    assert [(each.module, each.why) for each in found.known] == [
        ("cell", f"called {T} times, handed what it gave before")
    ]
    assert "known by type, and its state crosses:" in found.explain()


def test_a_wrapper_around_a_known_layer_is_not_told_twice(x):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(X, H, batch_first=True)

        def forward(self, x, h):
            y, h = self.gru(x.unsqueeze(1), h)
            return y.squeeze(1), h

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = Decoder()

        def forward(self, x):
            h = torch.zeros(1, x.shape[0], H)
            for t in range(x.shape[1]):
                y, h = self.decoder(x[:, t], h)
            return y

    model = Model()
    found = find(model, (x,), known=[model.decoder.gru])
    assert found.recurrences == ()
    assert [each.module for each in found.known] == ["decoder.gru"]


def test_what_is_excluded_is_left_out(x):
    model = models.BothWays()
    assert [each.module for each in find(model, (x,), exclude=["forth"]).recurrences] == ["back"]


def test_the_places_of_a_cells_state_are_told(x):
    (cell,) = find(models.Pair(), (x,)).recurrences
    assert [(part.argument, part.result) for part in cell.parts] == [(("args", 1, 0), (1, 0)), (("args", 1, 1), (1, 1))]
    assert torch.equal(cell.parts[0].initial, torch.zeros(B, H))  # which the cell made itself
    assert re.fullmatch(r"models.py:\d+", cell.line)


def test_where_a_loop_starts_from_is_told(x):
    (loop,) = find(models.LearnedStart(), (x,)).recurrences
    assert loop.parts[0].initial.shape == (B, H)
    (loop,) = find(models.Buffered(), (x,)).recurrences
    assert torch.equal(loop.parts[0].initial, torch.zeros(B, X))


def test_an_error_of_the_model_comes_out_as_it_is_and_the_model_unharmed(x):
    class Broken(others.Keeps):
        def forward(self, x):
            super().forward(x)
            random.random(), np.random.rand(), torch.rand(1)
            raise KeyError("of the model itself")

    model = Broken()
    before = random.getstate(), np.random.get_state()[1].tolist()
    with untouched(model), pytest.raises(KeyError, match="of the model itself"):
        find(model, (x,))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert model.h is None
    assert "forward" not in vars(model)


def test_gradients_that_were_there_stay_and_none_are_added(x):
    model = models.Elman()
    model(x).sum().backward()
    grads = [weight.grad for weight in model.parameters()]
    with untouched(model):
        find(model, (x,))
    assert all(weight.grad is grad for weight, grad in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_values_are_right_in_every_gradient_mode(mode, x):
    model = models.InPlace()
    with torch.no_grad():
        (plain,) = find(model, (x,)).recurrences
    with mode():
        (found,) = find(model, (x,)).recurrences
    assert all(torch.equal(a, b) for a, b in zip(plain.parts[0].values, found.parts[0].values, strict=True))
    assert not any(value.requires_grad for value in found.parts[0].values)


def test_a_compiled_model_is_traced_as_it_was_written(x):
    model = models.LearnedStart()
    model.cell = torch.compile(model.cell)
    assert parts_of(find(torch.compile(model), (x,))) == {("cell", "cell", "h")}


def test_one_row_and_no_rows_are_no_trouble(x):
    (one,) = find(models.Elman(), (x[:1],)).recurrences
    assert one.parts[0].batch_axis == 0

    class Unbatched(others.Plain):
        def forward(self, x):
            h = torch.zeros(X)
            for x_t in x:
                h = self.step(x_t, h)
            return h

    (loop,) = find(Unbatched(), (x[0],)).recurrences
    assert loop.parts[0].batch_axis is None


def test_sparse_tensors_packed_sequences_and_dictionaries_are_no_trouble(x):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = models.Step()
            self.graph = torch.eye(X).to_sparse()

        def forward(self, *, packed, extra):
            x, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
            h = torch.zeros(x.shape[0], H)
            for t in range(x.shape[1]):
                h = self.cell(torch.sparse.mm(self.graph, x[:, t].t()).t(), h)
            return {"state": h, "given": extra["sparse"]}

    packed = nn.utils.rnn.pack_padded_sequence(x, [6, 5, 3], batch_first=True)
    found = find(Odd(), (), {"packed": packed, "extra": {"sparse": torch.eye(3).to_sparse(), "none": None}})
    assert parts_of(found) == {("cell", "cell", "h")}, found.explain()


def test_a_failure_of_the_analysis_is_said_and_nothing_is_claimed(x, monkeypatch):
    def broken(trace, **_):
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr("hiddenstate.cells.behavior.search.analyze", broken)
    found = find(models.Elman(), (x,))
    assert found.recurrences == ()
    assert "the analysis of this call failed (ZeroDivisionError: of our own): nothing is claimed" in found.unsure[0].why


def test_the_explanation_tells_what_how_and_where(x):
    text = find(models.WithLoss(), (x, x[..., 0])).explain()
    assert re.search(r"cell in cell \(models.py:\d+\), 6 repetitions", text)
    assert "h: (3, 5) float32, rows along axis 0, starts from a tensor" in text
    assert "called 6 times, each time handed what it gave before (argument [1][0] from result[1][0]" in text
    assert "each repetition takes its own piece of the call's input: time" in text
    assert "repetitions run again from the parts alone give the same, from others something else" in text
    assert "a sum or list only collects: nothing within the loop reads it" in text


def test_what_a_model_keeps_deep_inside_and_its_inputs_come_back_too(x):
    class Deep(others.Plain):
        def __init__(self):
            super().__init__()
            self.kept = {"list": [torch.zeros(X)], "more": {"count": 0}}
            self.draws = torch.Generator().manual_seed(0)

        def forward(self, x):
            x.mul_(2)
            self.kept["list"].append(x.mean())
            self.kept["list"][0].add_(1)
            self.kept["more"]["count"] += 1
            self.weird = torch.rand(2, generator=self.draws)
            self.w.weight.data.mul_(0.5)
            return self.w(x)

    model, before = Deep(), x.clone()
    draws = model.draws.get_state()
    with untouched(model):
        find(model, (x,))
    assert torch.equal(x, before)
    assert model.kept["more"] == {"count": 0}
    assert len(model.kept["list"]) == 1
    assert torch.equal(model.kept["list"][0], torch.zeros(X))
    assert torch.equal(model.draws.get_state(), draws)
    assert not hasattr(model, "weird")


def test_a_failure_within_the_trace_leaves_the_models_call_alone(x, monkeypatch):
    def broken(self, *args):
        raise ZeroDivisionError("of our own")

    class Model(models.Elman):
        def forward(self, x):
            result = super().forward(x)
            results.append(result)
            return result

    results = []
    model = Model()
    plain = model(x)
    monkeypatch.setattr("hiddenstate.cells.behavior.trace.Trace._make", broken)
    found = find(model, (x,))
    assert torch.equal(results[-1], plain)
    assert found.recurrences == ()
    assert "ZeroDivisionError: of our own" in found.unsure[0].why


def test_what_fails_only_while_it_is_watched_is_not_the_users_error(x, monkeypatch):
    class Shy(nn.Module):
        def forward(self, x):
            if torch._C._len_torch_function_stack():
                raise RuntimeError("not under a mode")
            return x

    found = find(Shy(), (x,))
    assert found.recurrences == ()
    assert "not under a mode" in found.unsure[0].why


@pytest.mark.parametrize("error", [MemoryError("all gone"), torch.OutOfMemoryError("all gone")])
def test_a_call_that_runs_out_of_memory_is_unsure(error, x):
    class Large(nn.Module):
        def forward(self, x):
            raise error

    assert "all gone" in find(Large(), (x,)).unsure[0].why


def test_a_trace_that_would_keep_too_much_ends_and_lets_the_call_go_on(x, monkeypatch):
    monkeypatch.setattr("hiddenstate.cells.behavior.trace._MOST", 100)
    model = models.Elman()
    with untouched(model):
        found = find(model, (x,))
    assert found.recurrences == ()
    assert "call it with fewer rows or steps" in found.unsure[0].why


def test_a_known_cell_stepped_without_input_is_told_as_an_iteration(x):
    class Rounds(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(X, X)

        def forward(self, x):
            h = x.mean(1)
            for _ in range(4):
                h = self.cell(h.flip(0), h)
            return h

    model = Rounds()
    found = find(model, (x,), known=[model.cell])
    assert [(each.kind, each.module, each.parts[0].name) for each in found.recurrences] == [("iteration", "cell", "h")]
    assert found.iterated == ("cell",)
    assert "an iteration, which nobody should carry" in found.explain()


def test_lines_are_the_users_own(x):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(X, X), nn.Tanh(), nn.Linear(X, X))
            self.last = None

        def forward(self, x):
            if self.last is not None:
                x = x + self.last
            self.last = self.net(x)
            return self.last

    found = find(Twice(), (x,))
    lines = {each.line for each in (*found.recurrences, *found.unsure, *found.passed)}
    assert {line.split(":")[0] for line in lines} == {"test_search.py"}, lines


def test_a_lattice_of_sums_and_maxima_is_no_sum(x):
    class Viterbi(nn.Module):
        def __init__(self):
            super().__init__()
            self.moves = nn.Parameter(torch.randn(X, X))

        def forward(self, x):
            score = x[:, 0]
            for t in range(1, x.shape[1]):
                score = (score.unsqueeze(2) + self.moves).max(1).values + x[:, t]
            return score

    (loop,) = find(Viterbi(), (x,)).recurrences
    assert (loop.kind, loop.parts[0].name) == ("loop", "score")
    assert any("made before the loop" in sentence for sentence in loop.evidence)


def test_what_the_last_turn_leaves_is_told_where_it_is_made_elsewhere(x):
    class Sampler(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(X, X)

        def forward(self, x):
            z = x[:, 0]
            for i in reversed(range(5)):
                z = torch.tanh(self.net(z))
                if i:
                    z = z + 0.1 * torch.randn_like(z)
            return z

    model = Sampler()
    torch.manual_seed(3)
    (loop,) = find(model, (x,)).recurrences
    torch.manual_seed(3)
    assert torch.equal(loop.parts[0].values[-1], model(x).detach())
