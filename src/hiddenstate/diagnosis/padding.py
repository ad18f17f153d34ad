"""Padding: where masks among the arguments say it is, and inputs with more of it."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from .argument_names import begins_anew
from .inputs import Argument, ModelInputs

_PADDING = re.compile(r"pad|attention|attn|attend|valid", re.IGNORECASE)
_PLAIN = re.compile(r"^$|mask", re.IGNORECASE)


def with_padding(inputs: ModelInputs) -> ModelInputs:
    """Return the inputs with masks of padding known as such, and with the lengths that they tell.

    Such a mask holds one value at the real steps of each row and the other one behind them. By its name it is one; a
    plain mask is, where rows differ in length and no state is handed in beside it: then it may say where to start anew.
    """
    known, arguments = inputs.known_lengths(), []
    handed = any(argument.kind == "state" for argument in inputs.arguments)
    for argument in inputs.arguments:
        found = _read(inputs, argument, handed=handed) if argument.kind == "mask" and inputs.batched else None
        if found is not None and (known is None or torch.equal(found[0], known)):
            known, real = found
            argument = replace(argument, real=real)
        arguments.append(argument)
    told = any(argument.real is not None for argument in arguments)
    return replace(inputs, arguments=tuple(arguments), lengths=known if told else inputs.lengths)


def unread_padding(inputs: ModelInputs) -> list[str]:
    """Return the names of masks that are called like those of padding, and do not mark the end of each row."""
    masks = [argument for argument in inputs.arguments if argument.kind == "mask" and argument.real is None]
    names = [inputs.name(argument.path) for argument in masks]
    return [name for name in names if _PADDING.search(name)] if inputs.lengths is None else []


def _read(inputs: ModelInputs, argument: Argument, *, handed: bool) -> tuple[Tensor, int] | None:
    """Return the lengths that a mask tells, and what stands at real steps; None where it is no mask of padding."""
    mask, name = inputs.get(argument.path), inputs.name(argument.path)
    by_name = bool(_PADDING.search(name))
    if argument.rows is None or argument.time is None or argument.steps != inputs.steps:
        return None
    if not by_name and (handed or begins_anew(name) or not _PLAIN.search(name)):
        return None
    marks = mask.detach().movedim((argument.rows, argument.time), (0, 1)).reshape(inputs.batch, inputs.steps, -1)
    if marks.shape[2] != 1:
        return None
    for real in (0, 1) if "pad" in name.lower() else (1,):  # torch's own masks of padding are True at padding
        here = (marks[..., 0] != 0).cpu() == bool(real)  # (batch, steps)
        lengths = here.sum(1)
        if int(lengths.min()) < 1 or not torch.equal(here, torch.arange(inputs.steps) < lengths.unsqueeze(1)):
            continue
        if by_name or int(lengths.min()) < int(lengths.max()):
            return lengths, real
    return None


def padded(inputs: ModelInputs, more: int) -> ModelInputs | None:
    """Return the inputs with `more` steps of padding behind their own; None where it is unknown how to pad them."""
    changed = inputs
    for argument in inputs.arguments:
        if argument.time is None or argument.steps != inputs.steps or argument.kind not in ("sequence", "mask"):
            continue
        if argument.kind == "sequence" and argument.path != inputs.main:
            return None  # other sequences beside it: how they are padded is unknown
        x = inputs.get(argument.path)
        shape = list(x.shape)
        shape[argument.time] = more
        changed = changed.put(
            argument.path, torch.cat([x, x.new_full(shape, _pad_value(inputs, argument, x))], argument.time)
        )
    arguments = tuple(replace(s, steps=s.steps + more) if s.steps == inputs.steps else s for s in inputs.arguments)
    return replace(changed, arguments=arguments, steps=inputs.steps + more)


def _pad_value(inputs: ModelInputs, argument: Argument, x: Tensor) -> float:
    if argument.kind == "mask":
        return 1 if argument.real == 0 else 0
    if x.is_floating_point():
        return 0
    if inputs.pad_token is not None:
        return inputs.pad_token
    assert argument.rows is not None
    assert argument.time is not None
    padding = x.movedim((argument.rows, argument.time), (0, 1))[~inputs.valid.to(x.device)]
    return int(padding.flatten()[0]) if padding.numel() else 0
