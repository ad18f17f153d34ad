"""Torch's operations as C: element by element, or as another view of the same memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .values import Place, Unsupported, dense, shape_of

aten = torch.ops.aten


def _call(single: str, double: str) -> Callable[..., str]:
    return lambda t, *a: f"{single if t == 'float' else double}({', '.join(a)})"


def _of(text: str) -> Callable[..., str]:
    return lambda t, *a: text.format(*a, t=t)


def _floating(write: Callable[..., str]) -> Callable[..., str]:
    """Leave whole numbers to torch, which has rules of its own for them."""

    def written(t: str, *a: str) -> str:
        if t not in ("float", "double"):
            raise Unsupported("whole numbers are divided or raised to a power")
        return write(t, *a)

    return written


def _rounded(single: str, double: str) -> Callable[..., str]:
    """Round; whole numbers are what they are."""
    return lambda t, a: f"{single if t == 'float' else double}({a})" if t in ("float", "double") else a


def _add(sign: str) -> Callable[..., str]:
    return lambda t, a, b, alpha="": f"({a} {sign} {b})" if not alpha else f"({a} {sign} {alpha} * {b})"


def _back(t: str, a: str, b: str, alpha: str = "") -> str:
    if alpha:  # torch rounds once or twice, by dtypes
        raise Unsupported("a difference is taken from a multiple")
    return f"({b} - {a})"


def _bound(sign: str) -> Callable[..., str]:
    """Keep to one side of a bound; one that is no number makes everything so."""
    return lambda t, a, bound: f"({bound} != {bound} ? {bound} : {a} {sign} {bound} ? {bound} : {a})"


# operation -> C expression of its arguments, which all come in the type t that is computed in
POINTWISE: dict[Any, Callable[..., str]] = {
    aten.add.Tensor: _add("+"),
    aten.add.Scalar: _add("+"),
    aten.sub.Tensor: _add("-"),
    aten.sub.Scalar: _add("-"),
    aten.rsub.Scalar: _back,
    aten.rsub.Tensor: _back,
    aten.mul.Tensor: _of("({0} * {1})"),
    aten.mul.Scalar: _of("({0} * {1})"),
    aten.div.Tensor: _of("({0} / {1})"),
    aten.div.Scalar: _of("({0} / {1})"),
    aten.neg.default: _of("(-{0})"),
    aten.reciprocal.default: _of("(({t})1 / {0})"),
    aten.abs.default: lambda t, a: (
        f"{'fabsf' if t == 'float' else 'fabs'}({a})" if t in ("float", "double") else f"({a} < 0 ? -{a} : {a})"
    ),
    aten.exp.default: _call("hs_expf", "exp"),
    aten.log.default: _call("logf", "log"),
    aten.log1p.default: _call("log1pf", "log1p"),
    aten.expm1.default: _call("expm1f", "expm1"),
    aten.sqrt.default: _call("sqrtf", "sqrt"),
    aten.rsqrt.default: lambda t, a: f"(({t})1 / {'sqrtf' if t == 'float' else 'sqrt'}({a}))",
    aten.sin.default: _call("sinf", "sin"),
    aten.tan.default: _call("tanf", "tan"),
    aten.asin.default: _call("asinf", "asin"),
    aten.acos.default: _call("acosf", "acos"),
    aten.atan.default: _call("atanf", "atan"),
    aten.atan2.default: _call("atan2f", "atan2"),
    aten.sinh.default: _call("sinhf", "sinh"),
    aten.cosh.default: _call("coshf", "cosh"),
    aten.log2.default: _call("log2f", "log2"),
    aten.log10.default: _call("log10f", "log10"),
    aten.exp2.default: _call("exp2f", "exp2"),
    aten.floor.default: _rounded("floorf", "floor"),
    aten.ceil.default: _rounded("ceilf", "ceil"),
    aten.trunc.default: _rounded("truncf", "trunc"),
    aten.round.default: _rounded("rintf", "rint"),
    aten.fmod.Scalar: _floating(lambda t, a, b: _rest(t, a, b)),
    aten.pow.Tensor_Tensor: _floating(_call("powf", "pow")),
    aten.isnan.default: _of("({0} != {0})"),
    aten.cos.default: _call("cosf", "cos"),
    aten.erf.default: _call("erff", "erf"),
    aten.tanh.default: _call("hs_tanhf", "tanh"),
    aten.sigmoid.default: _call("hs_sigmoidf", "hs_sigmoid"),
    aten.relu.default: _of("({0} < 0 ? 0 : {0})"),
    aten.sign.default: _of("(({t})(({0} > 0) - ({0} < 0)))"),
    aten.sgn.default: _of("(({t})(({0} > 0) - ({0} < 0)))"),
    aten.pow.Tensor_Scalar: _floating(lambda t, a, b: _power(t, a, b)),
    aten.maximum.default: _of("({0} != {0} ? {0} : {1} != {1} ? {1} : {0} > {1} ? {0} : {1})"),
    aten.minimum.default: _of("({0} != {0} ? {0} : {1} != {1} ? {1} : {0} < {1} ? {0} : {1})"),
    aten.where.self: _of("({0} ? {1} : {2})"),
    aten.gt.Tensor: _of("({0} > {1})"),
    aten.gt.Scalar: _of("({0} > {1})"),
    aten.ge.Tensor: _of("({0} >= {1})"),
    aten.ge.Scalar: _of("({0} >= {1})"),
    aten.lt.Tensor: _of("({0} < {1})"),
    aten.lt.Scalar: _of("({0} < {1})"),
    aten.le.Tensor: _of("({0} <= {1})"),
    aten.le.Scalar: _of("({0} <= {1})"),
    aten.eq.Tensor: _of("({0} == {1})"),
    aten.eq.Scalar: _of("({0} == {1})"),
    aten.ne.Tensor: _of("({0} != {1})"),
    aten.ne.Scalar: _of("({0} != {1})"),
    aten.logical_not.default: _of("(!{0})"),
    aten.logical_and.default: _of("({0} && {1})"),
    aten.logical_or.default: _of("({0} || {1})"),
    aten.bitwise_not.default: lambda t, a: f"(!{a})" if t == "uint8_t" else f"(~{a})",
    aten.bitwise_and.Tensor: _of("({0} & {1})"),
    aten.bitwise_or.Tensor: _of("({0} | {1})"),
    aten._to_copy.default: _of("{0}"),
    aten.clone.default: _of("{0}"),
    aten.clamp.default: lambda t, a, low="", high="": _clamp(t, a, low, high),
    aten.clamp_min.default: _bound("<"),
    aten.clamp_max.default: _bound(">"),
    aten.masked_fill.Scalar: _of("({1} ? {2} : {0})"),
    aten.masked_fill.Tensor: _of("({1} ? {2} : {0})"),
}

# Operations that make a tensor of one number.
FILLED: dict[Any, Callable[[fx.Node], Any]] = {
    aten.full.default: lambda node: node.args[1],
    aten.full_like.default: lambda node: node.args[1],
    aten.fill.Scalar: lambda node: node.args[1],
    aten.zeros.default: lambda node: 0,
    aten.zeros_like.default: lambda node: 0,
    aten.new_zeros.default: lambda node: 0,
    aten.empty_like.default: lambda node: 0,  # of which nobody may expect anything
    aten.new_empty.default: lambda node: 0,
    aten.ones.default: lambda node: 1,
    aten.ones_like.default: lambda node: 1,
    aten.new_ones.default: lambda node: 1,
    aten.new_full.default: lambda node: node.args[2],
    aten.scalar_tensor.default: lambda node: node.args[0],
}

_COMPARED = {
    *(aten.gt.Tensor, aten.gt.Scalar, aten.ge.Tensor, aten.ge.Scalar, aten.lt.Tensor, aten.lt.Scalar),
    *(aten.le.Tensor, aten.le.Scalar, aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar),
}
_TRUTHS = {aten.logical_not.default, aten.logical_and.default, aten.logical_or.default}
_SMALLEST = 1e-6  # numbers by which a remainder is taken; of far smaller ones torch itself finds none
_CONDITIONS = {aten.where.self: 0, aten.masked_fill.Scalar: 1, aten.masked_fill.Tensor: 1}  # which argument is one


def literal(value: Any, ctype: str) -> str:
    """Return a Python number as C."""
    if ctype == "uint8_t":
        return "1" if value else "0"
    if ctype == "int64_t":
        whole = int(value)
        if not -(2**63) < whole < 2**63:
            raise Unsupported(f"{value} is beyond the whole numbers of C")
        return f"((int64_t){whole}LL)"
    number = float(value)
    if math.isnan(number):
        return f"(({ctype})NAN)"
    if math.isinf(number):
        return f"(({ctype}){'-' if number < 0 else ''}INFINITY)"
    return f"{number!r}f" if ctype == "float" else f"{number!r}"


def expression(
    node: fx.Node,
    read: Callable[[fx.Node], str],
    ctype: Callable[[torch.dtype], str],
    round_to: Callable[[str, torch.dtype], str] = lambda text, _: text,
) -> str:
    """Return one element of an element-wise operation as C, given how to read a node and the C type of a dtype.

    As torch does, arguments are converted to the dtype that is computed in, and the result to its own.
    """
    computed = _computed_in(node)
    inside, result = ctype(computed), ctype(node.meta["val"].dtype)
    values: list[Any] = list(node.args)[: 1 if node.target in (aten._to_copy.default, aten.clone.default) else None]
    condition = _CONDITIONS.get(node.target)  # type: ignore[call-overload]
    texts = []
    for place, value in enumerate(values):
        kind = "uint8_t" if place == condition else inside
        if isinstance(value, fx.Node):
            text = converted(read(value), ctype(value.meta["val"].dtype), kind)
            texts.append(round_to(text, computed) if _narrows(value.meta["val"].dtype, computed) else text)
        else:
            texts.append("" if value is None else literal(value, kind))
    if node.kwargs.get("alpha", 1) != 1:
        texts.append(literal(node.kwargs["alpha"], "int64_t" if inside == "uint8_t" else inside))
    if node.target in _COMPARED or node.target is aten.isnan.default or node.target in _TRUTHS:
        return f"((uint8_t){POINTWISE[node.target](inside, *texts)})"
    if inside == "uint8_t":  # sums and products of truths are numbers, until they are truths again
        return converted(POINTWISE[node.target](inside, *texts), "int64_t", result)
    return converted(POINTWISE[node.target](inside, *texts), inside, result)


def converted(text: str, kind: str, into: str) -> str:
    """Return an expression of one C type as another; all that is not zero is true."""
    if kind == into:
        return text
    return f"((uint8_t)({text} != 0))" if into == "uint8_t" else f"(({into}){text})"


def _narrows(dtype: torch.dtype, into: torch.dtype) -> bool:
    """Say whether a conversion leaves less than the C type could hold."""
    return into in (torch.float16, torch.bfloat16) and dtype not in (into, torch.bool)


def _computed_in(node: fx.Node) -> torch.dtype:
    result: torch.dtype = node.meta["val"].dtype
    if node.target in _TRUTHS:
        return torch.bool
    if node.target is aten.isnan.default:
        return node.all_input_nodes[0].meta["val"].dtype  # type: ignore[no-any-return]
    if node.target in _COMPARED:
        pair: list[Any] = [value.meta["val"] if isinstance(value, fx.Node) else value for value in node.args[:2]]
        return torch.result_type(*pair)
    return result


def _power(t: str, base: str, exponent: str) -> str:
    root = f"{'sqrtf' if t == 'float' else 'sqrt'}({base})"
    special = {
        *((2.0, f"({base} * {base})"), (3.0, f"({base} * {base} * {base})"), (0.5, root)),
        *((-1.0, f"(({t})1 / {base})"), (-2.0, f"(({t})1 / ({base} * {base}))"), (-0.5, f"(({t})1 / {root})")),
    }
    known = {literal(number, t): text for number, text in special}
    return known.get(exponent) or f"{'powf' if t == 'float' else 'pow'}({base}, {exponent})"


def _rest(t: str, a: str, b: str) -> str:
    if not abs(float(b.rstrip("f") if b[0] != "(" else "nan")) >= _SMALLEST:
        raise Unsupported("a remainder is taken by a number that is very small, or none")
    return f"{'fmodf' if t == 'float' else 'fmod'}({a}, {b})"


def _clamp(t: str, a: str, low: str, high: str) -> str:
    kept = _bound("<")(t, a, low) if low else a
    return _bound(">")(t, kept, high) if high else kept


def view(node: fx.Node, place: Place) -> Place | None:
    """Return the memory that a viewing operation shows, or None where it is no view of this memory."""
    viewer = _VIEWS.get(node.target)
    return None if viewer is None else viewer(node, place)


def is_view(node: fx.Node) -> bool:
    """Say whether an operation computes nothing."""
    return node.target in _VIEWS


def _permuted(place: Place, order: Sequence[int]) -> Place:
    return place.moved([place.shape[axis] for axis in order], [place.strides[axis] for axis in order])


def _transpose(node: fx.Node, place: Place) -> Place:
    order = list(range(len(place.shape)))
    if node.target is aten.t.default:
        return _permuted(place, order[::-1])
    one, other = (int(axis) % len(order) for axis in node.args[1:3])  # type: ignore[arg-type]
    order[one], order[other] = order[other], order[one]
    return _permuted(place, order)


def _permute(node: fx.Node, place: Place) -> Place:
    order: Any = node.args[1]
    return _permuted(place, [axis % len(place.shape) for axis in order])


def _reshape(node: fx.Node, place: Place) -> Place | None:
    shape = shape_of(node)
    return place.moved(shape, dense(shape)) if place.contiguous else None


def _unsqueeze(node: fx.Node, place: Place) -> Place:
    axis = int(node.args[1]) % (len(place.shape) + 1)  # type: ignore[arg-type]
    shape, strides = list(place.shape), list(place.strides)
    shape.insert(axis, 1)
    strides.insert(axis, 0)
    return place.moved(shape, strides)


def _squeeze(node: fx.Node, place: Place) -> Place:
    target = len(place.shape)
    given: Any = range(target) if len(node.args) < 2 else node.args[1]
    dims: list[int] = [given] if isinstance(given, int) else list(given)
    gone = {dim % target for dim in dims if place.shape[dim] == 1}
    kept = [axis for axis in range(target) if axis not in gone]
    return place.moved([place.shape[axis] for axis in kept], [place.strides[axis] for axis in kept])


def _expand(node: fx.Node, place: Place) -> Place:
    shape = shape_of(node)
    shift = len(shape) - len(place.shape)
    strides = [0] * shift + [
        0 if size == 1 else stride for size, stride in zip(place.shape, place.strides, strict=True)
    ]
    return place.moved(shape, strides)


def _slice(node: fx.Node, place: Place) -> Place:
    rest: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start, end, step = rest
    axis, size = int(dim) % len(place.shape), place.shape[int(dim)]
    first, last, jump = slice(start, end, step).indices(size)
    shape, strides = list(place.shape), list(place.strides)
    shape[axis], strides[axis] = len(range(first, last, jump)), strides[axis] * jump
    return place.moved(shape, strides, first * place.strides[axis])


def _select(node: fx.Node, place: Place) -> Place:
    axis, index = int(node.args[1]) % len(place.shape), int(node.args[2])  # type: ignore[arg-type]
    shape, strides = list(place.shape), list(place.strides)
    offset = (index % shape[axis]) * strides[axis]
    del shape[axis], strides[axis]
    return place.moved(shape, strides, offset)


def _piece(node: fx.Node, place: Place) -> Place:
    source, number = node.args
    assert isinstance(source, fx.Node)
    dim = int(source.args[2]) if len(source.args) > 2 else int(source.kwargs.get("dim", 0))  # type: ignore[arg-type]
    axis = dim % len(place.shape)
    sizes = [value.shape[axis] for value in source.meta["val"]]
    first = sum(sizes[: int(number)])  # type: ignore[arg-type]
    shape = list(place.shape)
    shape[axis] = sizes[int(number)]  # type: ignore[arg-type]
    return place.moved(shape, place.strides, int(first) * place.strides[axis])


SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_chunk.default}
_VIEWS: dict[Any, Callable[[fx.Node, Place], Place | None]] = {
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.squeeze.default: _squeeze,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    operator.getitem: _piece,
}
