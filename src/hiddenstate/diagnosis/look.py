"""A look at one training call: what each layer did, how gradients came back, and the numbers made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import Call, EndState, Layer, may_be_recomputed
from ..state import tensors
from .graphs import count_nodes
from .outcome import with_gradient
from .passing_on import PassingOn
from .samples import LayerSample, SampleNumbers

_SAME_CALL = 1e-2  # distance of arguments up to which a call may be the same one, run again


@dataclass(frozen=True, slots=True, eq=False)
class LayerOutput:
    """What one call of a layer gave."""

    h: Tensor  # (batch, time, unit)
    valid: Tensor | None  # (batch, time), None where all steps are real
    fed: Tensor | None = None  # whether all that entered it was finite, a bool without axes


@dataclass(frozen=True, slots=True, eq=False)
class _ExpectedGradient:
    """Where the gradient of one call belongs, and by what the call is known when it runs again."""

    sizes: list[Tensor]
    index: int
    arguments: list[Tensor]

    def distance(self, call: Call) -> float:
        """Return how far the arguments are from those of this call, relative to their size; inf for other shapes."""
        again = _arguments(call)
        if [new.shape for new in again] != [old.shape for old in self.arguments]:
            return float("inf")
        pairs = [(new, old) for new, old in zip(again, self.arguments, strict=True) if old.numel()]
        gaps = [float((new - old).abs().max() / (1 + old.abs().max())) for new, old in pairs]
        return max(gaps, default=0.0) if all(gap == gap for gap in gaps) else float("inf")


class Look:
    """Gathers tensors during a call and its backward; numbers are made of them once, afterwards."""

    def __init__(self, step: int, *, sampled: bool = False) -> None:
        """Begin at this training call; `sampled`: a few rows are kept to be run again."""
        self.step, self.sampled = step, sampled
        self.samples: dict[str, LayerSample] = {}  # layer -> rows to be run again
        self.measured: dict[str, SampleNumbers] = {}  # layer -> what they showed
        self.outputs: dict[str, list[LayerOutput]] = {}  # layer -> of each call
        self.layers: dict[str, Layer] = {}
        self.spans: dict[str, list[int]] = {}  # layer -> steps from one cut of its graph to the next
        self._ended: dict[str, EndState] = {}  # layer -> what its last call ended in
        self.relu: set[str] = set()
        self.bounded: set[str] = set()
        self.back: dict[str, list[Tensor]] = {}  # layer -> size of the gradient at each step, (time,) for each call
        self.gradient = float("nan")  # of all parameters
        self.without: list[str] = []  # parameters without gradient
        self.model: nn.Module | None = None  # whose parameters they are
        self.nodes = 0
        self.passing = PassingOn()
        self._waiting: list[_ExpectedGradient] = []  # of calls without a graph, which a backward pass may run again

    def enter(self, call: Call) -> Call:
        """See that gradients to the layer's input are noticed; return the call, with another input where need be."""
        sizes = self.back.setdefault(call.layer.name or "model", [])
        with suppress(Exception):  # a cell that is called in a way of its own
            self.passing.enter(call)
        self._see_cut(call)
        place = _ExpectedGradient(sizes, len(sizes), [] if torch.is_grad_enabled() else _arguments(call))
        sizes.append(torch.empty(0))
        if torch.is_grad_enabled():
            return _noticed(call, place)
        self._waiting.append(place)
        return call

    def _see_cut(self, call: Call) -> None:
        """Count the steps since a state was last handed on without its graph, within this call of the model."""
        name = call.layer.name or "model"
        spans, last = self.spans.setdefault(name, [0]), self._ended.get(name)
        try:
            given, steps = tensors(call.given_native).values(), call.steps
        except Exception:  # a cell that is called in a way of its own
            return
        bare = bool(given) and torch.is_grad_enabled() and all(part.grad_fn is None for part in given)
        if bare and last is not None and last.mark is not None and last.handed_on(call.given_native):
            spans.append(0)
        spans[-1] += steps

    def again(self, call: Call) -> Call:
        """Do the same for a call that runs once more within a backward pass, where it had no graph at first."""
        sizes = self.back.get(call.layer.name or "model")
        # With gradients torch may take other kernels, so that the last bits differ; a backward pass begins at the end.
        places = [(place.distance(call), -place.index, place) for place in self._waiting if place.sizes is sizes]
        distance, _, place = min(places, default=(float("inf"), 0, None))
        if place is None or distance > _SAME_CALL:
            return call
        self._waiting.remove(place)
        return _noticed(call, place)

    def leave(self, call: Call) -> None:
        """Keep what a layer gave."""
        try:
            output, lengths = call.output.detach(), call.lengths
            self._ended[call.layer.name or "model"] = EndState.of(call.state_native)
            self.passing.leave(call)
            fed = torch.isfinite(call.x.detach()).all() if call.x.is_floating_point() else None
        except Exception:  # a cell that returns something of its own: nothing to look at
            return
        name, module = call.layer.name or "model", call.layer.module
        valid = None if lengths is None else torch.arange(output.shape[1]) < lengths.unsqueeze(1)
        self.layers[name] = call.layer
        self.outputs.setdefault(name, []).append(LayerOutput(output, valid, fed))
        if isinstance(module, nn.RNN | nn.RNNCell) and module.nonlinearity == "relu":
            self.relu.add(name)
        elif isinstance(module, nn.RNNBase | nn.RNNCellBase) and not getattr(module, "proj_size", 0):
            self.bounded.add(name)
        if self.sampled and LayerSample.fits(call.layer):
            self.samples.setdefault(name, LayerSample(call.layer)).add(call)

    def loop(self, name: str, layer: Layer, values: Mapping[str, list[Tensor]]) -> bool:
        """Keep the states of a loop that was seen in the call; False where their rows are not known."""
        parts = layer.seen.parts if layer.seen is not None else ()
        told = [p for p in parts if p.dtype.is_floating_point and p.batch_axis is not None and values.get(p.name)]
        if not told:
            return False
        axis, states = told[0].batch_axis or 0, values[told[0].name]
        steps = [state.detach().movedim(axis, 0).flatten(1) for state in states if state.dim()]
        if len({step.shape for step in steps}) != 1:
            return False
        h = torch.stack(steps, dim=1)  # (batch, time, unit)
        self.layers[name] = layer
        self.outputs[name] = [LayerOutput(h, None)]
        sizes = self.back[name] = [torch.empty(0)] * len(states)
        for step, state in enumerate(states):
            if state.requires_grad and not may_be_recomputed(grad_before=False):
                state.register_hook(partial(_arrived, sizes, step))  # type: ignore[no-untyped-call]
        return True

    def end(self, result: Any) -> None:
        """Count the graph behind what the model, or a module of it, returned."""
        self.nodes = max(self.nodes, count_nodes(result))

    def update(self, model: nn.Module) -> None:
        """Measure the parameters' gradients, right before they are used."""
        self.model = model
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        grads = [p.grad.detach() for _, p in named if p.grad is not None and not p.grad.is_sparse]
        if grads:
            self.gradient = float(torch.stack([g.norm() for g in grads]).norm())
        self.without = [name for name, p in named if p.grad is None]


