"""Running a fused call one layer at a time with torch's own kernels, so that the states of every layer are seen.

On the CPU, the results equal those of the whole call bit for bit: the same operations run in the same order, on the
same shapes, with the same draws from the random stream. Some ways of running a layer also leave its gates behind,
which saves reconstructing them. Such a way is used only after its result was compared with torch's own, bit for bit:
see `judge`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import cpu_loop
from .frames import KernelCall, TrackWeights
from .gradients import OutsideGradients

Parts = tuple[Tensor, ...]
Layered = tuple[Tensor, list[Parts], list[tuple[Tensor | None, Tensor | None]] | None]

_TELLING = 256  # so many numbers of an output show whether two kernels round alike
_ONEDNN_LSTM = 2  # oneDNN's number for an LSTM
_CUDNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_cudnn_generators: dict[torch.device, torch.Generator] = {}
_verdicts: dict[Hashable, bool] = {}  # for each way that was tried: whether it agrees with torch's own kernel


@dataclass(slots=True)
class Pass:
    """One layer and direction of one call: the values that its run left behind, until `pad` copies them."""

    kind: str
    reverse: bool
    x: Tensor  # (time, batch, feature), or packed (rows, feature)
    h: Tensor  # (time, batch, unit), or packed
    initial: Parts  # each (batch, unit)
    weights: TrackWeights  # the model's own tensors
    gates: Tensor | None = None  # (time, batch, gates * hidden) after their activations, or packed
    cells: Tensor | None = None  # (time, batch, hidden), or packed
    outside: OutsideGradients | None = None  # gradients from outside the call, if they were asked for


def run(call: KernelCall, *, gates: bool = False, grads: bool = False) -> tuple[tuple[Tensor, ...], list[Pass]]:
    """Return the results of the fused function, and one Pass for each layer and direction, in the order of its state.

    With `gates`, gates are kept also where the kernel itself leaves none. With `grads`, each Pass gets the gradients
    that reach it from outside the call.
    """
    x = call.data.transpose(0, 1) if call.batch_first else call.data
    if _in_onednn(call):
        x = x.contiguous()  # torch does this once, before the first layer
    # Views, not copies: a matrix product may round differently if its operands are at other addresses.
    states = [torch.split(part, call.directions) for part in call.state]
    finals: list[list[Tensor]] = [[] for _ in call.state]
    passes: list[Pass] = []
    outs: list[Tensor] = []
    for layer in range(call.layers):
        state = tuple(part[layer] for part in states)
        out, ends, kept = _layer(call, layer, x, state, gates)
        for whole, parts in zip(finals, zip(*ends, strict=True), strict=True):
            whole.extend(parts)
        passes += _passes(call, layer, (x, out), state, kept)
        outs.append(out)
        x = _between(call, layer, out)
    final = tuple(torch.stack(parts, 0) for parts in finals)
    if grads:
        for one, outside in zip(passes, OutsideGradients.on(outs, final, call.directions), strict=True):
            one.outside = outside
    return (out.transpose(0, 1) if call.batch_first else out, *final), passes


def _layer(call: KernelCall, layer: int, x: Tensor, state: Parts, gates: bool) -> Layered:
    """Run one layer; return its output, the final parts of each direction, and gates and cells if they cost nothing."""
    way = _way(call, layer, x, gates)
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
    with torch.no_grad():  # but do not detach: torch may choose a product by requires_grad
        mine, its_ends, kept = ours(x, _sides(state), weights)
    flat = (mine, *(part for end in its_ends for part in end)), (out, *(part for end in ends for part in end))
    return out, ends, kept if judge(key, lambda: same_bits(*flat)) else None


def _way(call: KernelCall, layer: int, x: Tensor, gates: bool) -> tuple[Any, Any] | None:
    """Return a key and a function for a way that keeps the gates, or None if only the plain kernel will do."""
    if call.kind not in cpu_loop.STEP or call.data.device.type != "cpu":
        return None
    if _in_onednn(call):
        if torch.is_grad_enabled():
            return ("onednn", call.bias), _onednn
        # Torch would run another kernel here, which leaves nothing behind. At most sizes it rounds as the training
        # kernel does. At some small sizes most numbers differ, so comparing a few hundred numbers decides.
        hidden = call.weights(layer)[1].shape[1]
        if not gates or x.shape[0] * x.shape[1] * hidden < _TELLING:
            return None
        return ("onednn inference", call.bias, x.shape, hidden, torch.get_num_threads()), _onednn
    if not gates:
        return None
    packed = call.batch_sizes is not None
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    key = ("loop", call.kind, x.dtype, cast, call.bias, packed, len(call.flat) // call.layers)
    return key, (lambda *a: _stepped(call, *a))


def _onednn(x: Tensor, state: list[Parts], weights: list[TrackWeights]) -> tuple[Tensor, list[Parts], list[Any]]:
    outs, ends, kept = [], [], []
    if not torch.is_grad_enabled():  # the caller wants no graph
        x, state = x.detach(), [tuple(part.detach() for part in parts) for parts in state]
        weights = [own.map(Tensor.detach) for own in weights]
    for reverse, (parts, own) in enumerate(zip(state, weights, strict=True)):
        with torch.enable_grad():  # oneDNN keeps a workspace only in grad mode
            result = _onednn_track(x, parts, own, reverse=bool(reverse))
        outs.append(result[0])
        ends.append(result[1:3])
        with torch.no_grad():
            kept.append(_workspace(result, x, parts, own, reverse=bool(reverse)))
    return outs[0] if len(outs) == 1 else torch.cat(outs, -1), ends, kept


def _stepped(
    call: KernelCall, x: Tensor, state: list[Parts], weights: list[TrackWeights]
) -> tuple[Tensor, list[Parts], list[Any]]:
    outs, ends, kept = [], [], []
    sizes = None if call.batch_sizes is None else call.batch_sizes.tolist()
    for reverse, (parts, own) in enumerate(zip(state, weights, strict=True)):
        if sizes is None:
            out, end, left = cpu_loop.sequence(call.kind, x, parts, own, reverse=bool(reverse))
        else:
            out, end, left = cpu_loop.packed(call.kind, x, sizes, parts, own, reverse=bool(reverse))
        outs.append(out)
        ends.append(end)
        kept.append(left.join(packed=sizes is not None))
    return outs[0] if len(outs) == 1 else torch.cat(outs, -1), ends, kept


def _plain(call: KernelCall, layer: int, x: Tensor, state: Parts) -> tuple[Tensor, list[Parts]]:
    alone = call.layers == 1 or not _in_cudnn(call)
    flat = list(call.weights(layer)) if alone else _laid_for_cudnn(call, layer)
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
    return _cudnn_dropout(out, call.dropout) if _in_cudnn(call) else torch.dropout(out, call.dropout, True)


def _sides(state: Parts) -> list[Parts]:
    """Split parts `(directions, batch, unit)` into the parts of each direction."""
    return list(zip(*(part.unbind(0) for part in state), strict=True))


def _tracks(call: KernelCall, layer: int) -> list[TrackWeights]:
    flat = call.weights(layer)
    each = len(flat) // call.directions
    return [TrackWeights.of(flat[d * each : (d + 1) * each], call.bias) for d in range(call.directions)]


def _passes(call: KernelCall, layer: int, ends: tuple[Tensor, Tensor], state: Parts, kept: Any) -> list[Pass]:
    x, out = ends
    units = out.shape[-1] // call.directions
    passes = []
    for d, (parts, weights) in enumerate(zip(_sides(state), _tracks(call, layer), strict=True)):
        gates, cells = kept[d] if kept is not None else (None, None)
        h = out[..., d * units : (d + 1) * units]
        passes.append(Pass(call.kind, d == 1, x, h, tuple(parts), weights, gates, cells))
    return passes


def _in_onednn(call: KernelCall) -> bool:
    """Say whether torch runs this call in oneDNN."""
    if call.kind != "lstm" or call.batch_sizes is not None or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    tensors = (call.data, *call.state, *call.flat)
    return (
        torch._C._get_mkldnn_enabled()
        and all(tensor.device.type == "cpu" and tensor.layout == torch.strided for tensor in tensors)
        and call.data.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and call.data.numel() != 0
        and len(call.weights(0)) == (4 if call.bias else 2) * call.directions  # no projection
    )


def _onednn_track(x: Tensor, state: tuple[Tensor, ...], weights: TrackWeights, *, reverse: bool) -> tuple[Tensor, ...]:
    """Run one layer and direction over `x (time, batch, feature)`: output, h, c, and in grad mode a workspace."""
    bias = weights.bias_ih is not None
    hidden = weights.hh.shape[1]
    b_ih = torch.zeros_like(weights.ih) if weights.bias_ih is None else weights.bias_ih  # torch itself passes this
    b_hh = torch.zeros_like(weights.hh) if weights.bias_hh is None else weights.bias_hh
    h, c = (part.contiguous() for part in state)
    result: tuple[Tensor, ...] = torch.mkldnn_rnn_layer(
        x, weights.ih, weights.hh, b_ih, b_hh, h, c, reverse, [], _ONEDNN_LSTM, hidden, 1, bias, False, False, True
    )
    return result


def _workspace(
    result: tuple[Tensor, ...], x: Tensor, state: tuple[Tensor, ...], weights: TrackWeights, *, reverse: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return gates `(time, batch, 4 * hidden)` and cells `(time, batch, hidden)` from a training run's workspace.

    Its layout is an internal matter of oneDNN. For each new size, the last step is therefore checked against the
    equations, and if it differs, None is returned.
    """
    out, _, last, workspace = result
    time, batch, hidden = out.shape
    numbers = workspace.view(torch.float32)
    row, step = _row_length(4 * hidden), batch * hidden
    # Each region starts on a page: gates, h without its projection, h of two layers, c of two layers. The last two
    # begin with the initial state and lack the final one, which is written to the result directly.
    inner = _pages(time * batch * row) + _pages(time * batch * _row_length(hidden))
    start = inner + _pages(2 * (time + 1) * batch * _row_length(max(x.shape[2], hidden))) + (time + 2) * step
    if len(numbers) < start + (time - 1) * step:
        return None, None
    gates = numbers[: time * batch * row].view(time, batch, row)[..., : 4 * hidden]
    cells = numbers[start : start + (time - 1) * step].view(time - 1, batch, hidden)

    def agree() -> bool:
        i, f, g, _ = gates[-1].chunk(4, -1)
        c = f * (cells[-1] if time > 1 else state[1]) + i * g
        return _close(gates[-1], _final_gates(x, out, state, weights, reverse)) and _close(c, last)

    if not judge(("workspace", x.shape, hidden, reverse), agree):
        return None, None
    cells = torch.cat([cells, last.unsqueeze(0)])
    # A workspace is in the order of computation.
    return (gates.flip(0), cells.flip(0)) if reverse else (gates, cells)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)


