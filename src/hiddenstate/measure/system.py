"""A recurrent layer as a dynamical system: a map from one state vector to the next."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..cells import Layer, invented_inputs, unheard, untouched
from ..errors import BadInput, StateMismatch
from ..state import State
from ..unrolling import Recurrent

_dual: Any = forward_ad  # torch does not annotate this module


@dataclass(frozen=True, slots=True)
class PartLayout:
    """The layout of one part of a state, in the State and in the vector."""

    name: str
    shape: torch.Size  # of one row
    batch_axis: int
    dtype: torch.dtype


class System:
    """Any layer as `s' = F(x, s)` on vectors `s (row, entry)`, with derivatives by autograd.

    A vector holds all parts: `h`, then `c`, then others, each part's layers one after another. Its entries are
    coordinates of the system, except whole numbers (such as a count of steps), which are carried along but have no
    derivative. `smooth` says which entries are coordinates, and `size` how many there are.
    """

    def __init__(self, layer: Layer, x: Tensor | None = None) -> None:
        """Learn the parts from an initial state of one row."""
        self.layer, self.spec = layer, layer.spec
        one = layer.initial(1).detach()
        if x is not None and x.is_floating_point() and not any(True for _ in layer.module.parameters()):
            one = one.to(torch.promote_types(x.dtype, _widest(one)))  # a cell without weights works in any dtype
        first = [name for name in ("h", "c") if name in one]
        names = [*first, *(name for name in one if name not in first)]
        axes = one.batch_axis
        self.layout = [PartLayout(n, one[n].movedim(axes[n], 0).shape[1:], axes[n], one[n].dtype) for n in names]
        real = [part for part in self.layout if not _whole(part.dtype)]
        if not real:
            raise BadInput(f"the state of {type(layer.module).__name__} has no part of real numbers: no derivatives.")
        self.dtype = _widest(one)
        self.input_dtype = real[0].dtype.to_real()
        self.device = one[real[0].name].device
        self.smooth = torch.cat([torch.full((_width(p),), not _whole(p.dtype)) for p in self.layout]).to(self.device)
        self.size = int(self.smooth.sum())

    def features(self) -> int:
        """Return the number of features that the layer takes at each step, to make up a constant input."""
        width = self.spec.input_size
        if width is None:
            width = next(filter(self._takes, (x.shape[1] for x in _made_up(self.layer.module))), None)
        if width is None:
            raise BadInput(
                f"how many features {type(self.layer.module).__name__} takes is unknown: give x (feature,), "
                f"the constant input, or the cell an input_size."
            )
        return width

    def _takes(self, width: int) -> bool:
        try:
            with at_rest(self.layer.module), torch.no_grad():
                self.step(torch.zeros(2, width, device=self.device, dtype=self.input_dtype), self.initial(2))
        except Exception:  # a trial call: sizes read from weights are guesses
            return False
        return True

    def initial(self, rows: int) -> Tensor:
        """Return the vectors that `rows` sequences start from: (row, entry)."""
        return self.pack(self.layer.initial(rows)).detach()

    def pack(self, state: State) -> Tensor:
        """Return a State as vectors."""
        vectors = []
        for part in self.layout:
            values = state[part.name].movedim(part.batch_axis, 0)
            values = torch.view_as_real(values) if values.is_complex() else values
            vectors.append(values.flatten(1).to(self.dtype))
        return torch.cat(vectors, dim=1)

    def unpack(self, vectors: Tensor) -> State:
        """Return vectors as a State."""
        parts = {}
        begin = 0
        for part in self.layout:
            piece = vectors[:, begin : begin + _width(part)]
            begin += _width(part)
            if part.dtype.is_complex:
                piece = torch.view_as_complex(piece.reshape(len(piece), *part.shape, 2))
            elif _whole(part.dtype):
                piece = piece.detach().round()
            parts[part.name] = piece.reshape(-1, *part.shape).to(part.dtype).movedim(0, part.batch_axis)
        return State(parts, {part.name: part.batch_axis for part in self.layout})

    def step(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Return the next vectors for one input to each: `x (row, feature)`."""
        layer = self.layer
        native = layer.to_native(self.unpack(vectors))
        if layer.fused:
            x = x.unsqueeze(1 if self.spec.batch_first else 0)
        # For single steps, compiling would not pay off.
        options = {"engine": "loop"} if isinstance(layer.module, Recurrent) else {}
        _, after = layer.call(x, native, **options)
        return self.pack(layer.to_state(after, batch=len(vectors)))

    def walk(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        """Return the state after each step of `x (batch, time, feature)`: (batch, time, entry)."""
        vectors = self.initial(len(x)) if start is None else start
        states = []
        with torch.no_grad():
            for step in x.unbind(1):
                vectors = self.step(step, vectors)
                states.append(vectors)
        return torch.stack(states, dim=1)

    def jacobians(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Return d next / d state at each of these rows: (row, size, size), rows the next state."""
        vectors = vectors.detach().requires_grad_()
        following = self.step(x, vectors)
        if not following.requires_grad:
            raise BadInput(
                f"the next state of {type(self.layer.module).__name__} does not depend on its state in a way that has "
                f"a gradient. Often it is detached or computed under torch.no_grad() inside the cell."
            )
        rows = []
        for unit in self.smooth.nonzero().flatten().tolist():
            (row,) = torch.autograd.grad(following[:, unit].sum(), vectors, retain_graph=True)
            rows.append(row[:, self.smooth])
        return torch.stack(rows, dim=1)

    def tangents(self, x: Tensor, vectors: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next vectors, and J · directions `(row, size, k)` without computing J."""
        try:
            return self._push(x, vectors, directions)
        except (RuntimeError, NotImplementedError):  # an operation in the cell has no forward-mode derivative
            following = self.step(x, vectors).detach()
            return following, self.jacobians(x, vectors).to(directions.dtype) @ directions

    def in_double(self) -> System:
        """Return this system in double precision if possible, else unchanged."""
        return self

    def start(self, state: object, rows: int) -> Tensor:
        """Return the vectors of a given state (a State, the native form, or vectors), or the initial ones."""
        if state is None:
            return self.initial(rows)
        if not (isinstance(state, Tensor) and state.shape == (rows, len(self.smooth))):
            named = state if isinstance(state, State) else self.layer.to_state(state, batch=rows)
            self.layer.to_native(named)  # raises, and names what does not fit
            state = self.pack(named)
        if len(state) != rows:
            raise StateMismatch(f"the state has {len(state)} rows, but x has {rows}: one state for each sequence.")
        return state.detach().to(self.device, self.dtype)

    def _push(self, x: Tensor, vectors: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        count = directions.shape[2]
        moved = vectors.new_zeros(len(vectors) * count, vectors.shape[1])
        moved[:, self.smooth] = directions.transpose(1, 2).flatten(0, 1).to(vectors.dtype)
        wide, inputs = vectors.repeat_interleave(count, 0), x.repeat_interleave(count, 0)
        _load_forward_mode()
        with torch.no_grad(), _dual.dual_level():
            following, found = _dual.unpack_dual(self.step(inputs, _dual.make_dual(wide, moved)))
            pushed = torch.zeros_like(following) if found is None else found
        pushed = pushed[:, self.smooth].unflatten(0, (len(vectors), count)).transpose(1, 2)
        return following[::count].detach(), pushed.detach().to(directions.dtype)


def _made_up(module: nn.Module) -> Iterator[Tensor]:
    return (x for x in invented_inputs(module, 2) if x.is_floating_point())


@contextmanager
def at_rest(module: nn.Module) -> Iterator[None]:
    """Keep a module in eval mode with its weights out of the graph in this context; everything is restored afterwards.

    Inside, gradients flow to inputs and states, whatever the grad mode outside. Listeners that are already attached,
    such as a Carry, do not hear the calls, since they would take a measurement's states for those of training.
    """
    cuda = any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers()))
    with ExitStack() as stack:
        stack.enter_context(untouched(module))
        stack.enter_context(unheard())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if cuda:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            warnings.filterwarnings("ignore", message="(?i).*tf32")  # some versions, as flags are restored
            # cuDNN has no backward for a recurrent layer in eval mode; torch's own kernels do.
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        module.eval()
        for weight in module.parameters():
            weight.requires_grad_(False)
        yield


def check_sequence(system: System, x: Tensor, *, at_least: int = 1) -> Tensor:
    """Return `x (batch, time, feature)` in the form that the system takes, or raise if something is wrong with it."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        seen = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise BadInput(f"x is (batch, time, feature), but this is {seen}. One sequence wants x.unsqueeze(0).")
    if not len(x):
        raise BadInput("x has no rows: there is nothing to measure.")
    if x.dim() == 2 and x.is_floating_point() and system.spec.input_size is not None:
        raise BadInput(
            f"x is (batch, time, feature), but this is {tuple(x.shape)}. One sequence (time, feature) wants "
            f"x.unsqueeze(0), numbers without features x.unsqueeze(-1)."
        )
    if x.shape[1] < at_least:
        raise BadInput(f"x has {x.shape[1]} steps, but {at_least} or more are needed: give longer sequences.")
    width = system.spec.input_size
    if width is not None and x.dim() == 3 and x.shape[2] != width:
        raise BadInput(
            f"x has shape {tuple(x.shape)}, but this {type(system.layer.module).__name__} takes {width} features: "
            f"(batch, time, {width}), or (time, batch, {width}) with batch_first=False or time_axis=0."
        )
    if x.is_floating_point():
        x = x.to(system.device, system.input_dtype)
    with torch.inference_mode(False):
        return x.clone() if x.is_inference() else x.detach()  # autograd refuses inference tensors


@cache
def _load_forward_mode() -> None:
    # torch loads its forward-mode derivatives when they are first used, and its own jit then causes a warning.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with torch.no_grad(), _dual.dual_level():
            _dual.make_dual(torch.zeros(1), torch.zeros(1))


def _widest(state: State) -> torch.dtype:
    kinds = [part.dtype.to_real() for part in state.values() if not _whole(part.dtype)]
    return reduce(torch.promote_types, kinds) if kinds else torch.float32


def _width(part: PartLayout) -> int:
    return math.prod(part.shape) * (2 if part.dtype.is_complex else 1)


def _whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)