def _arrived(sizes: list[Tensor], step: int, gradient: Tensor) -> None:
    sizes[step] = gradient.detach().norm().reshape(1)


def _arguments(call: Call) -> list[Tensor]:
    found = [tensor.detach() for tensor in tensors((call.args, call.kwargs)).values()]
    return [tensor if tensor.is_complex() else tensor.float() for tensor in found]


def _noticed(call: Call, place: _ExpectedGradient) -> Call:
    try:
        call = with_gradient(call)
        x = call.input
    except Exception:  # a cell that is called in a way of its own: nothing to look at
        return call
    data = x.data if isinstance(x, PackedSequence) else x
    # The hook must not hold the call: its tensors, and their graphs, would then live until Python looks for cycles.
    layer, packing = call.layer, x._replace(data=data.new_empty(0)) if isinstance(x, PackedSequence) else None

    def arrived(gradient: Tensor) -> None:
        back = Call(layer, (gradient if packing is None else packing._replace(data=gradient),)).x
        place.sizes[place.index] = back.detach().transpose(0, 1).flatten(1).norm(dim=1)

    if data.requires_grad:
        data.register_hook(arrived)  # type: ignore[no-untyped-call]
    return call


def no_call_seen(updates: int) -> str:
    """Say that there was no training call at all, in spite of so many updates, and why that may be."""
    return (
        f"{f'{updates} updates and ' if updates else ''}not a single training call: nothing was looked at. The model "
        f"that is trained is another one, a copy of it, or in eval mode."
    )


def nothing_seen(names: Sequence[str]) -> str:
    """Say that no look has seen anything of these layers, and why that may be."""
    return (
        f"nothing of {', '.join(names)}: not called in the calls that were looked at, or run past the layer itself (by "
        f"its weights, or `nn.LSTM.forward(layer, x)`), or returning something else than layers of its kind."
    )
