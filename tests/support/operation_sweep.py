"""Every operation that the compilers know, on every dtype and at the edges of its numbers, against torch.

The cases are generated from the table of operations and from torch's own schemas: a new line in the table is swept too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hiddenstate.unrolling.decompositions import decompositions
from hiddenstate.unrolling.native import Unsupported
from hiddenstate.unrolling.native.operations import POINTWISE
from hiddenstate.unrolling.pieces import Piece
from hiddenstate.unrolling.scan import Loop

aten = torch.ops.aten

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.float64)
WHOLE = (torch.int64, torch.bool)
_INF, _NAN = float("inf"), float("nan")
_EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, 2.0, 3.0, -3.0, 10.0, 127.0, 128.0, 255.0, 256.0, -256.0]
_EDGES += [88.5, -88.5, 88.73, 0.3, -0.7, 1e-8, 1e-20, 1e20, _INF, -_INF, _NAN]
EDGES: dict[torch.dtype, list[Any]] = {
    torch.float32: [*_EDGES, 89.5, -89.5, -104.0, 1e-40, -1e-45, 3.4e38, -3.4e38, 1e-37, 16777217.0],
    torch.float64: [*_EDGES, 709.5, -709.5, -745.0, 1e-310, 1.7e308, -1.7e308],
    torch.bfloat16: [*_EDGES, 1.6e38],
    torch.float16: [*(edge for edge in _EDGES if not 7e4 < abs(edge) < _INF), 65504.0, 6e-8],
    torch.int64: [0, 1, -1, 2, 3, -3, 7, 63, 127, 128, 255, 256, -256, 65536, 2**31, -(2**31), 2**53 + 1, 2**62],
    torch.bool: [False, True],
}
_NUMBERS: list[Any] = [0, -0.0, 1, 2, 3, 0.5, -1.5, -2, 256, True, _INF, -_INF, _NAN, 2**53 + 1]
_REDUCED = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)
_JOINED = (aten.cat.default, aten.stack.default)


@dataclass(frozen=True)
class Case:
    """One operation on tensors of some dtypes, with its other arguments."""

    operation: Any
    dtypes: tuple[torch.dtype, ...]
    rest: tuple[tuple[str, Any], ...] = ()  # arguments that are no tensors, by name

    def __str__(self) -> str:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        rest = "".join(f", {name}={value}" for name, value in self.rest)
        return f"{str(self.operation).removeprefix('aten.')}({kinds}{rest})"

    def tensors(self) -> list[Tensor]:
        """All combinations of edge values, one axis of a (rows, units) tensor for each of two arguments."""
        found = [torch.tensor(EDGES[dtype], dtype=dtype) for dtype in self.dtypes]
        if len(found) == 1:
            return [found[0].repeat(2, 1)]
        pairs = len(found) == 2 or self.operation is aten.masked_fill.Tensor
        shape = (len(found[0]), len(found[1])) if pairs else (len(found[1]), len(found[2]))
        turned = [found[0].unsqueeze(1), found[1].unsqueeze(0)] if len(found) == 2 else None
        if turned is None:  # a condition, and all pairs of what it chooses from
            condition = found[0][torch.arange(shape[0] * shape[1]) % len(found[0])].view(shape)
            turned = [condition, found[1].unsqueeze(1), found[2].unsqueeze(0)]
        if self.operation is aten.masked_fill.Tensor:  # whose value is a single number
            return [*(part.expand(shape).contiguous() for part in (found[0][:, None], found[1][None])), found[2][1]]
        return [part.expand(shape).contiguous() for part in turned]

    def __call__(self, *tensors: Tensor) -> Tensor:
        if self.operation in _JOINED:
            return self.operation(list(tensors), 1)
        rest, waiting, given = dict(self.rest), iter(tensors), []
        for argument in self.operation._schema.arguments:
            if "Tensor" in str(argument.type):
                given.append(next(waiting))
            elif not argument.kwarg_only and argument.name in rest:
                given.append(rest.pop(argument.name))
        return self.operation(*given, **rest)


def cases(floats: tuple[torch.dtype, ...] = FLOATS) -> Iterator[Case]:
    """Every operation of the table on every dtype that torch takes."""
    dtypes = (*floats, *WHOLE)
    for operation in POINTWISE:
        for case in _pointwise(operation, dtypes):
            if _taken(case, dtypes):
                yield case
    for operation in _REDUCED:
        for dtype, dim in itertools.product(dtypes, (0, 1, -1)):
            case = Case(operation, (dtype,), (("dim", [dim]), ("keepdim", dim == 1)))
            if _taken(case, dtypes):
                yield case
    for operation, pair in itertools.product(_JOINED, itertools.product(dtypes, dtypes)):
        case = Case(operation, pair)
        if _taken(case, dtypes):
            yield case


def _pointwise(operation: Any, dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    schema = operation._schema.arguments
    count = sum("Tensor" in str(argument.type) for argument in schema)
    numbers = [argument for argument in schema if "number" in str(argument.type).lower()]
    choices: list[list[tuple[str, Any]]] = []
    for argument in numbers:
        if argument.name == "alpha":
            choices.append([("alpha", 1), ("alpha", 2), ("alpha", -0.5)])
        else:
            choices.append([(argument.name, number) for number in _NUMBERS])
            if "Optional" in str(argument.type):
                choices[-1].append((argument.name, None))
    if operation is aten._to_copy.default:
        choices = [[("dtype", dtype) for dtype in dtypes]]
    first = [(torch.bool,)] if operation in (aten.where.self,) else [dtypes]
    if operation in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        kinds = [dtypes, (torch.bool,), dtypes][:count]
    else:
        kinds = [*first, *[dtypes] * (count - 1)]
    for pair in itertools.product(*kinds):
        for rest in itertools.product(*choices):
            yield Case(operation, pair, rest)


def _taken(case: Case, dtypes: tuple[torch.dtype, ...]) -> bool:
    if any(dtype in HALVES for dtype in case.dtypes) and any(value == 2**53 + 1 for _, value in case.rest):
        return False  # beyond a short float: torch rounds it first on one device, and not on the other
    try:
        return case(*case.tensors()).dtype in dtypes
    except (RuntimeError, TypeError, NotImplementedError, IndexError):
        return False


def body_of(function: Callable[..., Any], tensors: list[Tensor]) -> Loop:
    """A loop of one operation or several: its arguments come with every step, and all results are kept."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes).graph
    given = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(given[0]):
        state = graph.placeholder("state")
    with mode:
        state.meta["val"] = torch.zeros(len(tensors[0]), 8 if len(tensors[0]) else 1)
    output = next(node for node in graph.nodes if node.op == "output")
    results = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
    kept = [result for result in results if isinstance(result, fx.Node)]
    output.args = ((state, *kept),)
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    piece = Piece(fx.GraphModule({}, graph), (state, *given), (state, *kept))
    return Loop(piece, 1, (), tuple(given), tuple(kept), (False,))


