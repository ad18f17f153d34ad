"""What training is given of a rollout: the marks of where a sequence begins, at the same steps or at others."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.diagnosis import reset_watch


class Agent(nn.Module):
    """Observations, a layer that is set back by marks, and a head; called by its methods."""

    def __init__(self, kind=nn.LSTMCell):
        super().__init__()
        self.encoder, self.cell, self.head = nn.Linear(4, 6), kind(6, 8), nn.Linear(8, 1)

    def run(self, observations, state, dones):
        outs = []
        for x, done in zip(observations, dones, strict=True):
            keep = (1 - done).unsqueeze(-1)
            state = tuple(part * keep for part in state) if isinstance(state, tuple) else state * keep
            state = self.cell(torch.tanh(self.encoder(x)), state)
            outs.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outs), state


def trained_on_its_rollouts(marks, *, kind=nn.LSTMCell, rounds=4, evaluated=False, observe=None):
    """Roll an agent out and train it on that, with the marks that `marks(round, dones)` makes of those it had."""
    torch.manual_seed(0)
    model, rows, steps = Agent(kind), 3, 8
    zeros = torch.zeros(rows, 8)
    state, done = ((zeros, zeros) if kind is nn.LSTMCell else zeros), torch.zeros(rows)
    with hs.Monitor(model, every=1) as monitor:
        for turn in range(rounds):
            start, seen, dones = state, [], []
            model.train(not evaluated)
            for t in range(steps):
                x = torch.randn(rows, 4) if observe is None else observe(rows)
                seen.append(x)
                dones.append(done)
                with torch.no_grad():
                    _, state = model.run(x[None], state, done[None])
                done = (torch.arange(rows) == (t + turn) % 4).float()
            model.train()
            for _ in range(2):
                model.run(torch.stack(seen), start, marks(turn, torch.stack(dones)))[0].square().mean().backward()
    return monitor.findings


WRONG_MARKS = {
    "of the next step": (lambda _, d: torch.cat([d[1:], d[:1]]), "one step too early"),
    "of the step before": (lambda _, d: torch.cat([d[:1], d[:-1]]), "one step too late"),
    "never": (lambda _, d: torch.zeros_like(d), "are used in the rollout, and not in training"),
    "the other way round": (lambda _, d: 1 - d, "different marks"),
}


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("name", WRONG_MARKS)
def test_a_state_that_training_sets_back_at_other_steps_is_told(name, kind):
    marks, cause = WRONG_MARKS[name]
    (episode,) = trained_on_its_rollouts(marks, kind=kind)
    assert (episode.finding.code, episode.finding.where) == ("HS210", "cell")
    assert cause in episode.finding.cause


@pytest.mark.parametrize("evaluated", [False, True])
def test_the_marks_of_the_rollout_are_right_in_either_mode(evaluated):
    assert trained_on_its_rollouts(lambda _, dones: dones, evaluated=evaluated) == []


def test_observations_that_come_again_and_again_tell_nothing():
    def observe(rows):
        return torch.eye(4)[torch.randint(4, (rows,))]

    assert trained_on_its_rollouts(lambda _, dones: torch.zeros_like(dones), observe=observe) == []


def test_marks_that_are_mended_end_what_was_told(monkeypatch):
    monkeypatch.setattr(reset_watch, "_SHARE", float("inf"))
    (episode,) = trained_on_its_rollouts(lambda turn, dones: dones if turn else torch.zeros_like(dones))
    assert episode.finding.code == "HS210"
    assert episode.ended is not None
