"""`record`: a recording that is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from os import PathLike
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import Layer, as_layer, layers, unwrap
from ..errors import BadInput, NotRecurrent, UnknownTrack
from ..unrolling import Recurrent
from . import scenes
from .arranging import Arranged
from .ears import CellEar, FusedEar, StackEar
from .padded import Padded
from .recording import Recording
from .steps import Steps
from .takes import Options, Take
from .trajectory import Trajectory
from .watching import Hook, unwatch, unwind, watch

Tracks = str | Iterable[str] | Callable[[str], bool]


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
) -> Recorder:
    """Return a context in which every state of `model`, and with `gates=True` every gate, is recorded.

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
        gates: Also keep the gates, after their activations, and what cells name with `hs.tap`.
        grads: Also keep the gradient of the loss with respect to every state, once a backward pass has been run.
        tracks: What to keep: a track, a layer, a list of such names, or a function of a track's name. None: everything.
        every: Keep steps 0, every, 2 * every, … only.
        to: A folder to stream to, so that memory stays bounded; `hs.load_recording` opens it.
        dtype: Keep values in this dtype.
        device: Keep values on this device.
    """
    options = Options(gates, grads, _check_every(every), dtype, None if device is None else torch.device(device))
    return Recorder(unwrap(model), options, tracks, to)


class Recorder(Recording):
    """A recording under way, or just ended; see `record`."""

    def __init__(self, model: nn.Module, options: Options, tracks: Tracks | None, to: str | PathLike[str] | None) -> None:
        """Find the layers; nothing is touched before the block begins."""
        found = layers(model)
        if not found:
            raise NotRecurrent(
                f"{type(model).__name__} has no recurrent layer, so there is no state to record. A cell of your own is "
                f"found by its initial_state(batch), or by hidden_size and forward(x, state); hs.register teaches others."
            )
        self.every = options.every
        self._options = options
        self._chosen = choose(found, tracks)
        self._model = model
        self._ears = self._listen(found)
        self._runs: dict[str, list[Take]] = {}
        self._open: dict[tuple[int, CellEar], Steps] = {}
        self._lock = threading.RLock()
        self._depth: dict[int, int] = {}
        self._handles: list[Any] = []
        self._entered = 0
        self._to = to

    def __enter__(self) -> Recorder:
        """Begin to listen."""
        if self._entered:
            raise BadInput("this recording is under way already: open another one with hs.record for a nested block.")
        self._entered = threading.get_ident()
        self._older = {thread.ident for thread in threading.enumerate()}
        with self._lock:
            _recorders.append(self)
        for ear, scene in self._ears:
            watch(ear.layer.module, scene, ear)
        if not any(ear.layer.module is self._model for ear, _ in self._ears):
            self._handles = [
                self._model.register_forward_pre_hook(Hook(lambda *_: self._enter_call())),
                self._model.register_forward_hook(Hook(lambda *_: self._leave_call()), always_call=True),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening, leave no hook behind, and close the runs that are still open."""
        for ear, _ in self._ears:
            unwatch(ear.layer.module, ear)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        unwind([ear for ear, _ in self._ears])
        _recorders.remove(self)
        self._entered = 0
        for thread, ear in list(self._open):
            self._close(thread, ear)

    def hears(self) -> bool:
        """Say whether calls in this thread are recorded: the one of the block, and those started in it.

        A thread that has a recording of its own is heard by that one alone.
        """
        here = threading.get_ident()
        if here == self._entered:
            return True
        if here in self._older:
            return False
        return not any(other._entered == here for other in _recorders)

    # What the scenes report.

    def take_fused(self, ear: FusedEar, track: str, padded: Padded) -> None:
        """Keep one track of a fused call."""
        self._keep(Take(track, ear.layer.kind, self._options, padded.layout.lengths, padded.initial, padded))

    def take_output(self, ear: FusedEar, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keep what little is known of a layer that does not call torch's kernels: its outputs."""

    def take_step(self, ear: CellEar, step: scenes.Step) -> None:
        """Add one step to a cell's run."""
        key = threading.get_ident(), ear
        given = step.given()
        after = step.after()
        rows = next(iter(after.values())).rows
        steps = self._open.get(key)
        if steps is not None and (rows > steps.lengths[-1] or (self._alone(ear) and not steps.goes_on(given))):
            self._close(*key)
            steps = None
        if steps is None:
            first = step.initial() if given is None else given
            initial = {name: self._options.cast(p.flat(p.tensor.detach())).clone() for name, p in first.items()}
            thin = self._options if not ear.reverse else Options(**{**_fields(self._options), "every": 1})
            steps = self._open[key] = Steps(thin, rows, initial)
        steps.add(after, step.gates)

    def close_run(self, ear: CellEar, *, batch: int | None = None, lengths: Tensor | None = None) -> None:
        """End a cell's run in this thread, if there is one."""
        self._close(threading.get_ident(), ear, batch=batch, lengths=lengths)

    def drop_run(self, ear: CellEar) -> None:
        """Forget a cell's run in this thread."""
        self._open.pop((threading.get_ident(), ear), None)

    def _alone(self, ear: CellEar) -> bool:
        return not self._depth.get(threading.get_ident()) and ear.stack is None

    def _close(self, thread: int, ear: CellEar, *, batch: int | None = None, lengths: Tensor | None = None) -> None:
        steps = self._open.pop((thread, ear), None)
        if steps is not None:
            self._keep(self._joined(ear, steps, batch, lengths))

    def _joined(self, ear: CellEar, steps: Steps, batch: int | None, lengths: Tensor | None) -> Take:
        arranged = Arranged.of(steps, batch or steps.batch, lengths, reverse=ear.reverse)
        kind = ear.layer.kind
        return Take(
            ear.track, kind, self._options, arranged.lengths, arranged.initial(), arranged, thinned=not ear.reverse
        )

    def _keep(self, take: Take) -> None:
        if self._options.device is not None or self.every > 1:
            take.settle()
        with self._lock:
            self._runs.setdefault(take.track, []).append(take)

    def _enter_call(self) -> None:
        here = threading.get_ident()
        if self.hears():
            if not self._depth.get(here):
                self._close_all(here)  # steps taken outside any call of the model
            self._depth[here] = self._depth.get(here, 0) + 1

    def _leave_call(self) -> None:
        here = threading.get_ident()
        if self._depth.get(here):
            self._depth[here] -= 1
            if not self._depth[here]:
                self._close_all(here)

    def _close_all(self, thread: int) -> None:
        for key in list(self._open):
            if key[0] == thread:
                self._close(*key)

    # What a Recording needs.

    def _tracks(self) -> dict[str, int]:
        found = {track: len(runs) for track, runs in self._runs.items()}
        for _, ear in list(self._open):
            found[ear.track] = found.get(ear.track, 0) + 1
        return {track: found[track] for track in self._chosen if track in found}

    def _known(self) -> tuple[str, ...]:
        return self._chosen

    def _load(self, track: str) -> list[Trajectory]:
        under_way = [self._joined(e, s, None, None) for (_, e), s in list(self._open.items()) if e.track == track]
        return [take.trajectory() for take in [*self._runs.get(track, []), *under_way]]

    def _listen(self, found: list[Layer]) -> list[tuple[Any, Any]]:
        ears: list[tuple[Any, Any]] = []
        for layer in found:
            wanted = {place: track for place, track in enumerate(layer.tracks) if track in self._chosen}
            if not wanted:
                continue
            if isinstance(layer.module, Recurrent):
                stack = StackEar(self, layer, self._options)
                inside = layer.module.cells()
                ends = 2 if layer.module.bidirectional else 1
                stack.cells = [
                    CellEar(self, as_layer(inside[place]), self._options, track, stack, place % ends == 1)
                    for place, track in wanted.items()
                ]
                ears += [(stack, scenes.STACK), *((cell, scenes.CELL) for cell in stack.cells)]
            elif layer.fused:
                ears.append((FusedEar(self, layer, self._options, wanted), scenes.FUSED))
            else:
                ears.append((CellEar(self, layer, self._options, wanted[0]), scenes.CELL))
        return ears


_recorders: list[Recorder] = []


def _fields(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in Options.__slots__}


def _check_every(every: int) -> int:
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise BadInput(f"every is {every!r}, but a whole number from 1 is needed: every=2 keeps steps 0, 2, 4, …")
    return every


def choose(found: list[Layer], tracks: Tracks | None) -> tuple[str, ...]:
    """Return the tracks that a choice names, in the model's order."""
    everything = {track: layer for layer in found for track in layer.tracks}
    if tracks is None:
        return tuple(everything)
    if callable(tracks):
        chosen = {track for track in everything if tracks(track)}
    else:
        chosen = set()
        for name in [tracks] if isinstance(tracks, str) else tracks:
            named = {t for t, layer in everything.items() if name in (t, layer.name)}
            if not named:
                raise UnknownTrack(f"no track or layer is named {name!r}. The tracks are: {', '.join(everything)}.")
            chosen |= named
    if not chosen:
        raise BadInput(f"tracks={tracks!r} chooses nothing. The tracks are: {', '.join(everything)}.")
    return tuple(track for track in everything if track in chosen)


