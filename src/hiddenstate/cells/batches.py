"""Reading a batch of a data set: what the model is called with, what is left over, and how long each row is."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import BadInput
from ..state import Path, ends, mapped, numbers
from .discovery import cell_along, layers
from .signature import named_like_state
from .started import started
from .weights import weights_like
from .wrappers import unwrap


@dataclass(frozen=True, slots=True, eq=False)
class ReadBatch:
    """How a model is called with one batch."""

    args: tuple[Any, ...]
    rest: tuple[Any, ...] = ()  # entries that the model is not called with, such as labels
    lengths: Tensor | None = None  # (batch,) the real steps of each row, if the batch says them


class BegunDataSet:
    """A data set whose first batch has been looked at; iterating over it still yields every batch, once."""

    def __init__(self, batches: Iterable[Any]) -> None:
        """Read the first batch."""
        self._rest = iter(batches)
        self._total = len(batches) if isinstance(batches, Sized) else 0
        try:
            self.first = next(self._rest)
        except StopIteration:
            raise BadInput("the data set has no batches: there is nothing to look at.") from None

    def __iter__(self) -> Iterator[Any]:
        """Yield all batches."""
        yield self.first
        yield from self._rest

    def __len__(self) -> int:
        """Return the number of batches, 0 if unknown."""
        return self._total


def is_data_set(value: object) -> bool:
    """Say whether something is a DataLoader, or another iterable that can only hold batches.

    A list is not one: a model may take a list as its input.
    """
    known = (Tensor, PackedSequence, nn.Module, Mapping, list, tuple, str, bytes, np.ndarray)
    return isinstance(value, Iterable) and not isinstance(value, known)


def as_tensors(model: nn.Module, values: Any) -> Any:
    """Return arguments with their numpy arrays as tensors; real numbers get the dtype of the model's weights.

    >>> as_tensors(torch.nn.GRU(3, 4), ({"x": torch.zeros(2, 5, 3).double().numpy()},))[0]["x"].dtype
    torch.float32
    """
    if not any(isinstance(end, np.ndarray) for _, end in ends(values)):
        return values
    device, dtype = weights_like(model)

    def converted(_: Path, end: Any) -> Any:
        if not isinstance(end, np.ndarray):
            return end
        if end.dtype.kind not in "fiubc":
            raise BadInput(
                f"an input is an array of {end.dtype}, but numbers are needed: often rows of unequal length."
            )
        made = torch.tensor(end)  # a copy: the array may be read-only, or may be written to later
        return made.to(device, dtype if made.is_floating_point() else made.dtype)

    return mapped(values, converted)


def read_batch(model: nn.Module, batch: Any, *, lengths: Any = None) -> ReadBatch:
    """Return what to call `model` with for this batch, moved to the device of its weights.

    From a mapping, the model gets the entries that its forward names. From a tuple, it gets the first entry, then
    the arguments that forward requires, and lengths if forward has an argument named like lengths; the rest are labels.
    If forward requires a state, it gets its first state. The lengths of the rows come from the batch, or from the token
    that the model's embedding has as `padding_idx`.

    Args:
        model: Any model.
        batch: A tensor, a packed sequence, a tuple or list that begins with one, or a mapping.
        lengths: The real steps of each row, if neither the model nor the batch says them.

    >>> class Tagger(torch.nn.Module):
    ...     def forward(self, x, lengths): ...
    >>> read = read_batch(Tagger(), (torch.zeros(2, 5), torch.tensor([0, 1]), torch.tensor([5, 3])))
    >>> len(read.args), read.lengths
    (2, tensor([5, 3]))
    """
    inner = unwrap(model)
    device = next((weight.device for weight in inner.parameters()), None)
    taken = _parameters(inner)
    if isinstance(batch, Mapping):
        args, rest, told = _of_mapping(inner, batch, taken)
    else:
        args, rest, told = _of_tuple(batch, taken)
    args = tuple(_moved(value, device) for value in args)
    if len(args) == 1 and isinstance(args[0], Tensor) and cell_along(inner, args[0]) is None:
        args = (*args, *started(model, args[0]).beside(args[0]))
    told = lengths if lengths is not None else told if told is not None else _up_to_padding(inner, args[0])
    return ReadBatch(args, rest, None if told is None else torch.as_tensor(told).detach().cpu().long())


def _of_mapping(
    model: nn.Module, batch: Mapping[str, Any], taken: list[inspect.Parameter]
) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    named = {parameter.name for parameter in taken}
    given = {name: value for name, value in batch.items() if name in named}
    missing = [p.name for p in taken if p.default is p.empty and p.name not in given and not named_like_state(p.name)]
    if missing or not given:
        raise BadInput(
            f"the batch is a mapping of {', '.join(map(str, batch))}, but {type(model).__name__}.forward takes "
            f"{', '.join(p.name for p in taken)}: {', '.join(missing) or 'none of these'} is missing. "
            f"Say how the model is called: call=lambda model, batch: model(batch[{next(iter(batch), 'x')!r}])."
        )
    last = max(place for place, parameter in enumerate(taken) if parameter.name in given)
    args = tuple(given.get(p.name, None if p.default is p.empty else p.default) for p in taken[: last + 1])
    rest = tuple(value for name, value in batch.items() if name not in given)
    return args, rest, next((value for name, value in batch.items() if named_like_lengths(name)), None)


def _of_tuple(batch: Any, taken: list[inspect.Parameter]) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    if isinstance(batch, PackedSequence) or not isinstance(batch, list | tuple):
        return (batch,), (), None
    if not batch:
        raise BadInput("a batch is empty: there is nothing to call the model with.")
    first, rest = batch[0], list(batch[1:])
    if isinstance(first, list | tuple) and not isinstance(first, PackedSequence) and not numbers(first):
        told = next((one for one in first[1:] if are_lengths(one, first[0])), None)
        return tuple(first), tuple(rest), told
    args, told = [first], next((one for one in rest if are_lengths(one, first)), None)
    for parameter in taken[1:]:
        if told is not None and named_like_lengths(parameter.name):
            args.append(told)
            rest = [one for one in rest if one is not told]
        elif parameter.default is not parameter.empty or named_like_state(parameter.name) or not rest:
            break
        else:
            args.append(rest.pop(0))
    return tuple(args), tuple(one for one in rest if one is not told), told


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters that forward takes by position."""
    try:
        found = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one for one in found if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def named_like_lengths(name: str) -> bool:
    """Say whether an argument of this name holds lengths."""
    name = name.lower()
    return "len" in name.split("_") or "lens" in name.split("_") or "length" in name or "seqlen" in name


