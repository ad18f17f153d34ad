"""HS202: random initial state in eval.

The first state is drawn at random at each call, also in eval mode: two evaluations of one model differ. A functional
dropout that is always on has the same effect and the same code.

**How it is known.** Another seed gives another output, the same seed the same. Then the first states of all layers are
compared between the two seeds. Dropout in eval mode is an error too, also one by hand, unless the code says
`training=True` in so many words. Other draws are a note: those of a sampler, or a latent that weights turn into a first
state, as in a variational autoencoder.

**Limit.** Exactly zero.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h0 = torch.randn(1, x.size(0), 8)
        out, _ = self.lstm(x, (h0, torch.zeros_like(h0)))
        return self.head(out)

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h0 = torch.zeros(1, x.size(0), 8)
        out, _ = self.lstm(x, (h0, torch.zeros_like(h0)))
        return self.head(out)

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from torch import Tensor, nn

from ...state import tensors
from ..outcome import COMPARISONS, LayerCalls, Operation, Operations, Outcome, same
from ..patient import Patient
from ..probes.calls import OtherSeed, TracedCall
from ..rule import Rule, Severity, Symptom
from ..source import says

_DRAWS = {
    *("randn", "rand", "randn_like", "rand_like", "randint", "randperm", "normal", "normal_", "uniform_", "bernoulli"),
    *("bernoulli_", "multinomial", "poisson", "exponential_", "rrelu", "gumbel_softmax", "sample", "rsample"),
}
_UNIFORM = {"rand", "rand_like", "uniform_", "bernoulli_"}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "dropout_"}


def check(patient: Patient) -> Symptom | None:
    """Another seed, another output, in eval mode."""
    seen = patient[OtherSeed]
    apart = seen.gap
    if apart == 0:
        return None
    operations = patient[TracedCall].trace
    layer = _random_start(seen.first.calls, seen.second.calls)
    if layer and _of_a_latent(patient[TracedCall], layer):  # as a variational autoencoder has it
        layer = ""
    drawn = [operation for operation in operations if operation.name in _DRAWS and operation.line]
    dropped = [operation for operation in operations if operation.name in _DROPOUTS and _active(operation)]
    by_hand = _masks(operations)
    evidence = (
        f"two seeds in eval mode give outputs that differ by {apart:.2g} of their size; "
        f"one seed gives one output (limit 0)."
    )
    numbers = {"gap": apart, "limit": 0.0}
    if layer:
        line = drawn[0].line if drawn else ""
        return Symptom(
            "note" if patient.carry is not None else "error",
            f"{layer} ({line})" if line else layer,
            evidence,
            "the first state is drawn at random at each call",
            "start from zeros: leave the state out, or torch.zeros(layers, x.size(0), units); for noise in training "
            "only: if self.training",
            numbers,
        )
    made = [o for o in operations if o.name in _DRAWS and o.inputs and isinstance(o.inputs[0], nn.Parameter)]
    if made:
        return Symptom(
            "error",
            made[0].line or "the model",
            evidence,
            "a module with weights is made in forward: they are drawn anew at each call, and never trained",
            "self.head = nn.Linear(units, classes)  # in __init__; forward only calls it",
            numbers,
            title="random in eval",
        )
    switched_off = _dropped(dropped, by_hand)
    if switched_off is not None:
        severity, line, cause, advice = switched_off
        return Symptom(severity, line, evidence, cause, advice, numbers, title="random in eval")
    where = drawn[0].line if drawn else "the model"
    noise = {operation.name for operation in drawn} & {"randn", "rand", "normal_", "uniform_"}
    return Symptom(
        "warning" if noise and not patient.layers else "note",
        where,
        evidence,
        f"`{drawn[0].name}` draws numbers in eval mode" if drawn else "something draws numbers in eval mode",
        "where this is meant (sampling), fix the seed for evaluation; else if self.training",
        numbers,
        title="random in eval",
    )


def _dropped(dropped: list[Operation], by_hand: list[Operation]) -> tuple[Severity, str, str, str] | None:
    """Return how grave a dropout in eval mode is, where it is, why, and what to write; None where there is none."""
    if dropped:
        meant = all(says(operation.code, operation.instruction, "training") for operation in dropped)
        return (
            "note" if meant else "error",
            dropped[0].line or "the model",
            "a dropout is told training=True, and is active in eval mode too, as Monte Carlo dropout has it"
            if meant
            else "a dropout is active in eval mode: a functional one that is not told it, or a module made in forward",
            "F.dropout(x, p, training=self.training), or self.drop = nn.Dropout(p) in __init__",
        )
    if by_hand:
        return (
            "error",
            by_hand[0].line,
            f"`{by_hand[0].name}` draws a mask in eval mode: a dropout or zoneout by hand that is not told the mode",
            "keep = (torch.rand_like(h) < p).float() if self.training else p  # in evaluation, its mean",
        )
    return None


def _masks(trace: Operations) -> list[Operation]:
    """Return the draws of masks: one number for each unit, compared with a number that nothing has computed."""
    found = []
    for operation in trace:
        value = operation.output
        if operation.name not in _UNIFORM or not operation.line or not isinstance(value, Tensor):
            continue
        if value.dim() < 2 or value.shape[-1] < 2:
            continue  # one coin for a row or a call: a step of exploration, or of teacher forcing
        compared = [other for other in trace if other.name in COMPARISONS and any(t is value for t in other.inputs)]
        fixed = any(not isinstance(t, Tensor) for other in compared for t in other.args)
        if fixed or (operation.name == "bernoulli_" and not any(isinstance(t, Tensor) for t in operation.args[1:])):
            found.append(operation)
    return found


def _active(dropout: Operation) -> bool:
    """Whether a functional dropout drops anything."""
    args, kwargs = dropout.args, dropout.kwargs
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return bool(training) and bool(p)


def _random_start(first: LayerCalls, second: LayerCalls) -> str:
    """Return the first layer that starts from another state with another seed, "" where none does."""
    seen: set[str] = set()
    for a, b in zip(first, second, strict=False):
        if a.layer.name in seen:
            continue
        seen.add(a.layer.name)
        given, other = a.given, b.given
        if given is None or other is None:
            continue
        if any(not same(part, other[name]) for name, part in given.items()):
            return a.layer.label
        if a.x.shape == b.x.shape and not same(a.x, b.x):
            return ""  # what it is fed differs already, so the draw came before
    return ""


def _of_a_latent(run: Outcome, layer: str) -> bool:
    """Whether weights of the model made the first state of a layer, of what was drawn."""
    made = run.trace.makers()
    first = next((call for call in run.calls if call.layer.label == layer), None)
    waiting = [] if first is None else list(tensors(first.given_native).values())
    seen: set[int] = set()
    while waiting:
        operation = made.get(id(waiting.pop()))
        if operation is None or id(operation) in seen:
            continue
        seen.add(id(operation))
        if any(isinstance(tensor, nn.Parameter) for tensor in operation.inputs):
            # Of a name such as randn_like(self.h0) a parameter gives the shape alone.
            if operation.name not in _DRAWS:
                return True
            continue
        waiting.extend(operation.inputs)
    return False


RULE = Rule("HS202", "random initial state in eval", check, probes=(OtherSeed, TracedCall))
