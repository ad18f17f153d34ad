"""A fused call, run one layer at a time with torch's own kernels, so that every layer's states are seen.

The results are bit for bit those of the whole call on the CPU: the same operations in the same order, on the same
shapes, with the same draws from the random stream. Where a faster way to the gates is taken than reconstruction,
`exact` has seen it agree first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import cudnn, onednn, stepping
from .exact import judge, same_bits, trusted
from .gradients import Direct
from .kernel_call import KernelCall, Weights

Parts = tuple[Tensor, ...]
Layered = tuple[Tensor, list[Parts], list[tuple[Tensor | None, Tensor | None]] | None]


@dataclass(frozen=True, slots=True)
class Need:
    """What must be known of a call; the more, the dearer."""

    gates: bool = False
    grads: bool = False


@dataclass(slots=True)
class Pass:
    """One layer and direction of one call: what its run left behind, cut from the graph."""

    kind: str
    reverse: bool
    x: Tensor  # (time, batch, feature), or packed (rows, feature)
    h: Tensor  # (time, batch, unit), or packed
    initial: Parts  # each (batch, unit)
    weights: Weights  # still the model's own
    gates: Tensor | None = None  # (time, batch, gates * hidden) after their activations, or packed
    cells: Tensor | None = None  # (time, batch, hidden), or packed
    direct: Direct | None = None


def run(call: KernelCall, need: Need) -> tuple[tuple[Tensor, ...], list[Pass]]:
    """Return what the fused function returns, and one Pass for each layer and direction, in the order of its state."""
    x = call.data.transpose(0, 1) if call.batch_first else call.data
    if onednn.takes(call):
        x = x.contiguous()  # as torch does once, before the first layer
    # Views, not copies: matrix products may round differently when their operands lie at other addresses.
    states = [torch.split(part, call.directions) for part in call.state]
    finals: list[list[Tensor]] = [[] for _ in call.state]
    passes: list[Pass] = []
    outs: list[Tensor] = []
    for layer in range(call.layers):
        state = tuple(part[layer] for part in states)
        out, ends, kept = _layer(call, layer, x, state, need)
        for whole, parts in zip(finals, zip(*ends, strict=True), strict=True):
            whole.extend(parts)
        passes += _passes(call, layer, (x, out), state, kept)
        outs.append(out)
        x = _between(call, layer, out)
    final = tuple(torch.stack(parts, 0) for parts in finals)
    if need.grads:
        for one, direct in zip(passes, Direct.on(outs, final, call.directions), strict=True):
            one.direct = direct
    return (out.transpose(0, 1) if call.batch_first else out, *final), passes


def _layer(call: KernelCall, layer: int, x: Tensor, state: Parts, need: Need) -> Layered:
    """Run one layer: its output, the final parts of each direction, and gates and cells where they came for free."""
    way = _way(call, layer, x, need)
    if way is None:
        return (*_plain(call, layer, x, state), None)
    key, ours = way
    weights = _tracks(call, layer)
    if trusted(key):
        result: Layered = ours(x, _sides(state), weights)
        return result
    out, ends = _plain(call, layer, x, state)
    if trusted(key) is False:
        return out, ends, None
    with torch.no_grad():  # but not detached: which product torch chooses may depend on requires_grad
        mine, its_ends, kept = ours(x, _sides(state), weights)
    flat = (mine, *(part for end in its_ends for part in end)), (out, *(part for end in ends for part in end))
    return out, ends, kept if judge(key, lambda: same_bits(*flat)) else None


def _way(call: KernelCall, layer: int, x: Tensor, need: Need) -> tuple[Any, Any] | None:
    """Return a key and a function for a way that keeps the gates, or None where the plain kernel must do."""
    if call.kind not in stepping.STEP or call.data.device.type != "cpu":
        return None
    if onednn.takes(call):  # without grad mode it runs another kernel, which leaves nothing behind
        return (("onednn", call.bias), _onednn) if torch.is_grad_enabled() else None
    if not need.gates:
        return None
    packed = call.batch_sizes is not None
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    key = ("stepping", call.kind, x.dtype, cast, call.bias, packed, len(call.flat) // call.layers)
    return key, (lambda *a: _stepped(call, *a))


def _onednn(x: Tensor, state: list[Parts], weights: list[Weights]) -> tuple[Tensor, list[Parts], list[Any]]:
    outs, ends, kept = [], [], []
    for reverse, (parts, own) in enumerate(zip(state, weights, strict=True)):
        with torch.enable_grad():  # oneDNN keeps a workspace in grad mode only
            result = onednn.track(x, parts, own, reverse=bool(reverse))
        outs.append(result[0])
        ends.append(result[1:3])
        with torch.no_grad():
            kept.append(onednn.kept(result, x, parts, own, reverse=bool(reverse)))
    return outs[0] if len(outs) == 1 else torch.cat(outs, -1), ends, kept


def _stepped(
    call: KernelCall, x: Tensor, state: list[Parts], weights: list[Weights]
) -> tuple[Tensor, list[Parts], list[Any]]:
    outs, ends, kept = [], [], []
    sizes = None if call.batch_sizes is None else call.batch_sizes.tolist()
    for reverse, (parts, own) in enumerate(zip(state, weights, strict=True)):
        if sizes is None:
            out, end, left = stepping.sequence(call.kind, x, parts, own, reverse=bool(reverse))
        else:
            out, end, left = stepping.packed(call.kind, x, sizes, parts, own, reverse=bool(reverse))
        outs.append(out)
        ends.append(end)
        kept.append(left.join(packed=sizes is not None))
    return outs[0] if len(outs) == 1 else torch.cat(outs, -1), ends, kept


def _plain(call: KernelCall, layer: int, x: Tensor, state: Parts) -> tuple[Tensor, list[Parts]]:
    alone = call.layers == 1 or not cudnn.takes(call)
    flat = list(call.weights(layer)) if alone else cudnn.flattened(call, layer)
    hx = state if call.kind == "lstm" else state[0]
    settings = (hx, flat, call.bias, 1, 0.0, call.training, call.bidirectional)
    if call.batch_sizes is None:
        out, *ends = call.function(x, *settings, False)
    else:
        out, *ends = call.function(x, call.batch_sizes, *settings)
    return out, list(zip(*(end.unbind(0) for end in ends), strict=True))


def _between(call: KernelCall, layer: int, out: Tensor) -> Tensor:
    if call.dropout == 0 or not call.training or layer == call.layers - 1:
        return out
    return cudnn.dropout(out, call.dropout) if cudnn.takes(call) else torch.dropout(out, call.dropout, True)


def _sides(state: Parts) -> list[Parts]:
    """Return the parts of each direction out of parts `(directions, batch, unit)`."""
    return list(zip(*(part.unbind(0) for part in state), strict=True))


def _tracks(call: KernelCall, layer: int) -> list[Weights]:
    flat = call.weights(layer)
    each = len(flat) // call.directions
    return [Weights.of(flat[d * each : (d + 1) * each], call.bias) for d in range(call.directions)]


def _passes(call: KernelCall, layer: int, ends: tuple[Tensor, Tensor], state: Parts, kept: Any) -> list[Pass]:
    x, out = (tensor.detach() for tensor in ends)
    units = out.shape[-1] // call.directions
    passes = []
    for d, (parts, weights) in enumerate(zip(_sides(state), _tracks(call, layer), strict=True)):
        gates, cells = kept[d] if kept is not None else (None, None)
        h = out[..., d * units : (d + 1) * units]
        initial = tuple(part.detach() for part in parts)
        passes.append(Pass(call.kind, d == 1, x, h, initial, weights, gates, cells))
    return passes
