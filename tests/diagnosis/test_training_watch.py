"""What only a training run shows."""

import contextlib

import pytest
import torch
from torch import nn

import hiddenstate as hs


def clipped_after(optimizer, model):
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.zero_grad()


def clipped_before(optimizer, model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def accumulated_on(optimizer, model):
    optimizer.step()
    model(torch.randn(4, 9, 3))[0].square().sum().backward()
    optimizer.zero_grad()


def zeroed_in_place(optimizer, model):
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def values_cut_after(optimizer, model):
    optimizer.step()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.zero_grad()


def values_cut_before(optimizer, model):
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def one_cut_by_hand(optimizer, model):
    optimizer.step()
    for p in model.parameters():
        p.grad.mul_(torch.rand_like(p.grad))  # rewritten, and cut at no common number
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("update", "told"),
    [
        (clipped_after, True),
        (clipped_before, False),
        (values_cut_after, True),
        (values_cut_before, False),
        (accumulated_on, False),
        (zeroed_in_place, False),
        (one_cut_by_hand, False),
    ],
)
def test_gradients_that_are_scaled_after_their_update_are_told(update, told, kind):
    model = nn.GRU(3, 8, batch_first=True)
    optimizer = kind(model.parameters(), lr=1e-3)
    with hs.Monitor(model, optimizer, every=1) as monitor:
        for _ in range(3):
            model(torch.randn(4, 9, 3))[0].square().sum().backward()
            update(optimizer, model)
    assert ("HS505" in {each.finding.code for each in monitor.findings}) == told


@pytest.mark.parametrize("fresh", [False, True])
def test_a_carried_state_that_validation_moves_on_is_told(fresh):
    model = nn.LSTM(3, 8, batch_first=True)
    with hs.Carry(model) as carry, hs.Monitor(model, every=1) as monitor:
        for _ in range(3):
            model.train()
            model(torch.randn(4, 9, 3))[0].square().mean().backward()
            model.eval()
            if fresh:
                with carry.fresh():
                    model(torch.randn(4, 9, 3))
            else:
                model(torch.randn(4, 9, 3))
    assert ("HS208" in {each.finding.code for each in monitor.findings}) != fresh


