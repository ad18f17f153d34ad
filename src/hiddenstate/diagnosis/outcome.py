"""What one call of a model gave: its result, the calls of its recurrent layers, every operation it made.

And how far two such outcomes, or two tensors, are apart.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from ..cells import Call, Layer, Listener, Proceed, around, listen, may_be_recomputed
from ..state import Path, State, tensors
from .inputs import ModelInputs

_OURS = (str(FilePath(torch.__file__).parent), str(FilePath(__file__).parents[1]))
_MOST = 10_000  # tensors that are looked through
_CALLER = str(FilePath(__file__).with_name("patient.py"))
_QUIET = {"size", "dim", "get:dtype", "get:device", "get:shape", "get:requires_grad", "get:is_cuda", "numel", "__len__"}

SIGMOIDS = {"sigmoid", "sigmoid_", "hardsigmoid"}  # operations that make a gate
_SIGNS = ("lt", "gt", "le", "ge")
COMPARISONS = frozenset({*_SIGNS, *(f"__{name}__" for name in _SIGNS), "less", "greater"})
# Operations on one tensor after which each value is still one of the values before.
PASSING = frozenset(
    {
        *("view", "reshape", "chunk", "split", "unbind", "squeeze", "unsqueeze", "transpose", "permute", "flatten"),
        *("__getitem__", "contiguous", "expand", "expand_as", "to", "float", "clone", "movedim", "narrow", "select"),
        *("t", "dropout", "index_select", "gather", "repeat", "get:T", "get:mT"),
    }
)

OutcomeType = TypeVar("OutcomeType", bound="Outcome")


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What one call of the model gave."""

    result: Any
    inputs: ModelInputs
    calls: LayerCalls  # of its layers, where they were to be collected
    trace: Operations  # where it was to be traced

    @classmethod
    def of(cls: type[OutcomeType], outcome: Outcome) -> OutcomeType:
        """Return an outcome as one of a subclass, such as a probe."""
        return cls(outcome.result, outcome.inputs, outcome.calls, outcome.trace)

    @property
    def outputs(self) -> dict[Path, Tensor]:
        """All tensors of real numbers with at least one axis in what the model returned."""
        return {path: t for path, t in tensors(self.result).items() if t.is_floating_point() and t.dim() > 0}


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """One call of an embedding."""

    name: str
    tokens: Tensor
    vectors: Tensor


class LayerCalls(list[Call]):
    """The calls of all layers in one call of a model, in their order."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.overwritten: list[Call] = []  # those whose given state has other values afterwards
        self.embedded: list[Embedded] = []
        self.unread: dict[str, str] = {}  # layers whose calls could not be understood, and why

    def of(self, layer: Layer) -> list[Call]:
        """Return the calls of one layer."""
        return [call for call in self if call.layer.module is layer.module]

    @property
    def labels(self) -> str:
        """The names of the layers that were called, for a finding's `where`."""
        return ", ".join(dict.fromkeys(call.layer.label for call in self)) or "the model"


@contextmanager
def collected(model: nn.Module, layers: list[Layer], *, leaves: bool = False) -> Iterator[LayerCalls]:
    """Collect every call of `layers`; with `leaves`, inputs to which no gradient would come back get one."""
    calls = LayerCalls()
    heard = [layer for layer in layers if not isinstance(layer.module, torch.jit.ScriptModule)]
    with ExitStack() as stack:
        stack.callback(listen(model, heard, _Collector(calls, leaves=leaves)).remove)
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                stack.callback(around(module, partial(_embedding, calls, name, leaves)).remove)
        yield calls


class _Collector(Listener):
    def __init__(self, calls: LayerCalls, *, leaves: bool) -> None:
        self._calls, self._leaves = calls, leaves

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        """Note what went in and what came out."""
        before: State | None = None
        with self._reading(call):
            call = with_gradient(call) if self._leaves else call
            given = None if isinstance(call.layer.module, nn.RNNBase) else call.given  # torch's write into nothing
            before = None if given is None else given.detach().clone()
        done = proceed(call)
        with self._reading(done):
            given, _ = done.given, (done.output, done.state)  # a call that cannot be read is not collected
            self._calls.append(done)
            if given is not None and before is not None and not all(same(given[n], p) for n, p in before.items()):
                self._calls.overwritten.append(done)
        return done

    @contextmanager
    def _reading(self, call: Call) -> Iterator[None]:
        """Let neither a trace see what we do, nor the model fail where we cannot read what it does."""
        with torch._C.DisableTorchFunction():
            try:
                yield
            except Exception as error:  # whatever a user's cell does, looking at it must not stop it
                self._calls.unread[call.layer.label] = f"{type(error).__name__}: {call.layer.unnamed(error)}"


def _embedding(
    calls: LayerCalls, name: str, leaves: bool, arguments: tuple[Any, dict[str, Any]], run: Callable[[Any], Tensor]
) -> Tensor:
    args, kwargs = arguments
    tokens, vectors = args[0] if args else kwargs.get("input"), run(arguments)
    if isinstance(tokens, Tensor):
        with torch._C.DisableTorchFunction():
            vectors = _leaf(vectors) if leaves else vectors
        calls.embedded.append(Embedded(name, tokens, vectors))
    return vectors


def with_gradient(call: Call) -> Call:
    """Return the call with an input that gradients come back to, where that can be had."""
    x = call.input
    data = x.data if isinstance(x, PackedSequence) else x
    leaf = _leaf(data)
    if leaf is data:
        return call
    return call.fed(x._replace(data=leaf) if isinstance(x, PackedSequence) else leaf)


