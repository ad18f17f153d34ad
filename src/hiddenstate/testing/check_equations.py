"""Checks that a cell computes what nn.RNN, nn.GRU or nn.LSTM compute, however it is written.

Nothing has to be known about the cell's weights. One step is watched on random rows. Each value in it that is a sigmoid
or a tanh of an affine function of input and state is a gate. The equations are then tried with these gates in all
roles.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..cells import Layer, as_layer, invented_inputs, unheard, untouched
from ..errors import BadInput, LawBroken, NotRecurrent, StateMismatch
from ..state import State

Kind: TypeAlias = Literal["rnn", "rnn_relu", "gru", "lstm"]
Formula: TypeAlias = Callable[..., Tensor]

_KINDS = {"rnn": 1, "rnn_relu": 1, "gru": 1, "lstm": 2}  # the number of parts of the state
_SCALES = (1.0, 0.25, 0.05)  # of the random rows: saturated gates show nothing, so smaller rows are tried
_RELU_SCALES = (1.0, 4.0, 16.0)  # a relu that is never off cannot be recognized, so larger rows are tried
_SINGLE = 3e-5  # the tolerance in single precision, in which small rows hide every nonlinearity and show nothing
_BLOCKS = 24  # gates to try in every role


@dataclass(frozen=True, slots=True, eq=False)
class WatchedStep:
    """One step of a cell on random rows, with every value that it computed on the way."""

    x: Tensor  # (row, feature)
    before: list[Tensor]  # the parts of the state, (row, unit) each: h, and for an LSTM c
    after: list[Tensor]
    values: list[Tensor]  # (row, unit), in the order of computation
    tolerance: float
    sigmoids: list[Tensor] = field(init=False)  # gates whose logit is affine in x and h
    affine: Tensor = field(init=False)  # (row, feature + unit + 1)

    def __post_init__(self) -> None:
        """Find the gates."""
        one = self.x.new_ones(len(self.x), 1)
        object.__setattr__(self, "affine", torch.cat([self.x, self.before[0], one], dim=1))
        inside = [v for v in self.values if bool(((v > 0) & (v < 1)).all()) and self.explains(self.affine, v.logit())]
        # A gate g and 1 - g count as one gate: the one that was computed first.
        found: list[Tensor] = []
        for value in inside:
            if not any(self.same(value, old) or self.same(1 - value, old) for old in found):
                found.append(value)
        object.__setattr__(self, "sigmoids", found[:_BLOCKS])

    @property
    def saturated(self) -> bool:
        """Whether some value is at the very end of its range, so that its logit cannot be recovered."""
        bounded = [value.abs().max() for value in self.values if float(value.abs().max()) <= 1]
        return any(float(largest) > 1 - 1e-6 for largest in bounded)

    def tanhs(self, features: Tensor) -> Iterator[Tensor]:
        """Yield values that are the tanh of a linear function of `features`, (row, n) or, by unit, (unit, row, n)."""
        for value in self.values:
            if bool((value.abs() < 1).all()) and self.explains(features, value.atanh()):
                yield value

    def explains(self, features: Tensor, wanted: Tensor) -> bool:
        """Say whether `wanted (row, unit)` is a linear function of `features`."""
        goal = wanted.T.unsqueeze(2) if features.dim() == 3 else wanted
        weights = torch.linalg.lstsq(features, goal).solution
        return bool((features @ weights - goal).abs().max() <= 30 * self.tolerance * (1 + goal.abs().max()))

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Say whether two values are equal up to rounding."""
        return self.gap(one, other) <= self.tolerance

    def gap(self, one: Tensor, other: Tensor) -> float:
        """Return the largest difference."""
        return float((one - other).abs().max())


