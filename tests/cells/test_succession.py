"""Which call goes on from which."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import Call, Succession


def calls(cell, states):
    (layer,) = hs.layers(cell)
    for state in states:
        x = torch.randn(2, 3)
        args = (x,) if state is None else (x, state)
        yield Call(layer, args, {}, cell(*args))


def test_calls_from_outside_with_one_state_are_counted_and_told():
    cell, succession, h = nn.GRUCell(3, 4), Succession(), torch.randn(2, 4)
    for number, call in enumerate(calls(cell, [h, h, h.clone(), torch.zeros(2, 4), None])):
        assert not succession.goes_on(call, number)
        succession.ended(call, number)
    assert "called 3 times with the same state" in str(succession.complaint())


def test_within_one_call_of_the_model_leaves_of_a_tree_may_start_alike():
    cell, succession = nn.GRUCell(3, 4), Succession()
    for call in calls(cell, [torch.zeros(2, 4)] * 5):
        assert not succession.goes_on(call, 7)
        succession.ended(call, 7)
    assert succession.complaint() is None


def test_within_one_call_of_the_model_a_state_may_be_changed_by_anything():
    cell, succession = nn.GRUCell(3, 4), Succession()
    with torch.no_grad():
        first, second, third = calls(cell, [torch.ones(2, 4), torch.randn(2, 4), torch.ones(2, 4)])
    assert not succession.goes_on(first, 0)
    succession.ended(first, 0)
    first = first.returned(None)  # nobody holds what it ended in, so this can only come back changed
    assert succession.goes_on(second, 0)
    assert not succession.goes_on(third, 0)  # where the run began
    assert not succession.goes_on(second, 1)  # from outside it has to be recognized


def test_a_layer_that_is_called_in_a_way_of_its_own_is_left_alone():
    class Own(nn.GRU):
        def forward(self, *, sequence):
            return super().forward(sequence)[0].sum()

    layer, succession = Own(3, 4), Succession()
    call = Call(hs.layers(nn.GRU(3, 4))[0], (), {"sequence": torch.randn(5, 2, 3)}, torch.zeros(()))
    for number in range(5):
        assert not succession.goes_on(call, number)
        succession.ended(call, number)
    assert succession.complaint() is None
    monitor = hs.Monitor(layer, every=1)
    for _ in range(4):
        layer(sequence=torch.randn(5, 2, 3)).backward()
    assert monitor.step == 4
    with pytest.warns(hs.errors.HiddenStateWarning, match=r"saw nothing of model: .* returning something else"):
        monitor.close()


def runs_of(cell, states, numbers=None):
    """Return which run each call belongs to, numbered as they begin; a state may be a number: what that call gave."""
    (layer,), succession, ends, runs = hs.layers(cell), Succession(), [], []
    for at, state in enumerate(states):
        given = state(ends) if callable(state) else state
        call = Call(layer, (torch.randn(2, 3), given))
        run = succession.run_of(call, 0 if numbers is None else numbers[at])
        ends.append(cell(*call.args))
        succession.ended(call.returned(ends[-1]), 0 if numbers is None else numbers[at], run)
        runs.append(run)
    order = list(dict.fromkeys(runs))
    return [order.index(run) for run in runs], succession


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_a_call_goes_on_with_the_run_whose_end_it_is_handed(grad, outside):
    a, b = torch.randn(2, 40), torch.randn(2, 40)
    states = [a, b, lambda ends: ends[0], lambda ends: ends[1], lambda ends: ends[3], lambda ends: ends[2]]
    with torch.set_grad_enabled(grad):
        runs, _ = runs_of(nn.GRUCell(3, 40), states, range(6) if outside else None)
    assert runs == [0, 1, 0, 1, 1, 0]


@pytest.mark.parametrize("grad", [True, False])
def test_a_state_from_which_a_run_has_gone_on_begins_another_when_it_is_handed_in_again(grad):
    with torch.set_grad_enabled(grad):
        runs, _ = runs_of(nn.GRUCell(3, 40), [torch.zeros(2, 40), *[lambda ends: ends[0]] * 3, lambda ends: ends[2]])
    assert runs == [0, 0, 1, 2, 1]


@pytest.mark.parametrize("grad", [True, False])
def test_states_that_are_changed_on_the_way_go_on_with_their_own_run(grad):
    def normed(at):
        return lambda ends: torch.layer_norm(ends[at], (40,)) + 0.01 * torch.randn(2, 40)

    with torch.set_grad_enabled(grad):
        runs, _ = runs_of(nn.GRUCell(3, 40), [torch.zeros(2, 40)] * 2 + [normed(0), normed(1), normed(2), normed(3)])
    assert runs == [0, 1, 0, 1, 0, 1]


def test_a_learned_start_of_its_own_begins_another_run():
    first, second = torch.randn(40, requires_grad=True), torch.randn(40, requires_grad=True)
    runs, _ = runs_of(nn.GRUCell(3, 40), [first.expand(2, -1), second.expand(2, -1), lambda ends: ends[0]])
    assert runs == [0, 1, 0]


def test_several_sequences_that_start_alike_and_are_handed_on_are_told_nothing():
    five = [torch.zeros(2, 4)] * 5
    _, succession = runs_of(nn.GRUCell(3, 4), [*five, *(lambda ends: ends[-5] for _ in range(10))], range(15))
    assert succession.complaint() is None
    _, succession = runs_of(nn.GRUCell(3, 4), five, range(5))
    assert "called 5 times with the same state" in str(succession.complaint())


def begun(states, hold=False):
    """Return a succession after calls from these states, the runs that it has ended, and what it gave, if held."""
    cell, succession, (layer,) = nn.GRUCell(3, 4), Succession(), hs.layers(nn.GRUCell(3, 4))
    ended, ends = [], []
    for number, state in enumerate(states):
        call = Call(layer, (torch.randn(2, 3), state))
        run = succession.run_of(call, number)
        call = call.returned(cell(*call.args))
        ended += succession.ended(call, number, run)
        ends += [call.result] if hold else []
    return succession, ended, ends


def test_of_more_runs_than_are_kept_open_the_one_that_rested_longest_ends():
    succession, ended, _ = begun(torch.randn(20, 2, 4))
    assert len(succession.open) == 16
    assert len(ended) == 4
    assert not set(map(id, ended)) & set(map(id, succession.open))


def test_of_runs_whose_ends_are_held_or_that_start_alike_more_are_kept_open():
    held, _, ends = begun(torch.randn(40, 2, 4), hold=True)
    assert len(held.open) == len(ends) == 40
    alike, _, _ = begun(torch.zeros(40, 2, 4))
    assert len(alike.open) == 40
    for states, hold in ((torch.randn(80, 2, 4), True), (torch.zeros(80, 2, 4), False)):
        succession, ended, _ = begun(states, hold)
        assert len(succession.open) == 64
        assert len(ended) == 16


def test_runs_that_were_held_are_ended_once_nobody_holds_them():
    succession, _, ends = begun(torch.randn(40, 2, 4), hold=True)
    ends.clear()
    (layer,) = hs.layers(cell := nn.GRUCell(3, 4))
    call = Call(layer, (torch.randn(2, 3), torch.randn(2, 4)))
    run = succession.run_of(call, 99)
    assert len(succession.ended(call.returned(cell(*call.args)), 99, run)) == 25
    assert len(succession.open) == 16


CHANGES = {
    "as it is": lambda h: h,
    "detached": lambda h: h.detach(),
    "copied": lambda h: h.detach().clone(),
    "listed": lambda h: torch.tensor(h.tolist()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("sequences", [3, 12, 40])
def test_sequences_that_start_alike_and_are_fed_in_turns_are_each_one_run_and_told_nothing(sequences, grad, change):
    cell, succession, (layer,) = nn.GRUCell(3, 4), Succession(), hs.layers(nn.GRUCell(3, 4))
    states, seen = [torch.zeros(2, 4)] * sequences, {}
    for turn in range(3):
        for at in range(sequences):
            number = turn * sequences + at
            call = Call(layer, (torch.randn(2, 3), states[at]))
            run = succession.run_of(call, number)
            assert seen.setdefault(at, run) is run
            with torch.set_grad_enabled(grad):
                call = call.returned(cell(*call.args))
            succession.ended(call, number, run)
            states[at] = change(call.result)
            assert succession.complaint(over=False) is None
    assert succession.complaint() is None


def test_before_the_end_only_more_calls_than_could_be_in_turns_are_told():
    few, _, _ = begun(torch.zeros(30, 2, 4))
    assert few.complaint(over=False) is None
    assert "called 30 times with the same state" in str(few.complaint())
    many, _, _ = begun(torch.zeros(64, 2, 4))
    assert "called 64 times with the same state" in str(many.complaint(over=False))


def test_more_sequences_in_turns_than_are_followed_are_told_as_such():
    (layer,), cell, succession = hs.layers(cell := nn.GRUCell(3, 4)), cell, Succession()
    states = [torch.zeros(2, 4)] * 70
    for number in range(140):
        call = Call(layer, (torch.randn(2, 3), states[number % 70]))
        run = succession.run_of(call, number)
        states[number % 70] = cell(*call.args).detach()
        succession.ended(call.returned(states[number % 70]), number, run)
    complaint = succession.complaint()
    assert complaint.too_many
    assert "in turns along more than 64 sequences" in str(complaint)
    assert "as the rows of one batch" in str(complaint)


@pytest.mark.parametrize("rows", [[2, 0, 1, 3], [1, 1, 0, 3], [3, 2, 1, 0]])
def test_rows_in_another_order_as_a_beam_search_chooses_them_go_on_with_their_run(rows):
    cell, succession, (layer,) = nn.GRUCell(3, 8), Succession(), hs.layers(nn.GRUCell(3, 8))
    h = torch.randn(4, 8)
    with torch.no_grad():
        for number in range(4):
            call = Call(layer, (torch.randn(4, 3), h))
            assert succession.goes_on(call, number) == (number > 0)
            call = call.returned(cell(*call.args))
            succession.ended(call, number)
            h = call.result[rows]
