"""The states of a whole data set, batch by batch, for measures that take many runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import as_layer, cell_along, read_batch, unwrap, unwrap_to_call
from ..errors import BadInput
from ..recording import Recording, Trajectory, record
from ..unrolling import unroll
from .progress import tracked
from .system import at_rest


def runs_of(
    model: nn.Module,
    batches: Iterable[Any],
    track: str | None = None,
    *,
    call: Callable[[nn.Module, Any], Any] | None = None,
    lengths: Callable[[Any], Any] | None = None,
    gates: bool = False,
) -> Iterator[Trajectory]:
    """Yield the states of one track for each batch of a data set; only one batch is held at a time.

    A tensor or packed sequence is the model's input. From a tuple, the model gets the first entry and what else its
    forward requires; from a mapping, the entries that forward names. Lengths in the batch are passed on if forward has
    an argument for them; otherwise they cut off the padding. The model runs in eval mode without gradients, and comes
    back unchanged after each batch. On a terminal, a bar shows the progress.

    Args:
        model: Any model with recurrent layers.
        batches: A DataLoader, or any other iterable of batches.
        track: Which track; by default the last one.
        call: How to call the model with a batch, if not as usual: `lambda model, batch: ...`.
        lengths: The real steps of each row of a batch, if the batch does not say them: `lambda batch: (batch[0] >
            0).sum(1)`.
        gates: Whether to record gates as well.

    >>> gru = torch.nn.GRU(3, 8, batch_first=True)
    >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(10, 7, 3)), batch_size=4)
    >>> hs.measure.statistics(hs.measure.runs_of(gru, loader)).count
    70
    """
    for recording, real in recordings_of(model, batches, call=call, lengths=lengths, gates=gates):
        for run in recording.runs(list(recording)[-1] if track is None else track):
            yield run if real is None else run.without_padding(real)


def recordings_of(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    call: Callable[[nn.Module, Any], Any] | None = None,
    lengths: Callable[[Any], Any] | None = None,
    gates: bool = False,
) -> Iterator[tuple[Recording, Tensor | None]]:
    """Yield a recording of each batch, with the real steps of its rows if they are known."""
    if isinstance(batches, Tensor | str | Mapping):
        raise BadInput(f"batches are a DataLoader or a list of batches, but this is {type(batches).__name__}: [batch].")
    inner = unwrap_to_call(model)
    total = len(batches) if isinstance(batches, Sized) else 0
    for number, batch in enumerate(tracked(batches, "states", total)):
        told = None if lengths is None else lengths(batch)
        real = None if told is None else torch.as_tensor(told)
        with at_rest(inner), torch.no_grad(), record(inner, gates=gates) as recording:
            try:
                if call is not None:
                    call(model, batch)
                else:
                    read = read_batch(model, batch, lengths=told)
                    real = read.lengths
                    _call(model, read.args)
            except BadInput:
                raise
            except Exception as error:
                raise BadInput(
                    f"{type(inner).__name__} cannot be called with batch {number} of the data set: "
                    f"{type(error).__name__}: {error}. Where a batch is not what the model takes, say how it is "
                    f"called: call=lambda model, batch: model(batch[0])."
                ) from error
        if not len(recording):
            raise BadInput(f"no recurrent layer of {type(inner).__name__} was called with batch {number}.")
        yield recording, real


def _call(model: nn.Module, args: tuple[Any, ...]) -> None:
    """Call a model, or step a cell along (batch, time, ...)."""
    inner = unwrap(model)
    if len(args) == 1 and isinstance(args[0], Tensor) and cell_along(inner, args[0]) is not None:
        unroll(as_layer(inner, args[0][:, 0]).module, args[0], time_axis=1)
    else:
        model(*args)
