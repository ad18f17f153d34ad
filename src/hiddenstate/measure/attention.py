"""Attention: weights over steps, found in one call of an unmodified model."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..cells import given_call, is_data_set, layers, unwrap_to_call
from ..errors import BadInput
from ..recording import record
from ..state import shown_in_short
from .system import at_rest

_ALIKE = 1e-6  # smaller differences between weights are rounding
_KERNELS = ("scaled_dot_product_attention", "multi_head_attention_forward")
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))  # folders of code that is not the user's


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """Weights over time that one line of code made: not negative, and summing to 1."""

    weights: Tensor  # (batch, query, time): one query for a head, one per step of a decoder, or per head and step
    where: str  # file and line of the code that made them
    made_by: str  # the operation

    def __str__(self) -> str:
        """Return one line."""
        batch, queries, time = self.weights.shape
        entropy = -(self.weights * self.weights.clamp(min=1e-30).log()).sum(-1)
        alike = queries > 1 and float((self.weights - self.weights[:, :1]).abs().max()) < _ALIKE
        return (
            f"{batch} rows, {queries} looks each at {time} steps ({self.made_by}, {self.where}): "
            f"as spread as over {float(entropy.exp().mean()):.1f} steps"
            + ("; all looks are alike: what asks does not matter" if alike else "")
        )


def attention(
    model: nn.Module, *inputs: Any, call: Callable[..., Any] | None = None, **kwargs: Any
) -> tuple[AttentionWeights, ...]:
    """Return all weights over time that one call of `model` makes, in the order of the code that makes them.

    The call is watched. A value counts as a set of weights if it is not negative, and sums to 1 over an axis as long as
    the recurrent layers' steps. It may come from a softmax, from exp and a sum, or from torch's own attention. Values
    that a line of code makes repeatedly, as a decoder does, are stacked.

    Args:
        model: Any model with recurrent layers. It is called in eval mode, without gradients, and comes back unchanged.
        *inputs: What the model is called with.
        call: How to call the model, if not through its forward: `call=lambda model: model.decode(x)`.
        **kwargs: What the model is called with by name.

    >>> class Reader(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gru, self.score = torch.nn.GRU(2, 4, batch_first=True), torch.nn.Linear(4, 1)
    ...     def forward(self, x):
    ...         h, _ = self.gru(x)
    ...         return (self.score(h).softmax(dim=1) * h).sum(1)
    >>> (found,) = attention(Reader(), torch.randn(3, 7, 2))
    >>> found.weights.shape
    torch.Size([3, 1, 7])
    """
    if len(inputs) == 1 and is_data_set(inputs[0]):
        raise BadInput(f"weights are those of one call, but this is {type(inputs[0]).__name__}: give one batch of it.")
    given = given_call(attention, model, inputs, kwargs=kwargs, call=call, options={})
    inner = unwrap_to_call(given.model)
    with at_rest(inner), torch.no_grad(), record(inner) as recording:
        given.model(*given.args)
    sizes = [tuple(run.h.shape[:2]) for track in recording for run in recording.runs(track)]
    if not sizes:
        names = ", ".join(layer.label for layer in layers(inner)) or "none"
        raise BadInput(f"no recurrent layer was called (found: {names}), so there are no steps to look at.")
    batch, times = sizes[0][0], {time for _, time in sizes if time > 1}
    with at_rest(inner), torch.no_grad(), _Weights(batch, times) as watch:
        given.model(*given.args)
    found = tuple(watch.found())
    if not found:
        raise BadInput(
            f"no weights over the {' or '.join(map(str, sorted(times))) or 'one'} steps of the recurrent layers were "
            f"seen in the call: no value was 1 in sum along them. A kernel that keeps its weights to itself shows none."
        )
    return found


class _Weights(TorchFunctionMode):
    """Keeps values that sum to one along time, by the line of code that made them."""

    def __init__(self, batch: int, times: set[int]) -> None:
        super().__init__()
        self.batch, self.times = batch, times
        self.seen: dict[tuple[str, tuple[int, ...]], tuple[str, list[Tensor]]] = {}
        self.values: list[Tensor] = []  # to recognize views and copies of weights that are kept already

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if not name.startswith("__get"):
            for value in (*_hidden(name, args, kwargs), *(result if isinstance(result, tuple | list) else (result,))):
                self._look(value, name)
        return result

    def found(self) -> Iterator[AttentionWeights]:
        """Yield the weights made at each place, with repeated ones stacked as queries."""
        for (where, _), (name, calls) in self.seen.items():
            yield AttentionWeights(torch.cat(calls, dim=1), where, name)

    def _look(self, value: Any, name: str) -> None:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            return
        axes = [axis for axis, size in enumerate(value.shape) if size in self.times]
        if not axes or self.batch not in value.shape or bool((value < 0).any()):
            return
        for axis in reversed(axes):
            if not torch.allclose(value.sum(axis).float(), value.new_ones(()).float(), atol=1e-3):
                continue
            weights = value.detach().movedim(axis, -1)
            rows = [place for place, size in enumerate(weights.shape[:-1]) if size == self.batch]
            if not rows or bool(((weights == 0) | (weights == 1)).all()):
                return  # a mask or a selected step, not weights
            self._keep(weights.movedim(rows[0], 0).reshape(self.batch, -1, value.shape[axis]), name)
            return

    def _keep(self, weights: Tensor, name: str) -> None:
        known = [look for old in self.values if old.shape[2] == weights.shape[2] for look in old.unbind(1)]
        looks = weights.unbind(1)
        place = (_user_line(), tuple(weights.shape))
        # A decoder may make equal weights twice; torch's own attention passes here twice for one set of weights.
        again = place in self.seen and self.seen[place][0] == name and name not in _KERNELS
        if not again and all(any(torch.allclose(look, old.to(look), atol=1e-7) for old in known) for look in looks):
            return  # a view, a copy, or a concatenation of weights that are kept already
        self.values.append(weights.clone())
        self.seen.setdefault(place, (name, []))[1].append(self.values[-1])


def _hidden(name: str, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the weights that torch's own attention does not return, computed again."""
    if name == "scaled_dot_product_attention":
        query, key = args[0], args[1]
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        scale = kwargs.get("scale") or 1 / math.sqrt(query.shape[-1])
        scores = query @ key.transpose(-2, -1) * scale
        if kwargs.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        yield scores.softmax(-1)
    elif name == "multi_head_attention_forward":
        again = {**kwargs, "need_weights": True, "average_attn_weights": False}
        yield functional.multi_head_attention_forward(*args, **again)[1]


def _user_line() -> str:
    """Return file and line of the innermost code that is neither torch's nor ours."""
    frame = inspect.currentframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"