def together(functions: list[Callable[..., list[Tensor]]], counts: list[int]) -> Callable[..., list[Tensor]]:
    """Several functions as one, so that a compiler is started once for all of them."""

    def every(*tensors: Tensor) -> list[Tensor]:
        waiting = iter(tensors)
        return [
            value for f, n in zip(functions, counts, strict=True) for value in f(*(next(waiting) for _ in range(n)))
        ]

    return every


def with_gradients(case: Case) -> Callable[..., list[Tensor]]:
    """The operation with its vjp, as a step's trace has it."""

    def both(*tensors: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
        with torch.enable_grad():
            out = case(*leaves)
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        if not out.requires_grad:
            return [out]
        found = torch.autograd.grad(out, asked, torch.full_like(out, 0.75), allow_unused=True)
        return [out, *(grad for grad in found if grad is not None)]

    return both


@dataclass(frozen=True)
class Item:
    """A case with its tensors, and what torch makes of them."""

    case: Case
    function: Callable[..., list[Tensor]]
    tensors: list[Tensor]
    expected: list[Tensor]

    @classmethod
    def of(cls, case: Case, *, gradients: bool) -> Item | None:
        """None where torch has nothing to say, or no gradient."""
        function = with_gradients(case) if gradients else lambda *tensors: [case(*tensors)]
        tensors = case.tensors()
        try:
            expected = function(*tensors)
        except RuntimeError:
            return None
        return None if gradients and len(expected) == 1 else cls(case, function, tensors, expected)

    def compiled(self, make: Callable[[Loop], Any]) -> list[Tensor]:
        """What written code makes of it."""
        ((_, found),) = compiled_results([self], make, gradients=False)
        return found


def compiled_results(
    items: list[Item], make: Callable[[Loop], Any], *, gradients: bool
) -> list[tuple[Item, list[Tensor]]]:
    """What written code makes of items, all in one loop where that can be; those without code are left out."""
    tensors = [tensor for item in items for tensor in item.tensors]
    if not tensors:
        return []
    function = together([item.function for item in items], [len(item.tensors) for item in items])
    try:
        if gradients:
            function = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(*tensors)
        runner = make(body_of(function, tensors))
    except Unsupported:
        if len(items) == 1 and not gradients:
            raise
        middle = len(items) // 2
        if not middle:
            return []
        halves = (items[:middle], items[middle:])
        return [pair for half in halves for pair in _or_nothing(half, make, gradients=gradients)]
    ran = runner([torch.zeros(len(tensors[0]), 8)], [], [tensor.unsqueeze(0) for tensor in tensors], steps=1)
    kept = iter(ran.kept)
    return [(item, [next(kept)[0] for _ in item.expected]) for item in items]


def _or_nothing(items: list[Item], make: Callable[[Loop], Any], *, gradients: bool) -> list[tuple[Item, list[Tensor]]]:
    try:
        return compiled_results(items, make, gradients=gradients)
    except Unsupported:
        return []


def difference(ours: Tensor, theirs: Tensor, precision: float, *, again: Item | None = None) -> str:
    """What tells two results apart beyond rounding, "" where nothing does.

    Torch itself may give two answers, since it has other code for many numbers than for one: either is right.
    """
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
    wrong = _apart(ours, theirs, precision)
    for place in wrong.nonzero().tolist() if again is not None else []:
        alone = _answers(again, tuple(place), theirs.dtype) if _alike(again) else []
        if any(
            value.numel() == 1 and not bool(_apart(ours[tuple(place)].view(1, 1), value, precision)) for value in alone
        ):
            wrong[tuple(place)] = False
    if not bool(wrong.any()):
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    seen = f"at {place} {ours[place].item()!r}, not {theirs[place].item()!r}"
    return f"{int(wrong.sum())} of {wrong.numel()} wrong; {seen}"


def _answers(item: Item, place: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """What torch makes of the numbers at one place alone; of short floats also as float32 makes it."""
    alone = [tensor[place].view(1, 1) for tensor in item.tensors]
    found = item.function(*alone)
    if dtype in HALVES:
        found = [*found, *item.function(*(part.float() if part.dtype in HALVES else part for part in alone))]
    return [value.to(dtype) for value in found]


def _alike(item: Item) -> bool:
    return all(tensor.shape == item.expected[0].shape for tensor in item.tensors)


def _apart(ours: Tensor, theirs: Tensor, precision: float) -> Tensor:
    if not theirs.is_floating_point():
        wrong = ours != theirs
        return wrong | (ours.view(torch.uint8) > 1) if theirs.dtype == torch.bool else wrong
    one, other = ours.double(), theirs.double()
    tiny = torch.finfo(theirs.dtype).tiny
    wrong = (one - other).abs() > precision * (other.abs() + tiny)
    wrong = torch.where(other.isfinite() & one.isfinite(), wrong, (one != other) & ~(one.isnan() & other.isnan()))
    return wrong | ((other == 0) & (one == 0) & (one.signbit() != other.signbit()))
