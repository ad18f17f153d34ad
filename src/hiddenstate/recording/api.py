"""`record` starts a recording; `load_recording` opens one from disk."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..cells import unwrap
from .recording import Options, Recording, Tracks

if TYPE_CHECKING:
    from .recorder import Recorder


def record(
    model: nn.Module,
    gates: bool = False,
    *,
    grads: bool = False,
    tracks: Tracks | None = None,
    every: int = 1,
    to: str | PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    graph: bool = False,
) -> Recorder:
    """Return a context that records every state of `model`, and with `gates=True` every gate.

    Nothing else changes: outputs, gradients, the random stream and the model's hooks are those of a plain run.

    >>> lstm = torch.nn.LSTM(3, 8, num_layers=2, batch_first=True)
    >>> with hs.record(lstm, gates=True) as rec:
    ...     out, _ = lstm(torch.randn(4, 10, 3))
    >>> rec["l1"].h.equal(out)
    True
    >>> rec["l0"].gates["forget"].shape
    torch.Size([4, 10, 8])

    Args:
        model: Any model with recurrent layers or cells in it, or such a layer itself.
        gates: Also keep the gates, after their activations, and the values that cells name with `hs.tap`.
        grads: Also keep the gradient of the loss with respect to every state, once a backward pass has been run.
        tracks: What to keep: a track or layer by name, a list of names, or a function of a track's name. None: all.
        every: Keep steps 0, every, 2 * every, … only.
        to: A folder to stream to, so that memory stays bounded; `hs.load_recording` opens it.
        dtype: Keep values in this dtype.
        device: Keep values on this device.
        graph: Keep the graph of every state, also in lower layers, so that heads and penalties on them train the
            model. The graph lives as long as the recording. Gates are kept without a graph.
    """
    from .recorder import Recorder  # imported late, so that importing the library stays light

    where = None if device is None else torch.device(device)
    options = Options(gates, grads, tracks, every, to, dtype, where, graph)
    return Recorder(unwrap(model), options)


def load_recording(path: str | PathLike[str]) -> Recording:
    """Return the recording in a folder that `record(..., to=path)` wrote; values are read from disk when used.

    >>> import tempfile, pathlib
    >>> path, gru = pathlib.Path(tempfile.mkdtemp()) / "run", torch.nn.GRU(3, 8)
    >>> with hs.record(gru, to=path):
    ...     out, _ = gru(torch.randn(5, 2, 3))
    >>> hs.load_recording(path)["l0"].h.shape
    torch.Size([2, 5, 8])
    """
    from .folder import Loaded

    return Loaded(path)
