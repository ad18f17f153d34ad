"""`accelerate`: torch's fused layers, and loops written in Python, run by our own code wherever that is faster."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ..cells import Call, Layer, LetsPass, Listener, Proceed, Rank, layers, listen, unheard
from ..errors import NotRecurrent, Untraceable
from ..state import tensors
from .checks import Task
from .engines import obstacle_around, switched_off
from .opened import is_torchs_own, run_cells, why_closed
from .precision import as_cudnn
from .recurrent import Recurrent
from .verdicts import Setting, Verdict, Verdicts, compare

if TYPE_CHECKING:
    from .rolled import RolledLoops

_KINDS = 256  # of calls that are remembered
_FEWEST = 4  # steps of a call below which torch's kernel is not even compared
_SHORT = f"a call of fewer than {_FEWEST} steps"
_DTYPES = {
    "cpu": (torch.float32, torch.float64),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}


def accelerate(model: nn.Module) -> Accelerated:
    """Run fused layers of `model`, and its loops over time, by our own code where that is faster, until it is closed.

    The model, its weights, its `state_dict` and its pickles stay as they are. Each kind of call is measured once,
    torch's kernel and ours in turn, forward or forward and backward as it is used; torch's own stays unless ours is
    faster beyond doubt. A `for` loop in the code of a module runs as it is written the first time; then its turn is
    traced, proven on what the loop gave, and measured. `explain()` says what was decided. On processors and CUDA.

    >>> model = nn.Sequential(nn.GRU(3, 4))
    >>> with accelerate(model) as faster:
    ...     output, h = model(torch.randn(50, 2, 3))
    >>> print(faster.explain())  # doctest: +ELLIPSIS
    0: GRU...
    """
    from .rolled import RolledLoops  # all of the fast engine, which a plain import can do without

    every, loops = layers(model), RolledLoops(model)
    if not every and not loops.lines():
        raise NotRecurrent(
            f"{type(model).__name__} has no nn.RNN, nn.LSTM or nn.GRU in it and no loop in its code, which is what is "
            f"accelerated. A cell of your own runs fast as hs.Recurrent(Cell, ...), or by hs.unroll(cell, x)."
        )
    return Accelerated(model, [layer for layer in every if is_torchs_own(layer.module)], loops)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What became of calls of one layer: how, and why."""

    layer: str
    kind: str
    said: str