def test_values_cut_too_late_are_told_with_the_number_and_the_way_out():
    model = nn.GRU(3, 8, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hs.Monitor(model, optimizer, every=1) as monitor:
        for _ in range(2):
            model(torch.randn(4, 9, 3))[0].square().sum().backward()
            values_cut_after(optimizer, model)
    (episode,) = monitor.findings
    assert "gradients were cut off at ±0.1 after the update had used them" in episode.finding.evidence
    assert "clip_grad_value_(model.parameters(), 1.0); optimizer.step()" in episode.finding.advice


def test_clipping_too_late_that_is_mended_ends():
    model = nn.GRU(3, 8, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hs.Monitor(model, optimizer, every=1) as monitor:
        for update in [clipped_before, clipped_after, clipped_after, clipped_before, clipped_before]:
            model(torch.randn(4, 9, 3))[0].square().sum().backward()
            update(optimizer, model)
    (episode,) = monitor.findings
    assert (episode.finding.code, episode.began, episode.ended) == ("HS505", 1, 3)


def test_validation_that_leaks_no_longer_ends():
    model = nn.LSTM(3, 8, batch_first=True)
    with hs.Carry(model) as carry, hs.Monitor(model, every=1) as monitor:
        for reset in (False, False, True, True):
            model.train()
            model(torch.randn(4, 9, 3))[0].square().mean().backward()
            model.eval()
            model(torch.randn(4, 9, 3))
            if reset:
                carry.reset()
        model.train()
        model(torch.randn(4, 9, 3))[0].square().mean().backward()
    (episode,) = monitor.findings
    assert (episode.finding.code, episode.began, episode.ended) == ("HS208", 1, 3)


def carried_and_trained(model, carry, optimizer):
    with carry() if carry is not None else contextlib.nullcontext():
        for x in torch.randn(4, 40, 3).split(10, 1):
            optimizer.zero_grad()
            model(x)[0].sum().backward()
            optimizer.step()


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("order", ["monitor first", "carry first", "carry in each epoch", "carry later"])
def test_a_learned_start_outside_the_optimizer_is_told_whichever_is_opened_first(order, trained, kind):
    model = kind(3, 6, batch_first=True)
    learned = hs.Learned(model)
    optimizer = torch.optim.SGD([*model.parameters(), *(learned.parameters() if trained else ())], lr=1e-3)

    def carry():
        return hs.Carry(model, init=learned)

    if order == "carry first":
        with carry(), hs.Monitor(model, optimizer, every=1) as monitor:
            carried_and_trained(model, None, optimizer)
    else:
        with hs.Monitor(model, optimizer, every=1) as monitor:
            if order == "carry later":
                carried_and_trained(model, None, optimizer)
            for _ in range(2 if order == "carry in each epoch" else 1):
                carried_and_trained(model, carry, optimizer)
    codes = [episode.finding.code for episode in monitor.findings if episode.ended is None]
    assert codes == ([] if trained else ["HS206"])
    if not trained:
        assert monitor.findings[-1].finding.where == "init of the Carry, Learned"
        assert monitor.findings[-1].began == (4 if order == "carry later" else 0)


def test_a_start_that_is_added_to_the_optimizer_later_is_told_until_then():
    model = nn.GRU(3, 6, batch_first=True)
    learned = hs.Learned(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hs.Monitor(model, optimizer, every=1) as monitor, hs.Carry(model, init=learned):
        carried_and_trained(model, None, optimizer)
        optimizer.add_param_group({"params": list(learned.parameters())})
        carried_and_trained(model, None, optimizer)
    assert [(e.finding.code, e.began, e.ended) for e in monitor.findings] == [("HS206", 0, 4)]


def test_a_frozen_start_is_not_meant_to_be_trained():
    model = nn.GRU(3, 6, batch_first=True)
    learned = hs.Learned(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hs.Monitor(model, optimizer, every=1) as monitor, hs.Carry(model, init=learned):
        carried_and_trained(model, None, optimizer)
    assert monitor.findings == []


def test_layers_that_are_unfrozen_later_are_told_from_then_on():
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.GRU(3, 6, batch_first=True))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with hs.Monitor(model, optimizer, every=1) as monitor:
        carried_and_trained(model, None, optimizer)
        model.requires_grad_(True)
        carried_and_trained(model, None, optimizer)
    assert [(e.finding.code, e.finding.where, e.began) for e in monitor.findings] == [("HS504", "0.weight, 0.bias", 4)]


def stepped(sequences, update, hand_on, *, kind=nn.GRUCell, epochs=2, steps=4):
    """Return the codes that a Monitor has of a loop that steps a cell along several sequences in turns."""
    cell, head = kind(3, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.01)
    with hs.Monitor(cell, optimizer, every=1) as monitor:
        for _ in range(epochs):
            start = torch.zeros(2, 8)
            states, loss = [(start, start) if kind is nn.LSTMCell else start] * sequences, torch.zeros(())
            for step in range(steps):
                for at in range(sequences):
                    after = cell(torch.randn(2, 3), states[at])
                    loss = loss + head(after[0] if kind is nn.LSTMCell else after).square().mean()
                    states[at] = hand_on(states[at], after)
                if update == "each round" or step == steps - 1:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    states, loss = [hs.State.detached(state) for state in states], torch.zeros(())
    return {episode.finding.code for episode in monitor.findings}


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("update", ["each round", "at the end"])
@pytest.mark.parametrize("sequences", [1, 3, 7, 20])
def test_sequences_fed_in_turns_from_one_start_are_told_nothing(sequences, update, kind):
    assert not {"HS101", "HS103"} & stepped(sequences, update, lambda before, after: after, kind=kind)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("update", ["each round", "at the end"])
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_state_that_is_never_handed_on_is_told_at_the_end(sequences, update, kind):
    assert "HS103" in stepped(sequences, update, lambda before, after: before, kind=kind)


def test_a_state_that_is_never_handed_on_is_told_while_it_trains():
    cell, told = nn.GRUCell(3, 8), []
    monitor = hs.Monitor(cell, every=10, on_finding=told.append)
    for _ in range(8):
        sum(cell(torch.randn(2, 3), torch.zeros(2, 8)).sum() for _ in range(10)).backward()
    assert [episode.finding.code for episode in told] == ["HS103"]
    assert "called 80 times with the same state" in monitor.findings[0].finding.evidence
    monitor.close()
