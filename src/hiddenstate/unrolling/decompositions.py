"""Decompositions of operations into smaller ones, which sums and compiled loops support."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_AS_IT_IS: Any = NotImplemented  # the answer that leaves an operation whole
_FEW = 16  # entries along an axis that are taken apart one by one
_REDUCTIONS: dict[Callable[..., Tensor], tuple[Any, ...]] = {
    torch.sum: (aten.sum.default, aten.sum.dim_IntList),
    torch.mean: (aten.mean.default, aten.mean.dim),
    torch.amax: (aten.amax.default,),
}


@lru_cache(maxsize=1)
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return what tracing takes apart, and how."""
    from torch._decomp import get_decompositions
    from torch._decomp.decompositions import pw_cast_for_opmath

    wanted = [
        *(aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm_backward),
        *(aten.tanh_backward, aten.sigmoid_backward, aten.threshold_backward, aten.gelu_backward, aten.silu_backward),
        *(aten.leaky_relu_backward, aten.softplus_backward, aten.select_backward, aten.slice_backward),
        *(
            aten._softmax_backward_data,
            aten._log_softmax_backward_data,
            aten.addcmul,
            aten.lerp,
            aten.mse_loss_backward,
        ),
        *(aten.silu, aten.elu, aten.leaky_relu, aten.hardtanh, aten.softplus, aten.gelu, aten.celu),
        *(aten.mish, aten.mish_backward, aten.hardswish, aten.glu),
        *(aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.glu_backward, aten._log_softmax),
        *(aten.native_group_norm, aten.nan_to_num, aten.logsumexp, aten.linalg_vector_norm),
        *(aten.hardsigmoid, aten.native_batch_norm_backward, aten.native_dropout_backward),
        *(aten._prelu_kernel, aten._prelu_kernel_backward),
    ]
    found: dict[Any, Callable[..., Any]] = dict(get_decompositions(wanted))
    found[aten.var_mean.correction] = _var_mean
    found[aten.var.correction] = lambda x, dim=None, **options: _var_mean(x, dim, **options)[0]
    found[aten.std.correction] = lambda x, dim=None, **options: _var_mean(x, dim, **options)[0].sqrt()
    found[aten._softmax.default] = _softmax
    found[aten.unbind.int] = lambda x, dim=0: [x.select(dim, place) for place in range(x.shape[dim])]
    found[aten.addmm.default] = lambda bias, *factors, **scales: _added_product(torch.mm, bias, *factors, **scales)
    found[aten.baddbmm.default] = lambda bias, *factors, **scales: _added_product(torch.bmm, bias, *factors, **scales)
    found[aten.hardsigmoid_backward.default] = _hardsigmoid_backward
    found[aten.hardtanh_backward.default] = pw_cast_for_opmath(_hardtanh_backward)
    found[aten.hardswish_backward.default] = pw_cast_for_opmath(_hardswish_backward)
    found[aten.elu_backward.default] = pw_cast_for_opmath(_elu_backward)
    for reduce, ways in _REDUCTIONS.items():
        found.update((way, partial(_with_axes, reduce)) for way in ways)
    found[aten.clamp_min.Tensor] = torch.maximum
    found[aten.clamp_max.Tensor] = torch.minimum
    found[aten.clamp.Tensor] = _clamp
    found[aten.remainder.Scalar] = _remainder
    found[aten.div.Tensor_mode] = found[aten.div.Scalar_mode] = _divided
    found[aten.select_scatter.default] = _select_scatter
    found[aten.slice_scatter.default] = _slice_scatter
    found[aten.copy.default] = lambda x, source, non_blocking=False: source.to(x.dtype).expand(x.shape).clone()
    found[aten._safe_softmax.default] = _safe_softmax
    found[aten.heaviside.default] = lambda x, at_zero: torch.where(x == 0, at_zero, (x > 0).to(x.dtype))
    found[aten.constant_pad_nd.default] = _padded
    found[aten.native_batch_norm.default] = _batch_norm
    found[aten.roll.default], found[aten.flip.default] = _rolled, _flipped
    found[aten.cumsum.default] = _cumsum
    return found


def _var_mean(
    x: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim())) if not dim else list(dim)
    count = math.prod(x.shape[axis] for axis in dims)
    mean = x.sum(dims, keepdim=True) / count
    away = x - mean
    spread = (away * away).sum(dims, keepdim=keepdim) / max(count - (1 if correction is None else correction), 0)
    return spread, mean if keepdim else mean.squeeze(dims)


