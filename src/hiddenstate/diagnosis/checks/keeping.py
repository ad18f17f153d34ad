"""From call to call: nothing survives that should not, nothing grows, and what the caller gave stays as it was."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...state import ends, spelled
from ..calls import Calls
from ..equal import same
from ..finding import Finding
from ..patient import Patient, copied
from ..probes.repeats import gap, growth, other_seed, traced, twice
from ..probes.shapes import base

_DRAWS = {
    *(
        "randn",
        "rand",
        "randn_like",
        "rand_like",
        "normal",
        "normal_",
        "uniform_",
        "bernoulli",
        "bernoulli_",
        "randint",
    ),
    *("multinomial", "poisson", "exponential_", "rrelu", "gumbel_softmax", "sample", "rsample", "randperm"),
}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "dropout_"}


def nothing_survives(patient: Patient) -> Finding | None:
    """HS201: the same input twice, in eval mode and with the same seed, gives another output."""
    seen = twice(patient)
    if seen.gap == 0:
        return None
    names = ", ".join(seen.changed) or "some attribute"
    if patient.carry is not None:
        severity, cause, advice = (
            "note",
            "an hs.Carry is attached, which carries the state",
            "carry.reset() starts anew",
        )
    elif patient.reset_method:
        severity = "note"
        cause = f"the model keeps its state between calls on purpose: it has {patient.reset_method}()"
        advice = f"call model.{patient.reset_method}() before each new sequence, also before validation"
    else:
        severity = "error"
        cause = f"a state is kept in the model between calls ({names}), and nothing says when a new sequence begins"
        advice = "start each call anew (out, _ = self.lstm(x)), or give the model a method reset_state() and call it"
    size = "another shape" if seen.gap == float("inf") else f"{seen.gap:.2g} of the output's size"
    return Finding(
        "HS201",
        severity,  # type: ignore[arg-type]
        names,
        f"the same input and seed twice in eval mode: the outputs differ by {size} (limit 0).",
        cause,
        advice,
        {"gap": seen.gap, "limit": 0.0},
    )


def same_in_eval(patient: Patient) -> Finding | None:
    """HS202: another seed, another output, in eval mode."""
    first, second = other_seed(patient)
    apart = gap(first, second)
    if apart == 0:
        return None
    layer = _random_start(first.calls, second.calls)
    events = traced(patient).trace.events
    drawn = [event for event in events if event.name in _DRAWS and event.line]
    dropped = [e for e in events if e.name in _DROPOUTS and _active(e.args, e.kwargs)]
    evidence = (
        f"two seeds in eval mode give outputs that differ by {apart:.2g} of their size; "
        f"one seed gives one output (limit 0)."
    )
    numbers = {"gap": apart, "limit": 0.0}
    if layer:
        line = drawn[0].line if drawn else ""
        return Finding(
            "HS202",
            "note" if patient.carry is not None else "error",
            f"{layer} ({line})" if line else layer,
            evidence,
            "the first state is drawn at random at each call",
            "start from zeros: leave the state out, or torch.zeros(layers, x.size(0), units); for noise in training "
            "only: if self.training",
            numbers,
        )
    if dropped:
        return Finding(
            "HS202",
            "error",
            dropped[0].line or "the model",
            evidence,
            "a functional dropout is active in eval mode: it does not know the model's mode",
            "F.dropout(x, p, training=self.training), or an nn.Dropout",
            numbers,
            title="random in eval",
        )
    where = drawn[0].line if drawn else "the model"
    unknown = not patient.layers and any(event.name in ("randn", "rand", "normal_", "uniform_") for event in drawn)
    return Finding(
        "HS202",
        "warning" if unknown else "note",
        where,
        evidence,
        f"`{drawn[0].name}` draws numbers in eval mode" if drawn else "something draws numbers in eval mode",
        "where this is meant (sampling), fix the seed for evaluation; else if self.training",
        numbers,
        title="random in eval",
    )


def _active(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return bool(training) and bool(p)


def _random_start(first: Calls, second: Calls) -> str:
    seen: set[str] = set()
    for a, b in zip(first, second, strict=False):
        if a.layer.name in seen:
            continue
        seen.add(a.layer.name)
        given, other = a.given, b.given
        if given is None or other is None:
            continue
        if a.x.shape == b.x.shape and not same(a.x, b.x):
            return ""  # what it is fed differs already, so the draw came before
        if any(not same(part, other[name]) for name, part in given.items()):
            return a.layer.label
    return ""


def graph_ends(patient: Patient) -> Finding | None:
    """HS203: the graph of one call reaches back into the call before."""
    seen = growth(patient)
    if not seen.shared:
        return None
    where = ", ".join(seen.holders) or "the model"
    return Finding(
        "HS203",
        "error",
        where,
        f"the graph of three calls in a row has {seen.nodes[0]}, {seen.nodes[1]}, {seen.nodes[2]} nodes, and "
        "the second "
        f"holds {seen.shared} of the first (limit 0): a second backward fails, or takes ever longer.",
        "a state is kept from call to call with its graph",
        "keep it without: self.hidden = tuple(part.detach() for part in hidden)",
        {"shared": seen.shared, "first": seen.nodes[0], "second": seen.nodes[1], "third": seen.nodes[2]},
    )


def caller_untouched(patient: Patient) -> Finding | None:
    """HS207: a tensor that the caller handed in has other values afterwards."""
    for train in (False, True):
        copies = replace(patient.inputs, args=copied(patient.inputs.args))
        before = {path: end.clone() for path, end in ends(copies.args) if isinstance(end, Tensor)}
        patient.run(copies, train=train, own=True)
        for path, end in ends(copies.args):
            if isinstance(end, Tensor) and not same(end, before[path]):
                return _touched(patient, f"input{spelled(path)}", float((end != before[path]).float().mean()))
    for call in base(patient).calls.overwritten:
        return _touched(patient, f"{call.layer.name or 'the cell'}, the state it is given", 1.0)
    return None


def _touched(patient: Patient, where: str, share: float) -> Finding:
    return Finding(
        "HS207",
        "error",
        where,
        f"{share:.0%} of its values differ after the call (limit 0%).",
        "it is written into: +=, *=, h[...] = or a method that ends in _ on a tensor that belongs to the caller",
        "make a new one: h = h + delta, or begin with h = h.clone()",
        {"share": share, "limit": 0.0},
    )
