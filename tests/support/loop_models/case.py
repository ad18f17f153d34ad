"""What a case of a loop is: a model as somebody wrote it, what it is fed, and what rolling its loops may do."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FEATURES, UNITS, VOCAB = 6, 12, 11

# "roll": a good implementation rolls it; "may": rolled or left alone; "leave": a body that one step cannot stand for.
EXPECTATIONS = ("roll", "may", "leave")

Inputs = Callable[[int, int], tuple[Any, ...]]


def _plain_call(model: nn.Module, *args: Any) -> Any:
    return model(*args)


def _nothing_more(model: nn.Module) -> Any:
    return None


@dataclass(frozen=True)
class LoopCase:
    """One model with a loop over time.

    `call` is how its user calls it, where that is more than `model(*args)`. `seen` gives what the loop leaves behind
    besides its outputs (attributes, lines printed, what a hook noted): it has to be as the plain loop leaves it.
    `surprise` makes inputs of the same shapes with which the loop goes another way than with `inputs`. `later` is what
    the user changes between two calls, within a context that takes it back: the next call has to follow. Make `inputs`
    anew for each run: some models write to theirs.
    """

    name: str
    builder: Callable[[], nn.Module]
    inputs: Inputs
    expect: str
    why: str = ""
    family: str = ""
    call: Callable[..., Any] = field(default=_plain_call)
    seen: Callable[[nn.Module], Any] = field(default=_nothing_more)
    surprise: Inputs | None = None
    later: Callable[[nn.Module], AbstractContextManager[Any]] | None = None
    grads: bool = True  # the outputs have gradients
    input_grads: bool = True  # gradients of its inputs may be asked for
    doubles: bool = True  # runs in float64 after .double(), and gives the same to a few digits
    least: int = 1  # the fewest steps that the model itself can take

    def model(self, *, seed: int = 0) -> nn.Module:
        """Build the model, the same for the same seed; the caller's random streams stay as they are."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.builder()

    def run(self, model: nn.Module, args: tuple[Any, ...], *, seed: int = 1) -> Any:
        """Call the model as its user does, from the same point of every random stream."""
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        return self.call(model, *args)


class Family:
    """The cases of one file: decorate a module with it, which needs no argument to be built."""

    def __init__(self, name: str) -> None:
        self.name, self.cases = name, dict[str, LoopCase]()

    def __call__(
        self,
        inputs: Inputs,
        *,
        expect: str = "roll",
        name: str | None = None,
        builder: Callable[[], nn.Module] | None = None,
        **more: Any,
    ) -> Callable[[Any], Any]:
        def note(model: Any) -> Any:
            called = (
                name or "_".join(re.findall(r"[A-Z]+(?=[A-Z][a-z]|$)|[A-Z]?[a-z0-9]+|[A-Z]+", model.__name__)).lower()
            )
            if called in self.cases:
                raise ValueError(f"{self.name} has two cases named {called}")
            self.cases[called] = LoopCase(called, builder or model, inputs, expect, family=self.name, **more)
            return model

        return note


def setting(**values: Any) -> Callable[[nn.Module], AbstractContextManager[Any]]:
    """The user sets attributes of the model between two calls."""

    @contextmanager
    def change(model: nn.Module) -> Iterator[None]:
        before = {name: getattr(model, name) for name in values}
        for name, value in values.items():
            setattr(model, name, value)
        yield
        for name, value in before.items():
            setattr(model, name, value)

    return change


def doing(change: Callable[[nn.Module], Any]) -> Callable[[nn.Module], AbstractContextManager[Any]]:
    """The user does something to the model between two calls, for good."""

    @contextmanager
    def done(model: nn.Module) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            change(model)
        yield

    return done


def scaled(inputs: Inputs, by: float) -> Inputs:
    """The same inputs, those of floating point times a number."""
    return lambda batch, steps: tuple(
        x * by if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs(batch, steps)
    )


def normal(*shape: int, salt: int = 0) -> Tensor:
    """Normal numbers that depend on the shape and the salt alone."""
    seed = salt
    for size in shape:
        seed = seed * 131 + size
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn_tokens(*shape: int, salt: int = 0) -> Tensor:
    """Tokens that depend on the shape and the salt alone."""
    return (normal(*shape, salt=salt).abs() * 1000).long() % VOCAB


def series(features: int = FEATURES, *, salt: int = 0) -> Inputs:
    """One input of (batch, time, feature)."""
    return lambda batch, steps: (normal(batch, steps, features, salt=salt),)


def time_first(features: int = FEATURES) -> Inputs:
    """One input of (time, batch, feature)."""
    return lambda batch, steps: (normal(steps, batch, features),)


def tokens() -> Inputs:
    """One input of tokens, (batch, time)."""
    return lambda batch, steps: (drawn_tokens(batch, steps),)


def lengths(batch: int, steps: int) -> Tensor:
    """How many steps of each row are real: the first row is whole, later ones are shorter."""
    return torch.tensor([max(1, steps - 2 * row) for row in range(batch)])


def series_and_lengths(batch: int, steps: int) -> tuple[Tensor, Tensor]:
    """Rows of (batch, time, feature), and how many steps of each are real."""
    return normal(batch, steps, FEATURES), lengths(batch, steps)


def two_series(batch: int, steps: int) -> tuple[Tensor, Tensor]:
    """Two inputs along the same time: observations and actions, say."""
    return normal(batch, steps, FEATURES), normal(batch, steps, 3, salt=1)


def source_and_target(batch: int, steps: int) -> tuple[Tensor, Tensor]:
    """Tokens of two sequences of different length."""
    return drawn_tokens(batch, steps), drawn_tokens(batch, steps + 2, salt=1)
