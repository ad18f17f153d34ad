"""What is tried on a model before it is served: where rows and steps are, and whether it keeps the laws of serving.

A session fed in pieces must equal one call, and the rows of a batch must not influence each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..carry import check_split
from ..cells import (
    Layer,
    invented_inputs,
    is_step,
    layers,
    needed_states,
    untouched,
    unwrap_to_call,
)
from ..errors import BadInput, CarryWarning, HiddenStateError, NotServable
from ..state import Format, State, ends
from .model import ModelLayout, OutputAxes, ServedModel, root_layer
from .trial_calls import sequence_in_a_call, tried

# Sizes that cannot be taken for each other, or for each other's products.
_TRIALS = ((2, 5), (3, 5), (2, 7))  # (rows, steps)
_STEPS = 6
_INVENTED = 16  # steps of an input that is made up: a head that reads fixed steps often reads one of the first ten
_LONGEST = 64  # steps of an example that are run in pieces


def prepare(model: nn.Module, *, example: Tensor | None = None, init: Any = "zeros") -> ServedModel:
    """Return `model` ready to be served, or raise `NotServable` where it breaks a law."""
    bare = unwrap_to_call(model, weights=True)
    name = type(bare).__name__
    if not layers(model):
        raise NotServable(f"{name} has no recurrent layer, so there is no state to keep.")
    example = _sequence(bare, example)
    layout = _find_layout(bare, example)
    _check_split(bare, layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CarryWarning)
        try:
            served = ServedModel(model, layout, init=init)
            try:
                served.format = Format(_check_rows(served))
                served.ragged = _may_be_ragged(served)
            except BaseException:
                served.close()
                raise
        except CarryWarning as warning:
            raise NotServable(f"{name} cannot be served: {warning}") from warning
    return served


def _sequence(model: nn.Module, example: Any) -> Tensor | None:
    """Return the sequence in an example; refuse a model that insists on more than that, by name."""
    name, insists = type(model).__name__, needed_states(model)
    if insists and layers(model)[0].module is not model:  # a cell by itself is handed its state
        raise NotServable(
            f"{name}.forward insists on {' and '.join(map(repr, insists))}, but a session pushes a sequence alone, and "
            f"its state is kept by the engine: let it be {insists[0]}=None, which is passed on to the layer."
        )
    if not isinstance(example, tuple | list) or not any(isinstance(part, Tensor) for part in example):
        return cast("Tensor | None", example)
    first, *rest = example
    if not isinstance(first, Tensor) or any(part is not None for _, part in ends(rest) if not _is_state(part)):
        kinds = ", ".join(type(part).__name__ for part in example)
        raise NotServable(
            f"the example for {name} is a {type(example).__name__} of ({kinds}), but a session pushes one tensor: give "
            f"that as the example. States beside it may stand there; other inputs need a module that adds them."
        )
    return first  # sessions start from the initial state, whatever the example's was


def _is_state(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point() and part.dim() in (2, 3)


class _KeptByModel(Exception):
    """A call that failed was handed a state from an attribute of the model."""


def _find_layout(model: nn.Module, example: Tensor | None) -> ModelLayout:
    """Return the layout of `model`, from an example of its input or from invented ones."""
    found = layers(model)
    reasons: list[str] = []
    kept = ""
    with untouched(model), torch.no_grad():
        model.eval()
        for sample, axes in _candidates(model, found, example):
            try:
                return _try_layout(model, found, sample, axes)
            except NotServable:
                raise
            except HiddenStateError as error:
                reasons.append(str(error))
            except _KeptByModel as error:
                kept = kept or str(error)
            except Exception as error:  # whatever a user's model raises means that this is not its layout
                reasons.append(f"{type(error).__name__}: {error}")
    raise NotServable(kept or _no_layout(model, example, reasons))


def _no_layout(model: nn.Module, example: Tensor | None, reasons: list[str]) -> str:
    name = type(model).__name__
    tried = "; ".join(dict.fromkeys(reason.split("\n")[0] for reason in reasons)) or "nothing could be tried"
    if is_step(model):
        return (
            f"{name} takes one step and its state, which an engine has to keep: make a layer of it, "
            f"hs.Recurrent({name}, input_size, hidden_size), or let a model step it in its forward."
        )
    by_number = any(reason.startswith(IndexError.__name__) for reason in reasons)
    hint = " One that reads steps by their number, as taps at steps 0 and 10, cannot be fed in pieces."
    if example is None:
        return (
            f"no input could be made up that {name} takes ({tried}). Give one: Engine(model, example=x), with x as the "
            f"model takes it, for example (batch, time, feature).{hint if by_number else ''}"
        )
    return (
        f"{name} does not take inputs like the example {tuple(example.shape)} with other numbers of rows and steps "
        f"({tried}). The example is one whole input, for example (batch, time, feature).{hint if by_number else ''}"
    )


def _candidates(
    model: nn.Module, found: Sequence[Layer], example: Tensor | None
) -> Iterator[tuple[Tensor, tuple[int, int | None]]]:
    """Yield samples `(steps, ...)`, each with the axes of rows and steps to try it with."""
    first = found[0]
    both: list[tuple[int, int | None]] = [(0, 1), (1, 0)]
    if first.fused and not first.spec.batch_first:
        both.reverse()
    one: list[tuple[int, int | None]] = [(0, None)]
    if example is not None:
        example = torch.as_tensor(example)
        for rows, steps in (both if example.dim() > 1 else []) + (one if example.dim() else []):
            row = example.select(rows, 0) if example.shape[rows] else example
            yield (row if steps is not None else row.unsqueeze(0)), (rows, steps)
        return
    for sample in invented_inputs(model, _INVENTED):
        for axes in both + one:
            yield sample, axes


def _try_layout(model: nn.Module, found: Sequence[Layer], sample: Tensor, axes: tuple[int, int | None]) -> ModelLayout:
    weight = next((tensor for tensor in (*model.parameters(), *model.buffers())), torch.empty(0))
    sample = sample.to(weight.device)
    root = root_layer(model, found)
    outputs = []
    for rows, steps in (_TRIALS[0], *_TRIALS):  # the first one twice: the second is handed what the model kept
        x = _probe(sample, rows, steps if axes[1] is not None else 1)  # (row, step, ...)
        native = x[:, 0] if axes[1] is None else x if axes[0] == 0 else x.transpose(0, 1)
        call = tried(model, found, native)
        if call.kept:
            raise _KeptByModel(call.kept) if call.error is not None else NotServable(call.kept)
        if call.error is not None:
            raise call.error
        outputs.append(call.output if root is None else root.split(call.output)[0])
        if {seen for _, seen in call.rows} != {rows}:
            saw = ", ".join(f"{name} saw {seen}" for name, seen in sorted(call.rows)) or "its layers saw none"
            raise BadInput(f"with {rows} rows in, {saw}")
    tensors, trees = zip(*(_pytree.tree_flatten(output) for output in outputs[1:]), strict=True)
    if len(set(map(str, trees))) != 1:
        raise BadInput("its output is nested differently with other numbers of rows or steps")
    leaves = tuple(_output_layout(place, three) for place, three in enumerate(zip(*tensors, strict=True)))
    if not any(leaves):
        raise BadInput("it returns nothing")
    return ModelLayout(tuple(sample.shape[1:]), sample.dtype, sample.device, *axes, leaves, trees[0], sample.clone())


def _probe(sample: Tensor, rows: int, steps: int) -> Tensor:
    """Return rows that differ: each repeats the sample's steps from another one on."""
    places = (torch.arange(rows)[:, None] + torch.arange(steps)) % len(sample)
    return sample[places.to(sample.device)]


