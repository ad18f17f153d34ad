"""What only a training run shows."""

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


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("update", "told"),
    [(clipped_after, True), (clipped_before, False), (accumulated_on, False), (zeroed_in_place, False)],
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
