"""One turn of a loop as a cell: the user's own statements, between what is handed in and what is handed on."""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...cells import Adapter, Layer, Spec
from ...state import State, ends, mapped
from .index import LeftAlone
from .loop_code import LoopCode
from .source import made_again


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Shape and dtype of a tensor; where rows are told apart, without them."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return torch.Size(self.shape).numel()


class TensorSlot:
    """Stands for a tensor in a nested value."""

    def __init__(self, number: int) -> None:
        """Stand for the tensor of this number."""
        self.number = number

    def __eq__(self, other: object) -> bool:
        """Say whether both stand for the same tensor."""
        return isinstance(other, TensorSlot) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, eq=False)
class TurnForm:
    """What a turn is given and gives: all that its code depends on."""

    rows: bool  # whether every tensor has the rows of the batch as its first axis
    pieces: dict[str, TensorKind]  # what it takes, by name
    states: list[tuple[str, TensorKind]]  # a name for each part, and what it is
    nested: dict[str, Any]  # carried name -> its value, with slots in place of tensors
    left: dict[str, list[Any]]  # collecting list -> what a turn appends, with slots
    finals: dict[str, Any]  # name -> its value, with slots
    outputs: list[TensorKind]
    handed_on: frozenset[int]  # the slots of what is left, by number, that are states: later turns depend on them
    dtype: torch.dtype  # of all outputs, put together

    def alike(self, other: TurnForm) -> bool:
        """Say whether turns of both take and give the same."""
        mine, theirs = (
            (
                *(form.rows, form.pieces, form.states, form.outputs, form.handed_on, form.dtype),
                spelled_out([form.nested, form.left]),
            )
            for form in (self, other)
        )
        return mine == theirs and spelled_out(self.finals) == spelled_out(other.finals)


def spelled_out(nested: Any) -> Any:
    """Return the types and ends of a nested value, which equal those of no other: 1 is not True here."""
    if isinstance(nested, TensorSlot):
        return TensorSlot, nested.number
    if isinstance(nested, Mapping):
        return type(nested), [(key, spelled_out(value)) for key, value in nested.items()]
    if isinstance(nested, list | tuple):
        return type(nested), [spelled_out(value) for value in nested]
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        fields = dataclasses.fields(nested)
        return type(nested), [(field.name, spelled_out(getattr(nested, field.name))) for field in fields]
    return type(nested), nested


def kind_of(tensor: Tensor, rows: bool) -> TensorKind:
    """Return what a tensor is."""
    return TensorKind(tuple(tensor.shape[1:] if rows else tensor.shape), tensor.dtype)