class Accelerated(Listener):
    """A model whose fused layers and loops run by our own code where that is faster; `close()` ends it."""

    rank, title = Rank.ACCELERATE, "hs.accelerate"

    def __init__(self, model: nn.Module, found: list[Layer], loops: RolledLoops) -> None:
        """Listen to the layers; nothing is measured before they are called."""
        self._loops = loops
        self._verdicts = Verdicts.shared()
        self._seen: dict[_Seen, None] = {}
        self._decided: dict[Hashable, tuple[Setting, bool]] = {}  # for kinds of calls: whether ours is faster
        self._layers = found
        self._theirs: dict[nn.Module, set[Hashable]] = {layer.module: set() for layer in found}  # torch's for good
        self._left_alone = [
            f"{layer.label}: {type(layer.module).__name__}, left alone: {_why_left_alone(layer)}"
            for layer in layers(model)
            if not is_torchs_own(layer.module)
        ]
        # Of the modules around the layers it wants to hear nothing.
        self._handles = [listen(layer.module, [layer], self) for layer in found]
        loops.open()

    @property
    def observes(self) -> bool:
        """It runs calls in another way, but wants to see no steps."""
        return True

    def close(self) -> None:
        """Let torch's kernels, and loops as they are written, run again; safe to repeat."""
        self._loops.close()
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Accelerated:
        """Return itself: it works from the start."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def explain(self) -> str:
        """Return a line for each layer and kind of call, and for each loop: what runs it, how much faster, or why."""
        called = {seen.layer for seen in self._seen}
        lines = [f"{seen.layer}: {seen.kind}, {seen.said}" for seen in self._seen]
        lines += [
            f"{layer.label}: {type(layer.module).__name__}, not called yet"
            for layer in self._layers
            if layer.label not in called
        ]
        return "\n".join([*lines, *self._left_alone, *self._loops.lines()])

    def __str__(self) -> str:
        """Return what `explain` does."""
        return self.explain()

    __repr__ = __str__

    def lets_pass(self, layer: Layer) -> LetsPass:
        """Let calls pass for which torch's kernel was chosen for good."""
        return partial(_is_known, layer.module, self._theirs[layer.module])

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        """Run a call by the kernel that is faster; one that is known to be torch's costs next to nothing more."""
        kind = _kind(call)
        setting, ours = self._decided.get(kind, (None, False))
        if setting is None:
            return self._run(call, proceed, measured=True, kind=kind)
        if ours:
            result = self._by_ours(call, setting) if _why_not(call) is None else None
            return self._run(call, proceed) if result is None else result
        if self._verdicts.due(setting):
            return self._run(call, proceed, measured=True, again=True)
        if self._verdicts.settled(setting):
            self._let_pass(call)
        return proceed(call)

    def recompute(self, call: Call, proceed: Proceed) -> Call:
        """Run a call once more in the way in which it ran before."""
        return self._run(call, proceed)

    def _run(
        self, call: Call, proceed: Proceed, *, measured: bool = False, kind: Hashable = None, again: bool = False
    ) -> Call:
        module, reason = _fused(call), _why_not(call)
        if reason is not None:
            self._note(call, f"by torch's own kernel: {reason}")
            if reason == _SHORT:
                self._let_pass(call)
            return proceed(call)
        setting = Setting.of(call, module)
        if measured and not _capturing(call) and (again or self._verdicts.due(setting)):
            self._verdicts.put(setting, _compared(call, module))
        verdict = self._verdicts.get(setting)
        if verdict is None or not verdict.ours:
            self._note(call, f"{setting}: by torch's own kernel, {verdict or 'which ran before'}")
            if verdict is not None and kind is not None:
                self._remember(kind, setting, ours=False)
            return proceed(call)
        if again:
            self._decided.clear()
        result = self._by_ours(call, setting)
        if result is None:
            return proceed(call)
        if kind is not None:
            self._remember(kind, setting, ours=True)
        self._note(call, f"{setting}: by ours, {verdict}")
        return result

    def _by_ours(self, call: Call, setting: Setting) -> Call | None:
        try:
            return call.returned(run_ours(call, _fused(call)))
        except Untraceable as refusal:  # what it reads may have changed since
            self._note(call, f"{setting}: by torch's own kernel: {refusal.reason}")
            return None

    def _remember(self, kind: Hashable, setting: Setting, *, ours: bool) -> None:
        self._decided[kind] = setting, ours
        while len(self._decided) > _KINDS:
            self._decided.pop(next(iter(self._decided)))

    def _let_pass(self, call: Call) -> None:
        known, key = self._theirs[call.layer.module], _quick_key(call.layer.module, call.args, call.kwargs)
        if key is not None:
            if len(known) == _KINDS:
                known.clear()
            known.add(key)

    def _note(self, call: Call, said: str) -> None:
        self._seen[_Seen(call.layer.label, type(call.layer.module).__name__, said)] = None