def check_equations(cell: nn.Module, kind: Kind, x: Tensor | None = None) -> None:
    """Raise `LawBroken`, an `AssertionError`, if a step of `cell` is not that of torch's RNN, GRU or LSTM.

    How the cell keeps its weights, and the order of its gates, do not matter. The message names the equation that does
    not hold and, if it is a known one, the equation that holds instead.

    >>> check_equations(nn.GRUCell(3, 4), "gru")
    >>> class NoTanh(nn.Module):
    ...     hidden_size, input_size = 4, 3
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gates = nn.Linear(7, 16)
    ...     def forward(self, x, state):
    ...         h, c = state
    ...         i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
    ...         c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    ...         return o.sigmoid() * c, (o.sigmoid() * c, c)
    >>> check_equations(NoTanh(), "lstm")
    Traceback (most recent call last):
    hiddenstate.errors.LawBroken: NoTanh breaks a law of lstm: h' = o⊙tanh(c'). Here h' = o⊙c' instead.

    Args:
        cell: A module of one step, `(x, state) -> (output, state)` or `-> state`. It comes back unchanged.
        kind: `rnn` (tanh), `rnn_relu`, `gru` or `lstm`.
        x: Inputs for it, `(batch, feature)` or `(batch, time, feature)`. None: made up from its sizes.
    """
    if kind not in _KINDS:
        raise BadInput(f"kind is one of {', '.join(_KINDS)}, but is {kind!r}.")
    name = type(cell).__name__
    broken = []
    for scale in _RELU_SCALES if kind == "rnn_relu" else _SCALES:
        step = _watched(cell, kind, x, scale)
        if scale < 1 and step.tolerance == _SINGLE:
            break
        seen = _LAWS[kind](step)
        if seen is None:
            return
        broken.append(seen)
        if not step.saturated and kind != "rnn_relu":
            break  # a deviation was seen; smaller rows could only hide it
    said = next((seen for seen in broken if "Here" in seen), broken[0])
    raise LawBroken(f"{name} breaks a law of {kind}: {said}")


def _rnn(step: WatchedStep) -> str | None:
    (after,) = step.after
    if bool((after.abs() < 1).all()) and step.explains(step.affine, after.atanh()):
        return None
    return _other_rnn(step, "h' = tanh(W x + U h + b).")


def _rnn_relu(step: WatchedStep) -> str | None:
    return None if _is_relu(step) else _other_rnn(step, "h' = relu(W x + U h + b).")


def _other_rnn(step: WatchedStep, law: str) -> str:
    (after,) = step.after
    if bool(((after > 0) & (after < 1)).all()) and step.explains(step.affine, after.logit()):
        return f"{law} Here the activation is a sigmoid."
    if _is_relu(step):
        return f"{law} Here the activation is a relu."
    if step.explains(step.affine, after):
        return f"{law} Here there is no activation at all."
    if bool((after.abs() < 1).all()) and step.explains(step.affine, after.atanh()):
        return f"{law} Here the activation is a tanh."
    return f"{law} What is inside the activation is not linear in x and h, or the activation is another."


def _is_relu(step: WatchedStep) -> bool:
    """Say whether each unit is linear where it is positive, and that linear function is negative elsewhere."""
    (after,) = step.after
    if bool((after < 0).any()) or not bool(((after == 0).any(0) & (after > 0).any(0)).any()):
        return False  # unless some unit is on in one row and off in another, nothing shows a relu
    for unit in after.T:
        on = unit > 0
        if int(on.sum()) <= step.affine.shape[1]:
            continue  # too few rows to decide
        weights = torch.linalg.lstsq(step.affine[on], unit[on].unsqueeze(1)).solution
        line = (step.affine @ weights).squeeze(1)
        if step.gap(line[on], unit[on]) > 30 * step.tolerance * (1 + float(unit.max())):
            return False
        if bool((line[~on] > 30 * step.tolerance).any()):
            return False
    return True


def _lstm(step: WatchedStep) -> str | None:
    (_, c), (h_next, c_next) = step.before, step.after
    gates, candidates = step.sigmoids, _distinct(step, step.tanhs(step.affine))
    if not gates:
        return _no_gates("c' = f⊙c + i⊙g")
    laws: dict[str, Formula] = {
        "f⊙c + i⊙g": lambda f, i, g: f * c + i * g,
        "f⊙c + (1 - f)⊙g": lambda f, i, g: f * c + (1 - f) * g,
        "c + i⊙g": lambda f, i, g: c + i * g,
        "f⊙c + g": lambda f, i, g: f * c + g,
    }
    roles = [(f, i, g) for f in gates for i in gates for g in candidates if f is not i]
    roles = roles or [(f, f, g) for f in gates for g in candidates]
    said = _which(step, c_next, "c'", laws, roles)
    if said is not None and "instead" not in said:
        by_sigmoid = [(f, i, g) for f, i, g in itertools.permutations(gates, 3)]
        if by_sigmoid and _fitting(step, c_next, lambda f, i, g: f * c + i * g, by_sigmoid):
            return "c' = f⊙c + i⊙g, with g a tanh. Here g is a sigmoid instead."
    if said is not None:
        return said
    outputs: dict[str, Formula] = {
        "o⊙tanh(c')": lambda o: o * c_next.tanh(),
        "o⊙c'": lambda o: o * c_next,
        "tanh(c')": lambda o: c_next.tanh(),
        "o⊙tanh(c)": lambda o: o * c.tanh(),
    }
    return _which(step, h_next, "h'", outputs, [(o,) for o in gates])