def slotted(value: Any, first: int, line: int) -> tuple[Any, list[Tensor]]:
    """Return a nested value with slots in place of its tensors, numbered from `first`, and the tensors."""
    found: list[Tensor] = []

    def end(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
            return TensorSlot(first + len(found) - 1)
        if leaf is None or isinstance(leaf, bool | int | float | str):
            return leaf
        raise LeftAlone(f"a {type(leaf).__name__} is handed on from turn to turn, or left behind", line)

    return mapped(value, end), found


class LoopBody(nn.Module):
    """A turn as a module: `(x, state) -> (out, state)`, with all that it reads beside them in its attributes."""

    hs_kinds: tuple[type, ...] = ()

    def surround(self, names: dict[str, Any]) -> None:
        """Have the turn read these values."""
        for name, value in names.items():
            mine, other = (
                (self._modules, self.__dict__) if isinstance(value, nn.Module) else (self.__dict__, self._modules)
            )
            other.pop(attribute(name), None)
            mine[attribute(name)] = value

    def forget(self) -> None:
        """Hold on to none of the values, which may be large."""
        for name in [name for name in self.__dict__ if name.startswith("own_")]:
            self.__dict__[name] = None


def attribute(name: str) -> str:
    """Return where a name of the user's is kept."""
    return f"own_{name}"


class LoopBodyAdapter(Adapter):
    """Reads a body as a cell: its state is a tuple of tensors."""

    kind = "loop"
    state_name = "hs_state"
    steps_first = True

    def __init__(self, form: TurnForm) -> None:
        """Read bodies of one form."""
        self.parts = {name: kind for name, kind in form.states}
        self.rows_first = form.rows

    def spec(self, module: nn.Module) -> Spec:
        """Name the parts."""
        return Spec(parts=tuple(self.parts), sizes={name: kind.size for name, kind in self.parts.items()})

    def initial(self, module: nn.Module, batch: int) -> State:
        """Return zeros, which only fill rows up that nobody looks at."""
        zeros = {n: torch.zeros((batch, *kind.shape), dtype=kind.dtype) for n, kind in self.parts.items()}
        return State(zeros)

    def to_state(self, module: nn.Module, native: Any, *, batch: int | None = None) -> State:
        """Name the parts."""
        return State(dict(zip(self.parts, native, strict=True)))

    def to_native(self, module: nn.Module, state: State, *, batched: bool = True) -> Any:
        """Return the parts in their order."""
        return tuple(state[name] for name in self.parts)

    def split(self, module: nn.Module, result: Any) -> tuple[Any, Any]:
        """A body returns both."""
        return result[0], result[1]


def make_body(code: LoopCode, function: FunctionType, form: TurnForm, names: Sequence[str]) -> Layer:
    """Return a loop's turn as a layer of one step; `names` are those that it reads beside what it is given."""
    lines = [f"{name} = hs_module.{attribute(name)}" for name in names]
    lines += _unpack(code, form)
    for number, (_, kind) in enumerate(form.states):
        lines.append(f"hs_{number} = hs_state[{number}]" + ("" if form.rows else f".view({kind.shape})"))
    types: list[type] = []
    lines += [f"{name} = {_built(value, types)}" for name, value in form.nested.items()]
    lines += [f"{collected.name} = []" for collected in code.collected]
    kinds = [f"hs_kind_{number} = hs_module.hs_kinds[{number}]" for number in range(len(types))]
    head = ast.parse(
        "\n".join(
            ["def forward(hs_module, hs_x, hs_state):", *(f"    {line}" for line in [*kinds, *lines]), "    pass"]
        )
    )
    definition = head.body[0]
    assert isinstance(definition, ast.FunctionDef)
    tail = ast.parse("\n".join(["def forward():", *(f"    {line}" for line in _pack(code, form))])).body[0]
    assert isinstance(tail, ast.FunctionDef)
    definition.body = [*definition.body, *_functional(code), *tail.body]
    for node in ast.walk(definition):
        if isinstance(node, ast.stmt | ast.expr) and not hasattr(node, "lineno"):
            node.lineno = code.line
    made = made_again(function, definition, {})
    made.__defaults__ = made.__kwdefaults__ = None
    body = type("Loop", (LoopBody,), {"forward": made, "hs_kinds": tuple(types)})()
    return Layer("", body, LoopBodyAdapter(form))


def make_turn(code: LoopCode, function: FunctionType, names: Sequence[str]) -> FunctionType:
    """Return a function that runs one turn as it is written; `names` are those of its arguments."""
    given = ", ".join(names)
    left = [f"{collected.name!r}: {collected.name}" for collected in code.collected]
    made = [f"{name!r}: {name}" for name in (*code.carried, *code.finals)]
    lists = "; ".join(f"{collected.name} = []" for collected in code.collected) or "pass"
    head = ast.parse(f"def turn({given}):\n    {lists}\n    return {{{', '.join([*made, *left])}}}").body[0]
    assert isinstance(head, ast.FunctionDef)
    head.body = [*head.body[:-1], *_copied(code.body), head.body[-1]]
    turn = made_again(function, head, {})
    turn.__defaults__ = turn.__kwdefaults__ = None
    return turn


def _functional(code: LoopCode) -> list[ast.stmt]:
    """Return the turn's statements; what is only added to is added anew: nobody else holds what it was before."""
    return [_Anew(code.added).visit(statement) for statement in _copied(code.body)]


def _copied(body: list[ast.stmt]) -> list[ast.stmt]:
    return copy.deepcopy(body)


class _Anew(ast.NodeTransformer):
    def __init__(self, added: set[str]) -> None:
        self.added = added

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name) or node.target.id not in self.added:
            return node
        total = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.fix_missing_locations(ast.copy_location(ast.Assign([node.target], total), node))


def _unpack(code: LoopCode, form: TurnForm) -> list[str]:
    """Return how pieces are taken out of the one tensor that a step is given."""
    if not form.pieces:
        return []
    if form.rows and len(form.pieces) == 1:
        return [f"{name} = hs_x" for name in form.pieces]
    lines, start, dtype = [], 0, packed_dtype(form.pieces.values())
    for name, kind in form.pieces.items():
        shape = (-1, *kind.shape) if form.rows else kind.shape
        cast = "" if kind.dtype == dtype else f".to({_dtype(kind.dtype)})"
        lines.append(f"{name} = hs_x[:, {start}:{start + kind.size}].reshape({shape}){cast}")
        start += kind.size
    return lines


