"""Probe: what a stepped layer gets at each step, the input's steps or values the model made itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...state import Path
from ..inputs import ModelInputs
from ..outcome import Outcome, same
from ..patient import Patient, PatientProbe
from .calls import OtherSeed, PlainCall, TracedCall

_SEEDS = (2, 3)  # beside 0 and 1


@dataclass(frozen=True, slots=True)
class Feeding:
    """How often the steps of one input are fed in eval mode, over several seeds, and how often something else is."""

    path: Path  # of the input
    told: int  # steps, after the first, that are fed from it
    own: int  # steps that are fed from no input
    by_chance: bool  # which of both is fed changes with the seed

    @property
    def always(self) -> bool:
        """Whether nothing but the input is fed."""
        return self.told > 0 and self.own == 0


class Feedings(tuple[Feeding, ...], PatientProbe):
    """For each sequence among the inputs, whether a stepped layer is fed from it."""

    @classmethod
    def measure(cls, patient: Patient) -> Feedings:
        """Compare what is fed at each step with the steps of each input, with several seeds and other values."""
        inputs = patient.inputs
        paths = [a.path for a in inputs.arguments if a.kind == "sequence" and a.time is not None and a.rows is not None]
        stepped = [path for path in paths if len(_fed(patient[PlainCall], path)) >= 3]
        if not stepped:
            return cls()
        seen = patient[OtherSeed]
        runs = [seen.first, seen.second]
        traced = any("T" in _fed(patient[TracedCall], path) for path in stepped) and not any(
            "T" in _fed(run, path) for run in runs for path in stepped
        )  # it goes through a linear map before it comes to the layer
        if traced:
            runs = [patient.run(number=number, collect=True, trace=True) for number in (0, 1)]
        if len(paths) > 1 or seen.gap > 0:  # two seeds may well toss the same coin
            runs += [patient.run(number=number, collect=True, trace=traced) for number in _SEEDS]
        return cls(_feeding(patient, path, runs) for path in stepped)


def _feeding(patient: Patient, path: Path, runs: list[Outcome]) -> Feeding:
    inputs = patient.inputs
    patterns = [_pattern([run], path) for run in runs]
    if len(set(patterns)) > 1:
        # What is drawn may well be like a step of the input once, and not again when that holds other values.
        everywhere = torch.ones(inputs.batch, inputs.argument(path).steps, dtype=torch.bool)
        other = inputs.other_steps(everywhere, (path,), seed=23)
        again = [
            patient.run(other, number=number, collect=True, trace=bool(runs[0].trace))
            for number in (0, 1, *_SEEDS)[: len(runs)]
        ]
        patterns = [_pattern(list(pair), path) for pair in zip(runs, again, strict=True)]
    told, own = (sum(pattern.count(mark) for pattern in set(patterns)) for mark in "TO")
    return Feeding(path, told, own, by_chance=len(set(patterns)) > 1 and told > 0 and own > 0)


def fed(run: Outcome, path: Path) -> tuple[int, int]:
    """Return how many steps after the first are fed from an input in one call, and how many from none."""
    pattern = _pattern([run], path)
    return pattern.count("T"), pattern.count("O")


def _pattern(runs: list[Outcome], path: Path) -> str:
    """Return a letter for each step: T told by the input in every run, O the model's own."""
    marks = [_fed(run, path) for run in runs]
    together = zip(*marks, strict=False)
    return "".join("S" if "S" in each else "T" if set(each) == {"T"} else "O" for each in together)


def _fed(run: Outcome, path: Path) -> str:
    """Return for each step that is fed: T a later step of the input, S its first or one of another input, O other."""
    inputs = run.inputs
    others = [a.path for a in inputs.arguments if a.kind == "sequence" and a.time is not None and a.path != path]
    columns = _columns(inputs, path)
    beside = [
        column for other in others if inputs.argument(other).rows is not None for column in _columns(inputs, other)
    ]
    found = ""
    for steps in _steps(run, tokens=not columns[0].is_floating_point()):
        marks = ""
        for value in steps:
            if any(_is(value, column) for column in columns[1:]):
                marks += "T"
            else:
                marks += "S" if _is(value, columns[0]) or any(_is(value, column) for column in beside) else "O"
        if len(marks) - marks.count("O") > len(found) - found.count("O") or not found:
            found = marks
    return "S" + found[1:] if found[:1] == "O" else found  # whatever it is, it starts from something


def _columns(inputs: ModelInputs, path: Path) -> list[Tensor]:
    """Return the steps of an input: (batch, features) each."""
    argument, x = inputs.argument(path), inputs.get(path)
    assert argument.rows is not None
    assert argument.time is not None
    if not isinstance(x, Tensor):
        return [torch.zeros(inputs.batch, 0)]
    return [step.reshape(inputs.batch, -1) for step in x.movedim((argument.rows, argument.time), (0, 1)).unbind(1)]


def _steps(run: Outcome, *, tokens: bool) -> list[list[Tensor]]:
    """Return what each embedding (tokens) or layer (numbers) is fed one step at a time: (batch, features) each."""
    batch = run.inputs.batch
    found: dict[str, list[Tensor]] = {}
    if tokens:
        for e in run.calls.embedded:
            if e.tokens.numel() == batch:
                found.setdefault(e.name, []).append(e.tokens.reshape(batch, 1))
        return list(found.values())
    for call in run.calls:
        if call.steps == 1 and call.rows == batch and isinstance(call.input, Tensor):
            found.setdefault(call.layer.label, []).append(call.input.detach().reshape(batch, -1))
    maps: dict[int, list[Tensor]] = {}
    for operation in run.trace.named("linear"):
        x, weight = operation.inputs[:2]
        if x.numel() // x.shape[-1] == batch:
            maps.setdefault(id(weight), []).append(x.detach().reshape(batch, -1))
    return [*found.values(), *maps.values()]


def _is(value: Tensor, column: Tensor) -> bool:
    """Whether a step holds these values: alone, or with other features before or behind them."""
    width = column.shape[1]
    if value.shape[1] < width or not width or value.dtype != column.dtype:
        return False
    return same(value[:, :width], column) or same(value[:, -width:], column)