def _leaf(x: Tensor) -> Tensor:
    if x.requires_grad or not x.is_floating_point() or not torch.is_grad_enabled():
        return x
    if may_be_recomputed(grad_before=False):  # then as many tensors must be saved again, with the input as it was
        return x
    return x.detach().requires_grad_()


def steps_of_rows(call: Call) -> Tensor:
    """Return how many steps of each row are real: (batch,), on the CPU."""
    return torch.full((call.rows,), call.steps) if call.lengths is None else call.lengths


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation: its name, its tensors, and where the user asked for it."""

    name: str
    inputs: tuple[Tensor, ...]
    output: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str  # "model.py:31", "" where unknown
    code: CodeType | None = None  # that this line is in
    instruction: int = -1  # of that code: two operations may stand on one line

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors that it gave."""
        items = self.output if isinstance(self.output, tuple | list) else [self.output]
        return [item for item in items if isinstance(item, Tensor)]

    @property
    def made(self) -> list[Tensor]:
        """The tensors that are its own: `x.contiguous()` may well give x back."""
        given = {id(tensor) for tensor in self.inputs} if self.name in PASSING else ()
        return [out for out in self.outputs if id(out) not in given]


class Operations(list[Operation]):
    """All operations of one call, in order; their tensors stay alive, so that identity means something."""

    def named(self, *names: str) -> list[Operation]:
        """Return the operations with one of these names."""
        return [operation for operation in self if operation.name in names]

    def users(self, tensor: Tensor) -> set[str]:
        """Return the names of the operations that a tensor goes into."""
        return {operation.name for operation in self if any(given is tensor for given in operation.inputs)}

    def makers(self) -> Makers:
        """Return which operation made which tensor."""
        return Makers({id(out): operation for operation in self for out in operation.made})


class Makers(dict[int, Operation]):
    """The operation that made a tensor, by the tensor's id."""

    def source(self, tensor: Tensor) -> Tensor:
        """Return the tensor whose values these are, looking through operations that only rearrange."""
        for _ in range(12):
            operation = self.get(id(tensor))
            if operation is None or operation.name not in PASSING or not operation.inputs:
                break
            tensor = operation.inputs[0]
        return tensor

    def origin(self, tensor: Tensor) -> Operation | None:
        """Return the operation that made a tensor's values."""
        return self.get(id(self.source(tensor)))

    def behind(self, *ends: Tensor) -> Iterator[Tensor]:
        """Yield all tensors that others were made of, these others included, the nearest first."""
        waiting, seen = deque(ends), set[int]()
        while waiting and len(seen) < _MOST:
            tensor = waiting.popleft()
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor
                operation = self.get(id(tensor))
                waiting.extend(() if operation is None else operation.inputs)


class Tracer(TorchFunctionMode):
    """Writes down every operation while it is active."""

    def __init__(self) -> None:
        """Start with nothing written."""
        super().__init__()
        self.trace = Operations()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked, and write it down."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = f"{name[2:5]}:{getattr(func.__self__, '__name__', '')}"
        output = func(*args, **kwargs)
        if name not in _QUIET:
            inputs = tuple(tensors((args, kwargs)).values())
            self.trace.append(Operation(name, inputs, output, args, kwargs, *place()))
        return output


def place() -> tuple[str, CodeType | None, int]:
    """Return the line of the user's code that is being run, `model.py:31`, with the code and its instruction."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _CALLER:
            break  # nothing of the user's stands between the call of the model and this operation
        if is_users(name):
            return f"{FilePath(name).name}:{frame.f_lineno}", frame.f_code, frame.f_lasti
        frame = frame.f_back
    return "", None, -1


def line_of(error: BaseException) -> str:
    """Return the line of the user's code that raised."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if is_users(name):
            found = f"{FilePath(name).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def is_users(file: str) -> bool:
    """Say whether a file is neither torch's nor ours."""
    return not file.startswith((*_OURS, "<frozen"))


def same(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors hold the same values, NaN being equal to NaN."""
    return a.shape == b.shape and bool(_equal(a, b).all())


def change(old: Tensor, new: Tensor) -> Tensor:
    """Return the size of the change of each entry, zero where both are the same NaN or Inf."""
    gap = (new.detach().double() - old.detach().double()).abs()
    return torch.where(_equal(old, new), torch.zeros_like(gap), gap).nan_to_num(nan=float("inf")).cpu()


def eps(tensor: Tensor) -> float:
    """Return the precision of a tensor's numbers."""
    return float(torch.finfo(tensor.dtype).eps)


def gap(a: Outcome, b: Outcome) -> float:
    """Return the largest difference between two calls' results, relative to their size; inf for other shapes."""
    return apart(a.result, b.result)


def apart(a: Any, b: Any) -> float:
    """Return the largest difference between two nested values, relative to their size; inf for other shapes."""
    worst = 0.0
    ours, theirs = ({path: t for path, t in tensors(each).items() if t.numel()} for each in (a, b))
    if ours.keys() != theirs.keys():
        return float("inf")
    for path, old in ours.items():
        new = theirs[path]
        if old.shape != new.shape:
            return float("inf")
        if same(old, new):
            continue
        size = float(old.detach().abs().double().nan_to_num(posinf=0.0, neginf=0.0).max()) or 1.0
        gaps = (old.detach().double() - new.detach().double()).abs().nan_to_num(nan=float("inf"))
        worst = max(worst, float(gaps.max()) / size)
    return worst


def _equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | ((a != a) & (b != b))