def _output_layout(place: int, three: tuple[Any, ...]) -> OutputAxes | None:
    if all(tensor is None for tensor in three):
        return None
    if not all(isinstance(tensor, Tensor) for tensor in three) or len({tensor.dim() for tensor in three}) != 1:
        raise BadInput(f"output {place} is {type(three[0]).__name__}, but tensors are needed")
    sizes = list(zip(*(tensor.shape for tensor in three), strict=True))
    rows = [axis for axis, size in enumerate(sizes) if size == tuple(r for r, _ in _TRIALS)]
    steps = [axis for axis, size in enumerate(sizes) if size == tuple(s for _, s in _TRIALS)]
    merged = [axis for axis, size in enumerate(sizes) if size == tuple(r * s for r, s in _TRIALS)]
    if merged and not rows:
        rows = steps = merged[:1]
    changing = [size for axis, size in enumerate(sizes) if size[0] != size[2] and axis not in (*steps[:1], *merged[:1])]
    if changing:
        few, many = changing[0][0], changing[0][2]
        raise BadInput(f"output {place} has {few} entries for {_TRIALS[0][1]} steps and {many} for {_TRIALS[2][1]}")
    if not rows:
        raise BadInput(f"output {place} has shape {tuple(three[0].shape)}, in which no axis has one entry for each row")
    rest = tuple(n for axis, n in enumerate(three[0].shape) if axis not in (rows[0], *steps[:1]))
    return OutputAxes(rows[0], steps[0] if steps else None, three[0].dtype, rest)


