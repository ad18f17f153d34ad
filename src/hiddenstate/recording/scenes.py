"""What is noted around each call of a fused layer, a cell, or a stack of cells."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..cells import undisturbed
from ..errors import NotRecurrent, RecordingWarning, StateMismatch
from . import calls, layerwise, stepping
from .exact import judge, same_bits, trusted
from .outputs import outputs
from .padded import Layout, pad
from .reconstruction import activated_gates
from .steps import Named, Placed
from .taps import close_step, open_step

if TYPE_CHECKING:
    from .ears import CellEar
    from .watching import Frame


class FusedScene:
    """`nn.RNN`, `nn.LSTM`, `nn.GRU`: the kernel's call is run layer by layer, and each layer's pass is kept."""

    def begin(self, frame: Frame) -> None:
        """Nothing is known before the kernel is called."""

    def intercepted(self, frame: Frame) -> calls.Intercept:
        """Step in where the kernel is called."""
        need = layerwise.Need(
            gates=any(ear.options.gates or ear.options.grads for ear in frame.listeners),
            grads=any(ear.options.grads for ear in frame.listeners),
        )

        def handle(function: Any, args: tuple[Any, ...]) -> Any:
            call = calls.parse(function, args)
            if call is None:
                return function(*args)
            result, passes = layerwise.run(call, need)
            frame.notes.append((call, passes))
            return result

        return calls.Intercept(calls.FUSED, handle)

    def end(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Hand each pass to those who want its track."""
        given = args[0] if args else kwargs.get("input")
        for call, passes in frame.notes:
            layout = Layout.of(passes[0].h, call.batch_sizes, given if isinstance(given, PackedSequence) else None)
            for ear in frame.listeners:
                need = layerwise.Need(ear.options.gates, ear.options.grads)
                for place, track in ear.tracks.items():
                    ear.keep(track, pad(passes[place], layout, need))
        for ear in frame.listeners if not frame.notes else ():
            for place, seen in outputs(ear.layer, args, kwargs, result).items():
                if place in ear.tracks:
                    ear.keep(ear.tracks[place], seen)

    def fail(self, frame: Frame) -> None:
        """A call that raised left nothing whole."""


class CellScene:
    """A cell: each call is a step, and hs.tap names what happens inside it."""

    def begin(self, frame: Frame) -> None:
        """Listen for taps."""
        open_step(any(ear.options.gates for ear in frame.listeners))

    def intercepted(self, frame: Frame) -> calls.Intercept | None:
        """Step in where torch's own cells do their step, if somebody wants their gates."""
        if not any(ear.options.gates and ear.layer.kind in ("lstm_cell", "gru_cell") for ear in frame.listeners):
            return None

        def handle(function: Any, args: tuple[Any, ...]) -> Any:
            result, gates = _torch_step(calls.STEPS[function], function, args)
            frame.notes.append((calls.STEPS[function], gates))
            return result

        return calls.Intercept(calls.STEPS, handle)

    def end(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Hand the step to everybody who listens."""
        gates: dict[Named, Tensor] = {name: value for name, value in close_step().items()}
        for kind, activated in frame.notes:
            gates[calls.GATES[kind]] = activated  # taken apart when it is read
        for ear in frame.listeners:
            self._hear(ear, Step(ear, args, kwargs, result, gates if ear.options.gates else {}))

    def _hear(self, ear: CellEar, step: Step) -> None:
        if ear.deaf:
            return
        try:
            after = step.after()
        except (NotRecurrent, StateMismatch) as error:  # it only looked like a cell: the run goes on without us
            ear.deaf = True
            with contextlib.suppress(RecordingWarning):  # made an error by a filter, it would stop the run after all
                warnings.warn(f"{ear.track!r} is not recorded: {error}", RecordingWarning, stacklevel=2)
        else:
            ear.recording.cells.step(ear, step, after)

    def fail(self, frame: Frame) -> None:
        """Put the taps of the failed step away."""
        close_step()


class StackScene:
    """`hs.Recurrent`: a run of its own for each of its cells."""

    def begin(self, frame: Frame) -> None:
        """Start a run for every cell."""
        for ear in frame.listeners:
            for cell in ear.cells:
                ear.recording.cells.close(cell)

    def intercepted(self, frame: Frame) -> None:
        """Let everything pass."""

    def end(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Close the cells' runs."""
        for ear in frame.listeners:
            for cell in ear.cells:
                ear.recording.cells.close(cell)

    def fail(self, frame: Frame) -> None:
        """Forget runs whose rows nobody can put in order any more."""
        for ear in frame.listeners:
            for cell in ear.cells:
                ear.recording.cells.drop(cell)


def _torch_step(kind: str, function: Any, args: tuple[Any, ...]) -> tuple[Any, Tensor]:
    """Run a step of `nn.LSTMCell` or `nn.GRUCell`, and return its gates too."""
    x, hx, *flat = args
    weights = calls.Weights(*flat)
    state = tuple(hx) if kind == "lstm" else (hx,)
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    key = ("cell", kind, x.dtype, cast, weights.bias_ih is None)
    if x.device.type != "cpu" or trusted(key) is False:
        return function(*args), activated_gates(kind, x, state[0], weights)
    kept = stepping.Kept()
    if trusted(key):
        after = stepping.STEP[kind](x, state, weights, kept, projected=False)
        result = after if kind == "lstm" else after[0]
    else:
        result = function(*args)
        with torch.no_grad():
            after = stepping.STEP[kind](x, state, weights, kept, projected=False)
            plain = result if kind == "lstm" else (result,)
            if not judge(key, lambda: same_bits(after, plain)):
                return result, activated_gates(kind, x, state[0], weights)
    return result, kept.join(packed=True)[0]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One call of a cell, read as far as somebody asks."""

    ear: CellEar
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    gates: dict[Named, Tensor]

    @property
    def first(self) -> bool:
        """Whether no step of this cell has been heard before."""
        return not self.ear.heard

    def given(self) -> dict[str, Placed] | None:
        """Return the state that the step was given, or None."""
        native = self.ear.layer.given(self.args, self.kwargs)
        return None if native is None else self._placed(native)

    def initial(self) -> dict[str, Placed]:
        """Return the state that a step without one starts from; nothing where only the cell itself knows."""
        layer = self.ear.layer
        try:
            with undisturbed(layer.module), torch.no_grad():
                first = layer.initial(layer.rows(self.args, self.kwargs)[0])
        except Exception:  # a cell that makes its first state inside itself
            return {}
        return {name: Placed(part, first.batch_axis[name]) for name, part in first.items()}

    def after(self) -> dict[str, Placed]:
        """Return the state after the step."""
        layer = self.ear.layer
        if layer.kind in _TORCH_CELLS:
            return self._placed(self.result)
        if self.first and (given := layer.given(self.args, self.kwargs)) is not None:
            self._placed(given)  # teaches what the state looks like, where the cell would have to be tried otherwise
        return self._placed(layer.split(self.result)[1])

    def _placed(self, native: Any) -> dict[str, Placed]:
        layer = self.ear.layer
        rows, batched = layer.rows(self.args, self.kwargs)
        if layer.kind in _TORCH_CELLS:
            own = native if isinstance(native, tuple | list) else (native,)
            return {name: Placed(part, 0 if batched else None) for name, part in zip("hc", own, strict=False)}
        state = layer.to_state(native, batch=rows)
        return {name: Placed(part, state.batch_axis[name]) for name, part in state.items()}


_TORCH_CELLS = ("lstm_cell", "gru_cell", "rnn_cell")
FUSED, CELL, STACK = FusedScene(), CellScene(), StackScene()
