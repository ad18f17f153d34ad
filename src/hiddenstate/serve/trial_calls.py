"""Trial calls of a model before it is served, which show what its layers do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..cells import Call, Layer, Listener, Proceed, attributes, listen, untouched
from ..errors import NotServable
from ..state import tensors

_Versions: TypeAlias = "list[tuple[int, int]]"  # of the tensors in an attribute: which they are, how often written

_TORCHS_OWN = {"_parameters", "_modules", "_buffers"}


@dataclass(frozen=True, slots=True, eq=False)
class TrialCall:
    """A call of a model that may have raised."""

    output: Any
    error: Exception | None
    rows: frozenset[tuple[str, int]]  # of each layer
    steps: int  # that the layer which ran most of them has run, before the call raised where it did
    kept: str  # what is wrong with attributes that hold a layer's state, "" where none was seen


def tried(model: nn.Module, found: Sequence[Layer], x: Tensor) -> TrialCall:
    """Call the model and say what was seen."""
    heard = _TrialListener(model)
    handle = listen(model, found, heard)
    output, raised = None, None
    try:
        output = model(x)
    except Exception as error:  # whatever a user's model raises means that it takes no such input
        raised = error
    finally:
        handle.remove()
    steps = max(heard.steps.values(), default=0)
    return TrialCall(output, raised, frozenset(heard.rows), steps, heard.kept(raised=raised is not None))


class _TrialListener(Listener):
    """Counts the rows and steps of each layer's calls, and notes where the states lie that it is handed."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: set[tuple[str, int]] = set()  # (layer, rows)
        self.steps: Counter[str] = Counter()
        self._model = model
        self._holders: dict[str, tuple[str, _Versions]] = {}  # attribute -> the layer that is handed what it holds

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        self.rows.add((call.layer.label, call.rows))
        given = tensors(call.layer.given(call.args, call.kwargs)).values()
        for name, held in _attributes(self._model) if given else ():
            if any(_same(a, b) for a in given for b in held):
                self._holders.setdefault(name, (call.layer.label, _versions(held)))
        done = proceed(call)
        self.steps[call.layer.label] += call.steps
        return done

    def kept(self, *, raised: bool) -> str:
        """Name the attributes that a layer's state was taken from, and that hold another now, or one that failed."""
        now = dict(_attributes(self._model))
        names = [n for n, (_, before) in self._holders.items() if raised or _versions(now.get(n, [])) != before]
        if not names:
            return ""
        layer = self._holders[names[0]][0]
        return (
            f"{type(self._model).__name__} cannot be served: it keeps the state of {layer!r} itself, in "
            f"{' and '.join(f'self.{name}' for name in names)}, where all callers would share one. An engine keeps one "
            f"for each: let forward hand {layer!r} no state, or None, and give up the attribute."
        )


def _attributes(model: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the attributes and buffers of a model that hold tensors other than parameters, with these."""
    for path, module in model.named_modules():
        own = {name: value for name, value in attributes(module).items() if name not in _TORCHS_OWN}
        for name, value in {**own, **dict(module.named_buffers(recurse=False))}.items():
            held = [part for part in tensors(value).values() if not isinstance(part, nn.Parameter)]
            if held:
                yield f"{path}.{name}" if path else name, held


def _versions(held: list[Tensor]) -> _Versions:
    return [(id(part), -1 if part.is_inference() else part._version) for part in held]


def _same(given: Tensor, held: Tensor) -> bool:
    """Say whether a tensor is the held one, a view of it, or a copy; zeros are like any others."""
    if not held.numel() or held.layout != torch.strided or given.layout != torch.strided:
        return False
    if given.untyped_storage().data_ptr() == held.untyped_storage().data_ptr():
        return True
    return given.shape == held.shape and given.dtype == held.dtype and bool(held.any()) and torch.equal(given, held)


def sequence_in_a_call(model: nn.Module, found: Sequence[Layer], x: Tensor) -> tuple[Tensor, int] | None:
    """Return twice as long an input `(batch, ...)` and its time axis, where layers run several steps in one call.

    None where they run one, or where no axis of the input is the one that they run along. A model is refused that
    takes so many steps and no others.
    """
    whole = _alone(model, found, x)
    if whole.error is not None or whole.steps < 2:
        return None
    for axis in range(1, x.dim()):
        size = x.shape[axis]
        half = _alone(model, found, x.narrow(axis, 0, size // 2)) if size > 1 else whole
        longer = torch.cat([x, x.flip(axis)], axis)
        twice = _alone(model, found, longer)
        if all(call.steps in (0, whole.steps) for call in (half, twice)):
            continue  # features, or what is no sequence to the layers
        if twice.error is None and _in_step(whole.output, twice.output):
            return longer, axis
        raise NotServable(
            f"{type(model).__name__} cannot be served: it needs its whole sequence. It runs along axis {axis} of its "
            f"input, {whole.steps} steps in a call, and {_trouble(twice, size)}, so a session fed in pieces could not "
            f"equal one call. Let its head read every step or the last one, not steps by their number."
        )
    return None


def _alone(model: nn.Module, found: Sequence[Layer], x: Tensor) -> TrialCall:
    with untouched(model), torch.no_grad():
        model.eval()
        return tried(model, found, x)


def _in_step(whole: Any, twice: Any) -> bool:
    """Say whether each output of an input twice as long has the same shape, or is twice as long along one axis."""
    pairs = list(zip(tensors(whole).values(), tensors(twice).values(), strict=False))
    for one, two in pairs:
        ratios = {(a, b) for a, b in zip(one.shape, two.shape, strict=False) if a != b}
        if one.dim() != two.dim() or any(b != 2 * a for a, b in ratios) or len(ratios) > 1:
            return False
    return bool(pairs)


def _trouble(twice: TrialCall, size: int) -> str:
    if twice.error is not None:
        return f"does not take {2 * size} ({type(twice.error).__name__}: {twice.error})".replace("\n", " ")
    return "what it gives for twice as many is neither as long nor twice as long"