def _gru(step: WatchedStep) -> str | None:
    (h,), (after,) = step.before, step.after
    gates = step.sigmoids
    if not gates:
        return _no_gates("h' = (1 - z)⊙n + z⊙h")
    one = torch.ones_like(step.x[:, :1])
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "n = tanh(W x + b + r⊙(U h + b'))": lambda r: _by_unit(step.x, one, r, h),
        "n = tanh(W x + U (r⊙h) + b)": lambda r: torch.cat([step.x, r * h, one], dim=1),
        "n = tanh(W x + U h + b)": lambda r: step.affine,
    }
    found = {
        name: _distinct(step, (n for r in gates for n in step.tanhs(features(r)))) for name, features in kinds.items()
    }
    laws: dict[str, Formula] = {
        "(1 - z)⊙n + z⊙h": lambda z, n: (1 - z) * n + z * h,
        "z⊙n + (1 - z)⊙h": lambda z, n: z * n + (1 - z) * h,
    }
    first = next(iter(kinds))
    for name, candidates in found.items():
        roles = [(z, n) for z in gates for n in candidates]
        for law, formula in laws.items():
            if not _fitting(step, after, formula, roles):
                continue
            if name != first:
                return f"{first}. Here {name} instead{_WHOSE.get(name, '')}."
            swapped = "" if law == next(iter(laws)) else _which(step, after, "h'", laws, roles)
            return swapped or None
    nearest = _which(step, after, "h'", laws, [(z, n) for z in gates for n in itertools.chain(*found.values())])
    return nearest or f"{first}. No such candidate was seen in the step."


_WHOSE = {
    "n = tanh(W x + U (r⊙h) + b)": ", as in Cho et al. (2014): weights of nn.GRU mean something else in it",
    "n = tanh(W x + U h + b)": ": the reset gate resets nothing",
}


def _by_unit(x: Tensor, one: Tensor, r: Tensor, h: Tensor) -> Tensor:
    """Return the features that each unit's candidate is linear in: x, 1, and h and 1 scaled by its reset gate."""
    scaled = r.T.unsqueeze(2) * torch.cat([h, one], dim=1)  # (unit, row, unit + 1)
    fixed = torch.cat([x, one], dim=1).expand(r.shape[1], -1, -1)
    return torch.cat([fixed, scaled], dim=2)


def _which(
    step: WatchedStep, wanted: Tensor, name: str, laws: Mapping[str, Formula], roles: Sequence[tuple[Tensor, ...]]
) -> str | None:
    """Return None if the first law holds for some roles; else which other law does, or how far the first is off."""
    (law, formula), *others = laws.items()
    if _fitting(step, wanted, formula, roles):
        return None
    for other, variant in others:
        if _fitting(step, wanted, variant, roles):
            return f"{name} = {law}. Here {name} = {other} instead."
    gaps = [step.gap(wanted, formula(*role)) for role in roles]
    if not gaps:
        return f"{name} = {law}. Of the gates in it, not all were seen in the step."
    return f"{name} = {law}. With the gates that were seen, {name} is off by {min(gaps):.2g} at best."


def _fitting(step: WatchedStep, wanted: Tensor, formula: Formula, roles: Sequence[tuple[Tensor, ...]]) -> bool:
    return any(step.gap(wanted, formula(*role)) <= step.tolerance * (1 + float(wanted.abs().max())) for role in roles)


def _no_gates(law: str) -> str:
    return f"{law}. No value in the step is a sigmoid of something linear in x and h."


def _distinct(step: WatchedStep, values: Iterator[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if not any(step.same(value, old) for old in found):
            found.append(value)
    return found[:_BLOCKS]


_LAWS: dict[str, Callable[[WatchedStep], str | None]] = {"rnn": _rnn, "rnn_relu": _rnn_relu, "gru": _gru, "lstm": _lstm}


# --- watching one step ---


def _watched(cell: nn.Module, kind: str, x: Tensor | None, scale: float) -> WatchedStep:
    with suppress(NotRecurrent, StateMismatch):  # reported below
        as_layer(cell)  # learns the size of the state, which helps to make up inputs
    sample = x if x is not None else next(filter(partial(_taken, cell), invented_inputs(cell, 3, 2)), None)
    if sample is None:
        as_layer(cell).initial(1)  # raises with an explanation if the size of the state is unknown
        raise BadInput(
            f"no input could be made up for {type(cell).__name__}: give one, check_equations(cell, kind, x)."
        )
    sample = sample[:, 0] if sample.dim() == 3 else sample
    failed: Exception | None = None
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, _SINGLE)):
        with untouched(cell), unheard(), torch.no_grad():
            own = copy.deepcopy(cell).eval()
            with suppress(Exception):
                own = own.to(dtype)
            try:
                return _one_step(own, kind, sample.to(dtype), (scale, tolerance))
            except (NotRecurrent, BadInput):
                raise
            except Exception as error:  # a cell that makes tensors of a fixed dtype only works in that dtype
                failed = failed or error
    raise LawBroken(
        f"{type(cell).__name__} breaks a law: it takes a step. {type(failed).__name__}: {failed}"
    ) from failed