def _with_axes(
    reduce: Callable[..., Tensor], x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Name the axes of a reduction that takes all of them."""
    if dtype is not None or (dim is not None and dim != []) or not x.dim():
        return _AS_IT_IS
    return reduce(x, list(range(x.dim())), keepdim)


def _hardsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    # Torch's own code takes a sixth in single precision, whatever it works in.
    return torch.where((x > -3) & (x < 3), grad * 0.1666666716337204, 0.0)


# At what is no number these take the way of torch's own code, not that of the parts that torch would take them into.


def _hardtanh_backward(grad: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    return torch.where((x > low) & (x < high), grad, 0.0)


def _hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, grad, grad * (x / 3 + 0.5)))


def _elu_backward(grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor) -> Tensor:
    below = grad * input_scale
    below = below * (x + alpha * scale) if is_result else below * (alpha * scale) * torch.exp(x * input_scale)
    return torch.where(x > 0, grad * scale, below)


def _clamp(x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    x = x if min is None else torch.maximum(x, min)
    return x if max is None else torch.minimum(x, max)


def _remainder(x: Tensor, by: Any) -> Any:
    if not _floats(x, by):  # of whole numbers one may be divided by zero, which torch refuses
        return _AS_IT_IS
    rest = torch.fmod(x, by)
    return torch.where((rest != 0) & ((rest < 0) != (by < 0)), rest + by, rest)


def _divided(x: Tensor, by: Any, *, rounding_mode: str | None = None) -> Any:
    return torch.trunc(x / by) if rounding_mode == "trunc" and _floats(x, by) else _AS_IT_IS


def _floats(x: Tensor, by: Any) -> bool:
    """Say whether both are of one dtype that compiled loops compute in."""
    known = x.dtype in (torch.float32, torch.float64)
    return known and (by.dtype == x.dtype if isinstance(by, Tensor) else isinstance(by, float | int))


def _added_product(
    multiply: Callable[..., Tensor], bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    # In the factors' own dtype: torch's way of taking it apart multiplies half precision as float32.
    product = multiply(left, right)
    if beta == 0:  # a bias that does not count may hold anything
        return product * alpha
    return product * alpha + bias * beta


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    if half_to_float or x.dtype not in (torch.float32, torch.float64):
        return _AS_IT_IS  # rounds differently inside than the parts would
    powers = (x - x.amax(dim, keepdim=True)).exp()
    return powers / powers.sum(dim, keepdim=True)


def _select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    index = index % x.shape[dim]
    return _with_middle(x, source.unsqueeze(dim), dim, index, index + 1)


def _slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    first, last, jump = slice(start, end, step).indices(x.shape[dim])
    if jump != 1:
        return _every_so_many(x, source, dim % x.dim(), range(first, last, jump))
    return _with_middle(x, source, dim, first, max(first, last))


def _every_so_many(x: Tensor, source: Tensor, dim: int, places: range) -> Any:
    """Put in one of each so many entries, as of pairs of numbers that lie beside each other."""
    jump, size = places.step, x.shape[dim]
    if size % jump or places.start >= jump or len(places) * jump != size:
        return _AS_IT_IS
    groups = x.reshape(*x.shape[:dim], size // jump, jump, *x.shape[dim + 1 :])
    one = _with_middle(groups, source.unsqueeze(dim + 1), dim + 1, places.start, places.start + 1)
    return one.reshape(x.shape)


def _with_middle(x: Tensor, middle: Tensor, dim: int, first: int, last: int) -> Tensor:
    size = x.shape[dim]
    parts = [x.narrow(dim, 0, first), middle, x.narrow(dim, last, size - last)]
    return _joined(parts, dim)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Return the softmax, and zeros where nothing is let through."""
    if (dtype or x.dtype) != x.dtype or x.dtype not in (torch.float32, torch.float64):
        return _AS_IT_IS
    most = x.amax(dim, keepdim=True)
    return torch.where(most == -math.inf, 0.0, torch.softmax(x, dim))


def _padded(x: Tensor, pad: list[int], value: float = 0.0) -> Tensor:
    """Put a number around a tensor, or cut from it where so much less than none of it is asked for."""
    for place, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = x.dim() - 1 - place
        x = x.narrow(axis, max(-before, 0), x.shape[axis] - max(-before, 0) - max(-after, 0))
        around = [x.new_full([*x.shape[:axis], max(size, 0), *x.shape[axis + 1 :]], value) for size in (before, after)]
        x = _joined([around[0], x, around[1]], axis)
    return x


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Use the statistics that are kept; to take them from the batch stays whole."""
    if training or mean is None or var is None or x.dtype not in (torch.float32, torch.float64):
        return _AS_IT_IS
    shape = [-1, *[1] * (x.dim() - 2)]
    scale = (var + eps).rsqrt() if weight is None else (var + eps).rsqrt() * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return x * scale.view(shape) + shift.view(shape), x.new_empty(0), x.new_empty(0)


def _rolled(x: Tensor, shifts: list[int], dims: list[int] = []) -> Any:  # noqa: B006  # as torch declares it
    if not dims:
        return _AS_IT_IS
    for shift, axis in zip(shifts, dims, strict=True):
        if size := x.shape[axis]:
            cut = -shift % size
            x = _joined([x.narrow(axis, cut, size - cut), x.narrow(axis, 0, cut)], axis)
    return x


def _flipped(x: Tensor, dims: list[int]) -> Any:
    if any(x.shape[axis] > _FEW for axis in dims) or not dims:
        return _AS_IT_IS
    for axis in dims:
        x = _joined([x.narrow(axis, place, 1) for place in reversed(range(x.shape[axis]))], axis)
    return x


def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    known = x.dim() and x.dtype in (torch.float32, torch.float64) and (dtype or x.dtype) == x.dtype
    if not known or not 0 < x.shape[dim] <= _FEW:
        return _AS_IT_IS
    parts = [x.narrow(dim, 0, 1)]
    for place in range(1, x.shape[dim]):
        parts.append(parts[-1] + x.narrow(dim, place, 1))
    return _joined(parts, dim)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    parts = [part for part in parts if part.shape[dim]]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone()