def _quick_key(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return what tells calls with a plain tensor apart, as far as one kernel is faster for some; None for others."""
    if kwargs or not args or type(args[0]) is not Tensor:
        return None
    x = args[0]
    return x.shape, x.dtype, x.device, x.requires_grad, torch.is_grad_enabled(), module.training


def _is_known(module: nn.Module, known: set[Hashable], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(known) and _quick_key(module, args, kwargs) in known


def _kind(call: Call) -> Hashable:
    """Return what decides by which kernel a call runs, as far as it can be told at once."""
    x = call.input
    packed = isinstance(x, PackedSequence)
    data = x.data if isinstance(x, PackedSequence) else x
    if type(data) not in (Tensor, nn.Parameter):
        return None  # its sizes may be symbols
    steps = len(x.batch_sizes) if isinstance(x, PackedSequence) else 0
    grad = torch.is_grad_enabled() and (data.requires_grad, call.layer.module.training)
    casts = torch.is_autocast_enabled(data.device.type)
    return call.layer.module, data.shape, packed, steps, data.dtype, data.device, grad, casts


def _why_left_alone(layer: Layer) -> str:
    if isinstance(layer.module, Recurrent):
        return "an hs.Recurrent, which the fast engine runs by itself (hs.explain)"
    if not layer.fused:
        return "a cell, which a loop steps"
    return "no nn.RNN, nn.LSTM or nn.GRU itself, and a subclass may do things of its own"


def run_ours(call: Call, module: nn.RNNBase) -> Any:
    """Run a call of a fused layer by our own kernels, and return what the layer would."""
    x, given = call.x, call.given
    dropout = module.dropout if module.training else 0.0
    drop = partial(_dropped, call, dropout) if dropout else None
    # Under autocast torch's kernels take all that they are given in half precision, weights as well.
    device = x.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with unheard(), as_cudnn(), torch.autocast(device, enabled=False) if half else nullcontext():
        if half is not None:
            x, given = x.to(half), given and given.to(half)
        out, state = run_cells(module, Task(x, given, call.lengths), dropout=drop, dtype=half)
    return _output(call, out), call.layer.to_native(state, batched=call.batched)


def _dropped(call: Call, p: float, x: Tensor) -> Tensor:
    """Drop outputs between layers as torch does, in its layout: the same numbers are drawn in the same order."""
    if isinstance(call.input, PackedSequence):
        packed = _packed(call.input, x)
        dropped = packed._replace(data=nn.functional.dropout(packed.data, p))
        return Call(call.layer, (dropped,)).x
    return nn.functional.dropout(x.transpose(0, 1).contiguous(), p).transpose(0, 1)


def _output(call: Call, out: Tensor) -> Any:
    """Return an output (batch, time, unit) in the form in which the input came, and as torch lays it in memory.

    By that `view` succeeds or fails, and a dropout behind it draws its numbers in that order.
    """
    if isinstance(call.input, PackedSequence):
        return _packed(call.input, out)
    if not call.batched:
        return out.squeeze(0)
    steps_first = out.transpose(0, 1).contiguous()
    return steps_first.transpose(0, 1) if call.layer.spec.batch_first else steps_first


def _packed(like: PackedSequence, out: Tensor) -> PackedSequence:
    lengths = (torch.arange(int(like.batch_sizes[0]), device="cpu") < like.batch_sizes.unsqueeze(1)).sum(0)
    rows = out if like.sorted_indices is None else out.index_select(0, like.sorted_indices)
    data = pack_padded_sequence(rows, lengths, batch_first=True).data
    return PackedSequence(data, like.batch_sizes, like.sorted_indices, like.unsorted_indices)


def _capturing(call: Call) -> bool:
    """Say whether the call is being recorded as a part of a CUDA graph, in which nothing can be measured."""
    return call.x.is_cuda and torch.cuda.is_current_stream_capturing()


def _compared(call: Call, module: nn.RNNBase) -> Verdict:
    """Measure torch's kernel and ours on a call; both are given back what they change."""
    arguments = (call.input,) if call.given_native is None else (call.input, call.given_native)
    theirs = partial(type(module).forward, module)
    try:
        return compare(
            lambda x, *state: theirs(x, *state),
            lambda x, *state: run_ours(Call(call.layer, (x, *state)), module),
            arguments,
            module,
        )
    except Untraceable as refusal:
        return Verdict(ours=False, because=refusal.reason)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Verdict(ours=False, because="there was no memory for a comparison")


def _fused(call: Call) -> nn.RNNBase:
    module = call.layer.module
    assert isinstance(module, nn.RNNBase)
    return module


def _why_not(call: Call) -> str | None:
    """Return why a call is not even compared."""
    module = _fused(call)
    if switched_off():
        return "HIDDENSTATE_ENGINE=loop"
    x = call.input.data if isinstance(call.input, PackedSequence) else call.input
    if type(x) not in (Tensor, nn.Parameter) or x.numel() == 0:
        return "its input is empty, or no plain tensor"
    if any(
        part.dim() != (2 if x.dim() == 2 and call.input is x else 3) for part in tensors(call.given_native).values()
    ):
        return "its state has another number of axes than its input, which torch refuses"
    device = x.device.type
    if device not in _DTYPES:
        return f"on {device} nothing was compared yet"
    autocast = device == "cuda" and torch.is_autocast_enabled(device)
    if x.dtype not in _DTYPES[device] or (x.dtype != module.weight_ih_l0.dtype and not autocast):
        return f"its input is {x.dtype}"
    if device == "cpu" and torch.is_autocast_enabled(device):
        return "autocast chooses the precision of torch's own kernel"
    if call.steps < _FEWEST:
        return _SHORT
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and what is faster is told by the clock"
    if any(weight._backward_hooks for weight in module.parameters()):
        return "a hook on its weights wants to see every gradient"
    closed = why_closed(module)
    if closed is not None:
        return closed
    return obstacle_around(call.layer, Task(x.unsqueeze(0) if x.dim() < 3 else x))
