"""HS403: dead or all zero.

Units that never move, whatever the input, or a state that is all zero.

**How it is known.** Every track of the plain call, and of a call with other rows: a unit has to be dead in both.

**Limit.** `dead = 1e-5`: the range of a unit over all rows and steps; `dead_share = 0.5`, and `dead_share_relu = 0.9`
where some units are exactly zero, as a ReLU makes them. From `some_dead = 0.2` on it is a warning in a GRU or LSTM,
whose units never stand still by chance, and a note where a ReLU, or a mask of pruning, holds them.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)
        nn.init.constant_(self.rnn.bias_ih_l0, -50.0)

    def forward(self, x):
        return self.rnn(x)[0]

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from ...recording import Trajectory
from ..advice import drawn_anew
from ..patient import Patient
from ..probes.calls import PlainCall, TracedCall
from ..probes.states import RecordedStates, VariedStates, real
from ..rule import Rule, Severity, Symptom

_STEPS = 32  # of all rows: over fewer some units may well be still


def check(patient: Patient) -> Symptom | None:
    """Units that never move, or a state that is all zero."""
    limits = patient.thresholds
    for name, track in patient[RecordedStates].finite().items():
        values = real(track, track.h)
        if len(values) < 2:
            continue
        if not bool(values.any()):
            # A second look: zeros in, zeros out, where there is no bias.
            again = patient[VariedStates].get(name)
            if again is not None and bool(again.h.any()):
                continue
            return _dead(
                patient, name, f"all {values.numel()} values of the state are exactly 0 (limit: some)", "error", 1.0
            )
        if len(values) < 8:
            continue
        low, high = values.amin(0), values.amax(0)
        if patient.survey is not None and name in patient.survey.statistics:  # all batches, rather than one
            low, high = patient.survey.statistics[name].min, patient.survey.statistics[name].max
        share = float((high - low < limits.dead).float().mean())
        off = float(((low == 0) & (high == 0)).float().mean())
        limit = limits.dead_share_relu if off > 0 and _has_relu(patient) else limits.dead_share
        if share > limit and values.shape[1] > 1 and _still_dead(patient, name, limits.dead, limit):
            return _dead(
                patient,
                name,
                f"{share:.0%} of {values.shape[1]} units vary by less than {limits.dead:g} over all rows and steps"
                f"{patient.looked_at()} (limit {limit:.0%})",
                "warning",
                share,
            )
        count = round(share * values.shape[1])
        enough = count > 1 and len(values) >= _STEPS
        if enough and share > limits.some_dead and _still_dead(patient, name, limits.dead, limits.some_dead):
            return _dead(
                patient,
                name,
                f"{count} of {values.shape[1]} units vary by less than {limits.dead:g} over all rows and steps"
                f"{patient.looked_at()} (limit {limits.some_dead:.0%})",
                "note" if _by_chance(patient, track) else "warning",
                share,
            )
    return None


def _still_dead(patient: Patient, name: str, dead: float, limit: float) -> bool:
    """Whether as many units are dead when all rows and steps of the input differ."""
    again = patient[VariedStates].get(name)
    if again is None:
        return True
    values = real(again, again.h)
    return float(((values.amax(0) - values.amin(0)) < dead).float().mean()) > limit


def _by_chance(patient: Patient, track: Trajectory) -> bool:
    """Whether some units may well stand still: those of a ReLU do, and what is pruned with a mask is so on purpose."""
    masked = any(name.endswith("_mask") for name, _ in patient.model.named_buffers())
    return masked or (track.kind not in ("lstm", "gru", "lstm_cell", "gru_cell") and _has_relu(patient))


def _has_relu(patient: Patient) -> bool:
    """Whether a ReLU makes zeros on purpose."""
    layers = any(getattr(layer.module, "nonlinearity", "") == "relu" for layer in patient.layers)
    return layers or bool(patient[TracedCall].trace.named("relu", "relu_", "leaky_relu", "threshold", "clamp", "relu6"))


def _dead(patient: Patient, where: str, seen: str, severity: Severity, share: float) -> Symptom:
    cause, advice = _cause(patient, where)
    return Symptom(severity, where, f"{seen}.", cause, advice, {"share": share})


def _cause(patient: Patient, track: str) -> tuple[str, str]:
    """Return what holds the units still, as far as gates, weights and inputs tell, and what lets them go."""
    trajectory = patient[RecordedStates].get(track)
    layer = next((each for each in patient.layers if not each.name or track.startswith(each.name)), None)
    again = drawn_anew(layer or next(iter(patient.seen), None))
    gates = {} if trajectory is None else trajectory.gates
    if "output" in gates and float(gates["output"].max()) < 1e-3:
        return (
            "the output gate is shut: its largest value is below 0.001",
            f"{again}  # its bias, above all",
        )
    if "update" in gates and float(gates["update"].min()) > 0.999:
        return (
            "the update gate keeps the old state and lets nothing new in: its smallest value is above 0.999",
            f"{again}  # its bias, above all",
        )
    if "input" in gates and float(gates["input"].max()) < 1e-3:
        return (
            "the input gate is shut: its largest value is below 0.001",
            f"{again}  # its bias, above all",
        )
    calls = [] if layer is None else patient[PlainCall].calls.of(layer)
    if calls and not bool(calls[0].x.any()):
        return "all that enters the layer is zero", "follow x to the layer: with hs.record(model) as rec: model(x)"
    weights = [] if layer is None else list(layer.module.parameters())
    if weights and not any(bool(p.any()) for p in weights):
        return "all weights of the layer are zero", again
    if _has_relu(patient):
        return (
            "a ReLU is below zero for good, for any input: biases or weights have been pushed there",
            f"{again}  # and a smaller learning rate",
        )
    return (
        "rows of the weights are zero, by pruning or initialization, or so small that nothing moves these units",
        f"{again}  # or prune.remove, and fewer units",
    )


RULE = Rule(
    "HS403",
    "dead or all zero",
    check,
    probes=(PlainCall, RecordedStates, TracedCall, VariedStates),
    explains=("HS103", "HS104", "HS302", "HS303", "HS501", "HS503"),
)