def are_lengths(value: Any, x: Any) -> bool:
    """Say whether `value` holds the lengths of the rows of `x`: after its length, each row repeats a single value.

    The check on the values tells lengths from labels, which would cut off real steps.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        return False
    if numbers(value):
        value = torch.tensor(value)
    if not isinstance(value, Tensor) or value.dim() != 1 or value.is_floating_point() or value.dtype == torch.bool:
        return False
    value = value.cpu()
    for rows in (x, x.transpose(0, 1)):
        if len(rows) != len(value) or not 1 <= int(value.min()) <= int(value.max()) <= rows.shape[1]:
            continue
        behind = rows[(torch.arange(rows.shape[1]) >= value.unsqueeze(1)).to(rows.device)]
        if not behind.numel() or bool((behind == behind.flatten()[0]).all()):
            return True
    return False


def _up_to_padding(model: nn.Module, x: Any) -> Tensor | None:
    """Return the lengths of rows of tokens that end in the padding token of the model's own embedding."""
    marks = {one.padding_idx for one in model.modules() if isinstance(one, nn.Embedding)} - {None}
    if len(marks) != 1 or not isinstance(x, Tensor) or x.dim() != 2 or x.is_floating_point() or not x.numel():
        return None
    first = next((layer.spec.batch_first for layer in layers(model) if layer.fused), True)
    real: Tensor = torch.ne(x if first else x.T, marks.pop() or 0)  # (batch, time)
    steps = torch.arange(1, real.shape[1] + 1, device=x.device)
    found = torch.where(real, steps, 0).amax(1).clamp(min=1)
    return found if bool((found < real.shape[1]).any()) else None


def _moved(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value)
    return value.to(device) if device is not None and hasattr(value, "to") else value
