"""Torch's operations as C: element by element, or as another view of the same memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .values import Place, dense, shape_of

aten = torch.ops.aten


def _call(single: str, double: str) -> Callable[..., str]:
    return lambda t, *a: f"{single if t == 'float' else double}({', '.join(a)})"


def _of(text: str) -> Callable[..., str]:
    return lambda t, *a: text.format(*a, t=t)


def _add(sign: str) -> Callable[..., str]:
    return lambda t, a, b, alpha="1": f"({a} {sign} {b})" if alpha == "1" else f"({a} {sign} ({t}){alpha} * {b})"


# operation -> C expression of its arguments; t is the C type of the result
POINTWISE: dict[Any, Callable[..., str]] = {
    aten.add.Tensor: _add("+"),
    aten.add.Scalar: _add("+"),
    aten.sub.Tensor: _add("-"),
    aten.sub.Scalar: _add("-"),
    aten.rsub.Scalar: lambda t, a, b, alpha="1": f"({b} - {a})" if alpha == "1" else f"({b} - ({t}){alpha} * {a})",
    aten.rsub.Tensor: lambda t, a, b, alpha="1": f"({b} - {a})" if alpha == "1" else f"({b} - ({t}){alpha} * {a})",
    aten.mul.Tensor: _of("({0} * {1})"),
    aten.mul.Scalar: _of("({0} * {1})"),
    aten.div.Tensor: _of("(({t}){0} / ({t}){1})"),
    aten.div.Scalar: _of("(({t}){0} / ({t}){1})"),
    aten.neg.default: _of("(-{0})"),
    aten.reciprocal.default: _of("(({t})1 / {0})"),
    aten.abs.default: _call("fabsf", "fabs"),
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
    aten.floor.default: _call("floorf", "floor"),
    aten.ceil.default: _call("ceilf", "ceil"),
    aten.trunc.default: _call("truncf", "trunc"),
    aten.round.default: _call("rintf", "rint"),
    aten.fmod.Scalar: _call("fmodf", "fmod"),
    aten.fmod.Tensor: _call("fmodf", "fmod"),
    aten.pow.Tensor_Tensor: _call("powf", "pow"),
    aten.isnan.default: _of("({0} != {0})"),
    aten.cos.default: _call("cosf", "cos"),
    aten.erf.default: _call("erff", "erf"),
    aten.tanh.default: _call("hs_tanhf", "tanh"),
    aten.sigmoid.default: _call("hs_sigmoidf", "hs_sigmoid"),
    aten.relu.default: _of("({0} < 0 ? 0 : {0})"),
    aten.sign.default: _of("(({t})(({0} > 0) - ({0} < 0)))"),
    aten.sgn.default: _of("(({t})(({0} > 0) - ({0} < 0)))"),
    aten.pow.Tensor_Scalar: lambda t, a, b: _power(t, a, b),
    aten.maximum.default: _of("({0} != {0} ? {0} : {1} != {1} ? {1} : {0} > {1} ? {0} : {1})"),
    aten.minimum.default: _of("({0} != {0} ? {0} : {1} != {1} ? {1} : {0} < {1} ? {0} : {1})"),
    aten.where.self: _of("({0} ? ({t}){1} : ({t}){2})"),
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
    aten._to_copy.default: _of("(({t}){0})"),
    aten.clone.default: _of("{0}"),
    aten.clamp.default: lambda t, a, low="None", high="None": _clamp(a, low, high),
    aten.clamp_min.default: _of("({0} < {1} ? {1} : {0})"),
    aten.clamp_max.default: _of("({0} > {1} ? {1} : {0})"),
    aten.masked_fill.Scalar: _of("({1} ? ({t}){2} : {0})"),
    aten.masked_fill.Tensor: _of("({1} ? ({t}){2} : {0})"),
}

# Operations that make a tensor of one number.
FILLED: dict[Any, Callable[[fx.Node], float]] = {
    aten.full.default: lambda node: float(node.args[1]),  # type: ignore[arg-type]
    aten.full_like.default: lambda node: float(node.args[1]),  # type: ignore[arg-type]
    aten.zeros.default: lambda node: 0.0,
    aten.zeros_like.default: lambda node: 0.0,
    aten.new_zeros.default: lambda node: 0.0,
    aten.ones.default: lambda node: 1.0,
    aten.ones_like.default: lambda node: 1.0,
    aten.new_ones.default: lambda node: 1.0,
    aten.new_full.default: lambda node: float(node.args[2]),  # type: ignore[arg-type]
    aten.scalar_tensor.default: lambda node: float(node.args[0]),  # type: ignore[arg-type]
}


def literal(value: Any, ctype: str) -> str:
    """Return a Python number as C."""
    number = float(value)
    if math.isnan(number):
        return f"(({ctype})NAN)"
    if math.isinf(number):
        return f"(({ctype}){'-' if number < 0 else ''}INFINITY)"
    if ctype in ("uint8_t", "int64_t") and number == int(number):
        return f"(({ctype}){int(number)})"
    return f"{number!r}f" if ctype == "float" else f"{number!r}"


def arguments(node: fx.Node, read: Callable[[fx.Node], str], kind: Callable[[fx.Node], str]) -> list[str]:
    """Return the arguments of an element-wise operation as C, given how to read a node and of what type it is."""
    values: list[Any] = list(node.args)
    if node.target in (aten._to_copy.default, aten.clone.default):
        values = values[:1]
    kinds = [kind(arg) for arg in node.all_input_nodes]
    number = next((name for name in ("double", "float", "int64_t") if name in kinds), kind(node))
    texts = [
        read(value) if isinstance(value, fx.Node) else "None" if value is None else literal(value, number)
        for value in values
    ]
    return [*texts, str(node.kwargs["alpha"])] if "alpha" in node.kwargs else texts


def _power(t: str, base: str, exponent: str) -> str:
    number = float(exponent.rstrip("f"))
    if number == 2:
        return f"({base} * {base})"
    if number == 3:
        return f"({base} * {base} * {base})"
    return f"{'powf' if t == 'float' else 'pow'}({base}, {exponent})"


def _clamp(a: str, low: str, high: str) -> str:
    kept = a if low == "None" else f"({a} < {low} ? {low} : {a})"
    return kept if high == "None" else f"({kept} > {high} ? {high} : {kept})"


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