def _final_gates(x: Tensor, out: Tensor, state: tuple[Tensor, ...], weights: TrackWeights, reverse: bool) -> Tensor:
    here, before = (0, 1) if reverse else (len(out) - 1, len(out) - 2)
    gates = linear(x[here], weights.ih, weights.bias_ih)
    gates += linear(out[before] if len(out) > 1 else state[0], weights.hh, weights.bias_hh)
    hidden = out.shape[2]
    gates[:, : 2 * hidden].sigmoid_()
    gates[:, 2 * hidden : 3 * hidden].tanh_()
    gates[:, 3 * hidden :].sigmoid_()
    return gates


def _row_length(numbers: int) -> int:
    """Return the length of a workspace row: a whole number of cache lines, but never a multiple of 256 numbers."""
    padded = -(-numbers // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded


def _pages(numbers: int) -> int:
    return -(-numbers // 1024) * 1024


def _in_cudnn(call: KernelCall) -> bool:
    """Say whether torch runs this call in cuDNN."""
    return call.data.is_cuda and bool(torch.backends.cudnn.is_acceptable(call.data))  # type: ignore[no-untyped-call]


def _laid_for_cudnn(call: KernelCall, layer: int) -> list[Tensor]:
    """Return copies of one layer's weights in the memory layout of cuDNN; gradients reach the originals.

    In a stack, one layer's weights do not have the layout they would have in a layer of its own, and cuDNN would warn.
    """
    copies = [weight.clone() for weight in call.weights(layer)]
    hidden = call.weights(layer)[1].shape[0] // (4 if call.kind == "lstm" else 3 if call.kind == "gru" else 1)
    each = len(copies) // call.directions
    projected = each in (3, 5)
    unit = copies[each - 1].shape[0] if projected else 0
    with torch.no_grad():
        torch._cudnn_rnn_flatten_weight(
            copies, each, copies[0].shape[1], _CUDNN_MODES[call.kind], hidden, unit, 1, False, call.bidirectional
        )
    return copies


def _cudnn_dropout(x: Tensor, p: float) -> Tensor:
    """Drop entries as cuDNN does between its layers: with random numbers of its own, not from torch's random stream."""
    source = _cudnn_generators.get(x.device)
    if source is None:
        source = _cudnn_generators[x.device] = torch.Generator(x.device).manual_seed(torch.cuda.initial_seed())
    with torch.no_grad():
        mask = torch.empty_like(x).bernoulli_(1 - p, generator=source).div_(1 - p) if p < 1 else torch.zeros_like(x)
    return x * mask


def same_bits(ours: tuple[Tensor, ...], plain: tuple[Tensor, ...]) -> bool:
    """Say whether two results are equal, counting NaN as equal to NaN."""
    return all(
        a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in zip(ours, plain, strict=True)
    )


def trusted(key: Hashable) -> bool | None:
    """Return whether the way with this key agreed when it was tried; None if it was never tried."""
    return _verdicts.get(key)


def judge(key: Hashable, agree: Callable[[], bool]) -> bool:
    """Return the verdict on a way; the first time, `agree()` finds it."""
    verdict = _verdicts.get(key)
    if verdict is None:
        verdict = _verdicts[key] = agree()
    return verdict
