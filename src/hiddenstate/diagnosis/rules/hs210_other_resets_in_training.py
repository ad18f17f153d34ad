"""HS210: state reset at other steps in training.

An agent is stepped through its environment, and then trained on the same steps with its state set back at others: with
the `done` of the next step, of the step before, or with none. It learns from states that it never has.

**How it is known.** `hs.Monitor` follows what each layer of torch's is fed without gradients, one step at a time, and
finds the same steps again in the training calls behind it, where what is fed is not fed twice. A state of zeros has to
enter at the same steps in both; the first step of each training sequence does not count. Once for each look.
`hs.diagnose`, which sees no training, does not tell it. What is not seen: a state that is set back to something else
than zero, observations that occur again and again, and marks that are wrong in rollout and training alike.

**Limit.** Not once.

## Sick

```python
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, obs, state, done):
        outs = []
        for obs_t, done_t in zip(obs, done):
            state = self.cell(obs_t, state * (1 - done_t).unsqueeze(-1))
            outs.append(self.head(state))
        return torch.stack(outs), state

model = Agent()

def step(optimizer):
    state, done, observed, dones = torch.zeros(2, 8), torch.zeros(2), [], []
    for t in range(8):
        obs = torch.randn(2, 3)
        with torch.no_grad():
            _, state = model(obs[None], state, done[None])
        done = torch.tensor([float(t == 2), float(t == 4)])
        observed.append(obs)
        dones.append(done)                            # what this step gave, and not what came with obs
    out, _ = model(torch.stack(observed), torch.zeros(2, 8), torch.stack(dones))
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
```

## Healthy

```python
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, obs, state, done):
        outs = []
        for obs_t, done_t in zip(obs, done):
            state = self.cell(obs_t, state * (1 - done_t).unsqueeze(-1))
            outs.append(self.head(state))
        return torch.stack(outs), state

model = Agent()

def step(optimizer):
    state, done, observed, dones = torch.zeros(2, 8), torch.zeros(2), [], []
    for t in range(8):
        obs = torch.randn(2, 3)
        observed.append(obs)
        dones.append(done)
        with torch.no_grad():
            _, state = model(obs[None], state, done[None])
        done = torch.tensor([float(t == 2), float(t == 4)])
    out, _ = model(torch.stack(observed), torch.zeros(2, 8), torch.stack(dones))
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
```
"""

from __future__ import annotations

from ..patient import Patient
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Nothing: only a training run shows it."""
    return None


RULE = Rule("HS210", "state reset at other steps in training", check, monitored=True)