def _check_split(model: nn.Module, layout: ModelLayout) -> None:
    """Refuse a model for which two pieces do not equal the whole."""
    name, cut, axis = type(model).__name__, None, layout.steps_axis
    if axis is not None:
        x = _whole(model, layout)
    else:
        several = sequence_in_a_call(model, layers(model), layout.sample)
        if several is None:
            return  # each call is one step: there is no whole to compare with
        x, axis = several
        cut = x.shape[axis] // 2
    try:
        split = check_split(model, x, at=cut, time_axis=axis)
    except HiddenStateError:
        raise
    except Exception as error:
        raise NotServable(
            f"{name} cannot be served: it runs {x.shape[axis]} steps at once, but not in two pieces "
            f"({type(error).__name__}: {error}), and a session is fed in pieces of any length. Usually its head reads "
            f"steps by their number: let it read every step, or the last one."
        ) from error
    if not split:
        raise NotServable(f"{name} cannot be served: a session fed in pieces would not equal one call. {split}")


def _whole(model: nn.Module, layout: ModelLayout) -> Tensor:
    """Return an input of one row, as long as the sample where the model takes that."""
    steps = min(max(_STEPS, len(layout.sample)), _LONGEST)
    x = _steps(layout.sample, 0, steps).unsqueeze(layout.rows_axis)
    with untouched(model), torch.no_grad():
        model.eval()
        return x if tried(model, (), x).error is None else _steps(layout.sample, 0).unsqueeze(layout.rows_axis)


def _check_rows(served: ServedModel) -> State:
    """Refuse a model whose rows influence each other; return the state of three rows after two steps."""
    pieces = [_steps(served.layout.sample, row) for row in range(3)]
    with untouched(served.model):
        _, middle = served.run(torch.stack([piece[:2] for piece in pieces]), None)
        together = _rows(served, [piece[2:] for piece in pieces], middle)
        alone = [_rows(served, [piece[2:]], middle.select([row]))[0] for row, piece in enumerate(pieces)]
    gap, what = _gap(together, alone)
    if what:
        raise NotServable(
            f"{type(served.model).__name__} cannot be served: what it gives for a row changes by {gap:.2g} with the "
            f"rows beside it (in {what}), so one caller's input would reach another. Usually something normalizes over "
            f"the batch."
        )
    return middle


def _may_be_ragged(served: ServedModel) -> bool:
    """Return whether inputs of different lengths in one call give what each gives alone."""
    pieces = [_steps(served.layout.sample, row)[:steps] for row, steps in enumerate((4, 1, 2))]
    with untouched(served.model):
        _, state = served.run(torch.stack([piece[:1] for piece in pieces]), None)
        try:
            together = _rows(served, pieces, state)
        except (HiddenStateError, RuntimeError, ValueError):
            return False
        alone = [_rows(served, [piece], state.select([row]))[0] for row, piece in enumerate(pieces)]
    return not _gap(together, alone)[1]


def _steps(sample: Tensor, begin: int, count: int = _STEPS) -> Tensor:
    return sample[(torch.arange(count) + begin).to(sample.device) % len(sample)]


def _rows(served: ServedModel, pieces: Sequence[Tensor], state: State) -> list[dict[str, Tensor]]:
    """Return what each row gets, by name: its outputs up to its own length, and its state."""
    steps = [len(piece) for piece in pieces]
    x = nn.utils.rnn.pad_sequence(list(pieces), batch_first=True)
    leaves, after = served.run(x, state, None if min(steps) == max(steps) else steps)
    return [
        {
            **{
                f"output {place}": leaf[row, : len(piece)] if served.has_steps(place) else leaf[row]
                for place, leaf in enumerate(leaves)
                if leaf is not None
            },
            **{f"the state {name}": part.select(after.batch_axis[name], row) for name, part in after.items()},
        }
        for row, piece in enumerate(pieces)
    ]


def _gap(some: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> tuple[float, str]:
    """Return the largest difference and where it is, an empty string if rounding can explain it."""
    gaps: dict[str, float] = {}
    allowed = 0.0
    for mine, theirs in zip(some, others, strict=True):
        for name, a in mine.items():
            b = theirs[name]
            if a.shape != b.shape:
                return float("inf"), name
            if not a.numel():
                continue
            if not a.is_floating_point():
                gap = float((a != b).any())
            else:
                eps = torch.finfo(a.dtype).eps
                allowed = max(allowed, max(1.0, float(b.abs().max())) * (1e3 * eps if eps < 1e-4 else 8 * eps))
                gap = float((a - b).abs().nan_to_num(nan=float("inf")).max())
            gaps[name] = max(gap, gaps.get(name, 0.0))
    worst, gap = max(gaps.items(), key=lambda item: item[1], default=("", 0.0))
    return gap, worst if not gap <= allowed else ""
