"""Running the user's model once: every state and gate, and what each layer was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ..carry import Carry
from ..cells import Layer, Layers, layers, undisturbed, unwrap
from ..errors import BadInput, NotRecurrent
from ..recording import Recording, Trajectory, record


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What one call of a model did."""

    layers: Layers
    recording: Recording
    inputs: dict[str, Tensor]  # layer -> what it was given, (batch, time, feature)

    def runs(self, track: str) -> list[Trajectory]:
        """Return all runs of a track; those of a fused layer that was called step by step are one."""
        found = self.recording.runs(track)
        one_step = len({run.h.shape for run in found}) == 1 and found[0].h.shape[1] == 1
        return [_in_a_row(found)] if len(found) > 1 and one_step else found


def run(model: nn.Module, inputs: tuple[Any, ...]) -> Run:
    """Call `model` once in eval mode and return all that its layers did; the model comes back untouched."""
    found = layers(model)
    if not found:
        raise NotRecurrent(
            f"{type(model).__name__} has no recurrent layer, so there is nothing to report on. A cell of your own is "
            f"found by its initial_state(batch), or by hidden_size and forward(x, state); hs.register teaches others."
        )
    if not inputs:
        raise BadInput(
            f"a report needs what the model is called with: hs.report(model, x, path=...), with x as the layer "
            f"{found[0].name or 'itself'} and those before it want it{_wanted(found[0])}."
        )
    with ExitStack() as stack:
        stack.enter_context(at_peace(model))
        taken = {layer.name: stack.enter_context(_taken(layer)) for layer in found}
        recording = stack.enter_context(record(model, gates=True))
        _call(model, inputs)
    for track in recording:
        recording.runs(track)  # values are worked out while the weights are as they were
    given = {name: x for name, calls in taken.items() if (x := _joined(calls)) is not None}
    return Run(found, recording, given)


@contextmanager
def at_peace(model: nn.Module) -> Iterator[None]:
    """Hold a model in eval mode, without gradients, and put back all that a call may change."""
    inner = unwrap(model)
    carry = Carry.of(inner) if layers(inner) else None
    with ExitStack() as stack:
        stack.enter_context(undisturbed(inner))
        if carry is not None:
            stack.enter_context(carry.fresh())
        stack.enter_context(torch.no_grad())
        inner.eval()
        yield


def _call(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    try:
        model(*inputs)
    except Exception as error:
        raise BadInput(misfit(model, inputs, f"{type(error).__name__}: {error}")) from error


def misfit(model: nn.Module, inputs: tuple[Any, ...], raised: str) -> str:
    """Return why a model cannot be called with these inputs, and the shape that its first recurrent layer takes."""
    shapes = ", ".join(describe(value) for value in inputs)
    first = next(iter(layers(model)), None)
    wanted = _wanted(first) if first is not None else ""
    name = (first.name if first is not None else "") or "the model itself"
    hint = f" Its first recurrent layer, {name}, takes{wanted}." if wanted else ""
    said = " ".join(raised.split()).rstrip(".")
    return f"{type(unwrap(model)).__name__} cannot be called with {shapes}: {said}.{hint}"


def describe(value: Any) -> str:
    """Return a few words for an input."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, PackedSequence):
        return f"a PackedSequence of {int(value.batch_sizes[0])} rows"
    return type(value).__name__


def _wanted(layer: Layer) -> str:
    width = layer.spec.input_size
    if width is None:
        return ""
    if not layer.fused:
        return f" (batch, {width}) at each step"
    return f" (batch, time, {width})" if layer.spec.batch_first else f" (time, batch, {width})"


@contextmanager
def _taken(layer: Layer) -> Iterator[list[Tensor | None]]:
    """Collect what a layer is given, call by call, as (batch, time, feature); None where that cannot be said."""
    calls: list[Tensor | None] = []

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        calls.append(_batch_first(layer, x))

    handle = layer.module.register_forward_pre_hook(take, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def _batch_first(layer: Layer, x: Any) -> Tensor | None:
    if isinstance(x, PackedSequence):
        padded: Tensor = pad_packed_sequence(x, batch_first=True)[0]
        return padded.detach().clone()
    if not isinstance(x, Tensor):
        return None
    kept: Tensor = x.detach().clone()
    if not layer.fused:
        return kept.unsqueeze(0).unsqueeze(0) if kept.dim() < 2 else kept.unsqueeze(1)
    if kept.dim() == 2:
        return kept.unsqueeze(0)
    return kept if layer.spec.batch_first else kept.transpose(0, 1)


def _in_a_row(runs: list[Trajectory]) -> Trajectory:
    first = runs[0]

    def along_time(name: str) -> dict[str, Tensor]:
        return {key: torch.cat([getattr(run, name)[key] for run in runs], dim=1) for key in getattr(first, name)}

    states = along_time("states")
    return Trajectory(
        h=states.pop("h"),
        c=states.pop("c", None),
        gates=along_time("gates"),
        others=states,
        initial=first.initial,
        track=first.track,
        kind=first.kind,
    )


def _joined(calls: list[Tensor | None]) -> Tensor | None:
    """Join the steps of a cell along time; of a fused layer called several times, the first call counts."""
    known = [x for x in calls if x is not None]
    if not known or len(known) < len(calls):
        return None
    if all(x.shape[1] == 1 for x in known) and len({x.shape for x in known}) == 1:
        return torch.cat(known, dim=1)
    return known[0]