def _taken(cell: nn.Module, sample: Tensor) -> bool:
    """Say whether the cell accepts a step of this input: sizes read from its weights are guesses."""
    try:
        with untouched(cell), unheard(), torch.no_grad():
            layer = as_layer(cell, sample[:, 0])
            _called(layer, sample[:, 0], layer.initial(len(sample)))
    except Exception:  # a trial call
        return False
    return True


def _one_step(cell: nn.Module, kind: str, sample: Tensor, numbers: tuple[float, float]) -> WatchedStep:
    layer = as_layer(cell, sample)
    start = layer.initial(2)
    sizes = [start[name].numel() // 2 for name in start]
    if len(sizes) != _KINDS[kind] or len(set(sizes)) > 1:
        seen = ", ".join(f"{name} of {size}" for name, size in zip(start, sizes, strict=True))
        wanted = "h and c of one size" if _KINDS[kind] == 2 else "h alone"
        raise BadInput(f"the state of an {kind} is {wanted}, but this cell has {seen}.")
    generator = torch.Generator().manual_seed(0)
    rows = 4 * (sample.shape[-1] + sizes[0] + 2) + 32
    x = torch.randn(rows, *sample.shape[1:], generator=generator, dtype=torch.float64).to(sample) * numbers[0]
    named = {}
    for name, part in layer.initial(rows).items():
        drawn = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        named[name] = drawn.to(x) * numbers[0]
    state = State(named, start.batch_axis)
    with _WatchedValues(rows, sizes[0]) as values:
        native = _called(layer, x, state)
    after = layer.to_state(native, batch=rows)
    if x.dtype == torch.float64 and all(torch.equal(part, part.float()) for part in after.values()):
        raise TypeError("it rounds to single precision inside")
    parts = [[s[name].movedim(start.batch_axis[name], 0).flatten(1).double() for name in start] for s in (state, after)]
    return WatchedStep(x.flatten(1).double(), parts[0], parts[1], values.seen + parts[1], numbers[1])


def _called(layer: Layer, x: Tensor, state: State) -> Any:
    if layer.fused:
        x = x.unsqueeze(1 if layer.spec.batch_first else 0)
    return layer.call(x, layer.to_native(state))[1]


def _inside(func: Any, args: Any) -> Iterator[Tensor]:
    """Yield the gates that one of torch's own cells computes inside its kernel."""
    name = getattr(func, "__name__", "")
    if name not in ("gru_cell", "lstm_cell"):
        return
    x, state, w_ih, w_hh, b_ih, b_hh = (*args, None, None)[:6]
    h = state[0] if isinstance(state, tuple | list) else state
    driven, recurring = nn.functional.linear(x, w_ih, b_ih), nn.functional.linear(h, w_hh, b_hh)
    if name == "lstm_cell":
        i, f, g, o = (driven + recurring).chunk(4, 1)
        yield from (i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid())
        return
    (r_x, z_x, n_x), (r_h, z_h, n_h) = driven.chunk(3, 1), recurring.chunk(3, 1)
    r = (r_x + r_h).sigmoid()
    yield from (r, (z_x + z_h).sigmoid(), (n_x + r * n_h).tanh())


class _WatchedValues(TorchFunctionMode):
    """Keeps every value with these rows that a step computes, in pieces of as many units as the state has."""

    def __init__(self, rows: int, units: int) -> None:
        super().__init__()
        self.rows, self.units = rows, units
        self.seen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in (*_inside(func, args), *(result if isinstance(result, tuple | list) else (result,))):
            self._keep(value)
        return result

    def _keep(self, value: Any) -> None:
        if not isinstance(value, Tensor) or not value.is_floating_point() or self.rows not in value.shape:
            return
        flat = value.detach().clone().movedim(list(value.shape).index(self.rows), 0).flatten(1)
        if flat.shape[1] % self.units == 0 and 0 < flat.shape[1] <= 8 * self.units:
            self.seen += [piece.double() for piece in torch.split(flat, self.units, dim=1)]
