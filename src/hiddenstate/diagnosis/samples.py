"""Samples: a few rows of a layer's input, run again to see how its gates stand and how far back it reaches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import Call, Layer, unheard
from ..recording import Trajectory, record

_ROWS, _STEPS = 4, 128  # of a sample
_FELT = 0.01  # of the curve's peak, as in hs.measure.memory
_SHUT = 0.05  # a gate below it is nearly shut, and one as near to 1 nearly open
_SHARE = 0.01  # of the time that training takes, at most


@dataclass(frozen=True, slots=True)
class SampleNumbers:
    """What a sample shows of one layer; NaN where it cannot."""

    gates: float = float("nan")  # share of gate values below 0.05 or above 0.95
    memory: float = float("nan")  # steps back within which an input moves the output, down to 0.01 of the peak


class LayerSample:
    """Some rows of the input of one layer, gathered in a call: torch's own kinds alone, whose calls do nothing else."""

    def __init__(self, layer: Layer) -> None:
        """Begin with no step."""
        self.layer = layer
        self._x: list[Tensor] = []  # (row, time, feature) of each call
        self._steps = 0

    @staticmethod
    def fits(layer: Layer) -> bool:
        """Say whether a layer can be run again by itself."""
        return isinstance(layer.module, nn.RNNBase | nn.RNNCellBase)

    def add(self, call: Call) -> None:
        """Keep the first rows of a call, as many steps as the shortest of them has."""
        if self._steps >= _STEPS:
            return
        x, lengths = call.x.detach()[:_ROWS], call.lengths
        steps = x.shape[1] if lengths is None else int(lengths[:_ROWS].min())
        if self._x and x.shape[::2] != self._x[0].shape[::2]:
            return
        self._x.append(x[:, : min(steps, _STEPS - self._steps)].clone())
        self._steps += self._x[-1].shape[1]

    def numbers(self) -> SampleNumbers:
        """Run the layer on the sample, without dropout and apart from all graphs, and measure it."""
        x = torch.cat(self._x, dim=1) if self._x else torch.zeros(0, 0, 0)
        if not x.numel() or x.shape[1] < 2:
            return SampleNumbers()
        module = self.layer.module
        try:
            with _apart(module, x), record(module, gates=True) as recording:
                x.requires_grad_()
                output = self._run(x)  # (row, unit) at the last step
                length = float("nan") if self.layer.spec.bidirectional else _length(output, x)
            gates = [track for name in recording for track in recording.runs(name)]
        except Exception:  # what cannot be measured is no number
            return SampleNumbers()
        return SampleNumbers(max(map(_pressed, gates), default=float("nan")), length)

    def _run(self, x: Tensor) -> Tensor:
        module: Any = self.layer.module
        if self.layer.fused:
            first = self.layer.spec.batch_first
            output = module(x if first else x.transpose(0, 1))[0]
            last: Tensor = output[:, -1] if first else output[-1]
            return last
        state = None
        for step in x.unbind(1):
            state = module(step, state)
        assert state is not None
        end: Tensor = state[0] if isinstance(state, tuple) else state
        return end


class SampleClock:
    """Says at which looks samples are taken: at the first, and while that takes a hundredth of all time, or less."""

    def __init__(self) -> None:
        """Begin with nothing spent."""
        self._began: float | None = None
        self._spent = self._last = 0.0
        self._warm = False  # a first sample also loads code, and tells nothing of those after it

    def due(self) -> bool:
        """Say whether there is time for one more."""
        if self._began is None:
            self._began = perf_counter()
            return True
        return self._spent + self._last <= _SHARE * (perf_counter() - self._began)

    def taken(self, samples: dict[str, LayerSample]) -> dict[str, SampleNumbers]:
        """Return the numbers of all samples of a look."""
        begin = perf_counter()
        found = {name: sample.numbers() for name, sample in samples.items()}
        if self._warm:
            self._last = perf_counter() - begin
            self._spent += self._last
        self._warm = True
        return found


@contextmanager
def _apart(module: nn.Module, x: Tensor) -> Iterator[None]:
    """Let what is run inside be heard by nobody, leave nothing behind, and draw no random numbers."""
    training = module.training
    module.training = training and not getattr(module, "dropout", 0)
    with ExitStack() as stack:
        stack.callback(setattr, module, "training", training)
        stack.enter_context(unheard())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(x.device.type, enabled=False))
        # A user's own hooks on saved tensors, as those of checkpointing, must not see these.
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is))
        if x.is_cuda and not module.training:  # cuDNN has no backward for a layer in eval mode
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def _as_is(saved: Any) -> Any:
    return saved


def _length(output: Tensor, x: Tensor) -> float:
    """Return the steps back within which the input moves one random direction of each row's last output."""
    generator = torch.Generator().manual_seed(0)  # of its own, and the same at each look
    direction = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    (gradient,) = torch.autograd.grad((output * direction).sum(), x)
    curve = gradient.double().square().sum((0, 2)).sqrt().flip(0)  # (lag,)
    if not bool(curve.isfinite().all()):
        return float("nan")
    felt = (curve >= _FELT * curve.max()) & (curve > 0)
    return float(felt.nonzero()[-1]) + 1 if bool(felt.any()) else 0.0


def _pressed(track: Trajectory) -> float:
    """Return the share of gate values that are nearly open or nearly shut; NaN without gates."""
    gates = [gate for name, gate in track.gates.items() if name != "candidate"]
    if not gates:
        return float("nan")
    values = torch.cat([gate.flatten() for gate in gates])
    return float(((values < _SHUT) | (values > 1 - _SHUT)).double().mean())