def packed_dtype(kinds: Iterable[TensorKind]) -> torch.dtype:
    """Return the dtype that pieces are put together in, each of which it holds exactly."""
    found = {kind.dtype for kind in kinds}
    floats = [dtype for dtype in found if dtype.is_floating_point]
    if len(floats) > 1 or any(dtype.is_complex for dtype in found):
        raise LeftAlone("a turn takes pieces, or leaves values, of several dtypes", 0)
    if floats and found - {floats[0], torch.bool}:
        raise LeftAlone("a turn takes pieces, or leaves values, of whole and of other numbers", 0)
    if floats:
        return floats[0]
    if len(found) > 1:
        raise LeftAlone("a turn takes pieces, or leaves values, of several dtypes", 0)
    return next(iter(found))


def _pack(code: LoopCode, form: TurnForm) -> list[str]:
    """Return how the outputs of a turn become one tensor, and its state a tuple."""
    outputs: list[str] = []
    for collected in code.collected:
        for place, value in enumerate(form.left[collected.name]):
            outputs += [
                f"{collected.name}[{place}]{_path(path, value)}"
                for path, end in ends(value)
                if isinstance(end, TensorSlot)
            ]
    for name, value in form.finals.items():
        outputs += [f"{name}{_path(path, value)}" for path, end in ends(value) if isinstance(end, TensorSlot)]
    states, lines = [], []
    for name, value in form.nested.items():
        for path, end in ends(value):
            spelled = f"{name}{_path(path, value)}"
            if isinstance(end, TensorSlot):
                states.append(spelled)
            else:
                differs = (
                    f"{spelled} is not {end!r}" if end is None or isinstance(end, bool) else f"{spelled} != {end!r}"
                )
                said = f"{name!r}, which is no tensor, changes from turn to turn"
                lines.append(f"if {differs}: raise RuntimeError({said!r})")
    for collected in code.collected:
        count = len(form.left[collected.name])
        lines.append(f"if len({collected.name}) != {count}: raise RuntimeError('turns leave more or less behind')")
    flat = ".flatten(1)" if form.rows else ".reshape(1, -1)"
    if form.rows and len(outputs) == 1:
        out = outputs[0]
    elif outputs:
        cast = [f".to({_dtype(form.dtype)})" if kind.dtype != form.dtype else "" for kind in form.outputs]
        flats = [".unsqueeze(1)" if form.rows and not kind.shape else flat for kind in form.outputs]
        parts = ", ".join(f"{o}{f}{c}" for o, f, c in zip(outputs, flats, cast, strict=True))
        out = f"torch_cat([{parts}], 1)" if len(outputs) > 1 else parts
        lines = ["torch_cat = hs_module.hs_cat", *lines]
    else:
        out = "hs_0"
    if not form.rows:
        states = [f"{state}.unsqueeze(0)" for state in states]
        out = "hs_state[0]" if not outputs else out
    return [*lines, f"return {out}, ({', '.join(states)},)"]


def _dtype(dtype: torch.dtype) -> str:
    return f"hs_module.hs_{str(dtype).replace('.', '_')}"


def _path(path: tuple[Any, ...], value: Any) -> str:
    """Return how an end of a nested value is reached."""
    spelled = ""
    for key in path:
        if dataclasses.is_dataclass(value):
            spelled, value = f"{spelled}.{key}", getattr(value, key)
        else:
            spelled, value = f"{spelled}[{key!r}]", value[key]
    return spelled


def _built(value: Any, types: list[type]) -> str:
    """Return an expression that builds a nested value from the parts of a state."""
    if isinstance(value, TensorSlot):
        return f"hs_{value.number}"
    if isinstance(value, dict) and type(value) is dict:
        return "{" + ", ".join(f"{key!r}: {_built(inner, types)}" for key, inner in value.items()) + "}"
    if type(value) in (tuple, list):
        inner = ", ".join(_built(each, types) for each in value)
        return (
            f"({inner},)" if type(value) is tuple and value else f"({inner})" if type(value) is tuple else f"[{inner}]"
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        types.append(type(value))
        number = len(types) - 1
        return f"hs_kind_{number}({', '.join(_built(each, types) for each in value)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        types.append(type(value))
        number = len(types) - 1
        fields = [f"{f.name}={_built(getattr(value, f.name), types)}" for f in dataclasses.fields(value) if f.init]
        return f"hs_kind_{number}({', '.join(fields)})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise LeftAlone(f"a {type(value).__name__} is handed on from turn to turn", 0)


# By these names the written code finds what it needs of torch: as attributes, since globals are the user's own.
for _each in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.int32):
    setattr(LoopBody, f"hs_{str(_each).replace('.', '_')}", _each)
LoopBody.hs_cat = staticmethod(torch.cat)  # type: ignore[attr-defined]
