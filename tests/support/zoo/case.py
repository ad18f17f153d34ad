"""What a case is: a small model, an input, what a right answer says, and the model's own equations.

    case = CASES["makemore_rnn"]
    model, (args, kwargs) = case.model(), case.inputs()
    output = case.run(model, args, kwargs)
    for answer in case.answers(model, args, kwargs):
        answer.kind, answer.module_path, answer.parts["h"][-1], answer.initial["h"]

An oracle is a function `(model, *args, start, **kwargs) -> output`. It computes what the model computes, slowly and
obviously, and notes each state on the way: `run = start(h=zeros)` begins a run at the model's own start, or at a given
state, `run["h"]` is the part as it stands, `run.keep(h=h)` notes one more step. The runs come in the order of `expect`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

BATCH, STEPS, FEATURES, UNITS, TOKENS = 3, 7, 4, 5, 11  # all unequal, so that mixing them up fails

KINDS = {"cell", "loop", "layer", "iteration", "attribute", "cache", "none"}
OWN_STARTS = {None, "zeros", "learned", "encoder", "expanded", "random", "attribute"}

Parts = Mapping[str, Tensor]


class Run:
    """One recurrence, step by step: element 0 of each part is what it starts from."""

    def __init__(self, own: dict[str, Tensor | None], given: Parts | None = None) -> None:
        self.parts: dict[str, list[Any]] = {name: [value] for name, value in ({**own, **(given or {})}).items()}
        self.returned: dict[str, list[Tensor]] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name][-1]

    def keep(self, **parts: Tensor) -> None:
        """Note the parts after one more step, all of them."""
        if parts.keys() != self.parts.keys():
            raise KeyError(f"this step has {sorted(parts)}, the run has {sorted(self.parts)}")
        for name, value in parts.items():
            # A copy: a model that writes in place must not change what was noted.
            self.parts[name].append(value.clone())

    def gave(self, **parts: Tensor) -> None:
        """Note what the step's module itself returned, where the loop makes something else of it."""
        for name, value in parts.items():
            self.returned.setdefault(name, []).append(value.clone())

    def along(self, name: str, dim: int = 1) -> Tensor:
        """All steps of one part, without the start, stacked."""
        return torch.stack(self.parts[name][1:], dim=dim)

    def after(self, step: int) -> dict[str, Tensor]:
        """All parts after so many steps; -1 is after the last."""
        return {name: values[step] for name, values in self.parts.items()}


class Starts:
    """Where each run of an oracle begins: at what the model itself would start from, unless a state is given."""

    def __init__(self, given: Sequence[Parts | None] = ()) -> None:
        self.given, self.runs = given, []

    def __call__(self, **own: Tensor | None) -> Run:
        given = self.given[len(self.runs)] if self.given else None
        self.runs.append(Run(own, given))
        return self.runs[-1]


@dataclass(frozen=True)
class Expected:
    """What a right answer says about one recurrence.

    `kind` holds all the words that are right: `layer` stands for torch's own layers too (lstm, gru, rnn), and `cell`
    for torch's own cells. Where `none` is among them, finding nothing is right as well.

    `parts` holds what crosses at the end of a repetition. Two answers besides are right: one without the parts in
    `derived`, which the others determine if one cuts elsewhere in the repetition (a read vector, a token fed back);
    and, for a cell, the values in `returned`, where the loop masks or mixes what its module returned.
    `parts`, `initial` and `returned` are filled in by `Case.answers`.
    """

    kind: frozenset[str]
    module_path: str  # the module that is the step or the layer, or in whose forward the loop stands; "" is the model
    batch_axis: Mapping[str, int | None]  # for each part; None where all rows share it
    steps: int
    track: str | None = None  # where the words of the library prescribe it
    rows: int = BATCH  # how long the batch axis is
    derived: frozenset[str] = frozenset()
    parts: Mapping[str, list[Tensor]] = field(default_factory=dict)  # after each repetition
    initial: Mapping[str, Tensor | None] = field(default_factory=dict)
    returned: Mapping[str, list[Tensor]] = field(default_factory=dict)


def expected(
    kind: str,
    path: str = "",
    steps: int = STEPS,
    *,
    track: str | None = None,
    rows: int = BATCH,
    derived: Iterable[str] = (),
    **batch_axis: int | None,
) -> Expected:
    """`expected("cell loop", "cell", h=0)`: either word is right; the rows of `h` are on axis 0."""
    return Expected(frozenset(kind.split()), path, batch_axis, steps, track, rows, frozenset(derived))


@dataclass(frozen=True)
class Case:
    """A small model in a public style, with its own equations."""

    name: str
    style: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[tuple, dict]]
    oracle: Callable[..., Any]
    expect: tuple[Expected, ...]
    carriable: bool | None = None  # whether two pieces, with the state put in, equal the whole; None: has no time
    time_axis: int | None = 1  # of the first input
    own_start: str | None = None  # "zeros": any constants made in forward; None: handed in, or no value at first
    resume: Callable[..., Any] | str = ""  # (model, states, *args, **kwargs) -> output; or why that cannot be done
    cut_inputs: tuple[int | str, ...] = (0,)  # the arguments that have a time axis
    join: Any = 1  # how outputs of pieces become one: an axis, "last", or a tuple or dict of these
    kept: Callable[[nn.Module], Parts] | None = None  # where the model itself keeps its state after a call
    idle: Mapping[str, str] = field(default_factory=dict)  # parts that are in no output, and why they are parts still
    tolerance: float = 2e-6
    why: str = ""  # of a decoy: why nothing may be claimed
    changes_itself: bool = False  # a second call of the same model gives something else

    @property
    def is_decoy(self) -> bool:
        """Whether nothing recurrent may be claimed."""
        return all(one.kind == {"none"} for one in self.expect)

    def model(self) -> nn.Module:
        """The model, with the same weights each time; the caller's random stream stays as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(sum(map(ord, self.name)))
            return self.make()

    def run(self, model: nn.Module, args: tuple, kwargs: dict, seed: int = 0) -> Any:
        """Call the model, with the same random draws each time."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return model(*args, **kwargs)

    def explained(self, model: nn.Module, args: tuple, kwargs: dict, seed: int = 0) -> tuple[Any, list[Run]]:
        """The output by the model's own equations, and the runs that led to it."""
        starts = Starts()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            output = self.oracle(model, *args, start=starts, **kwargs)
        return output, starts.runs

    def answers(self, model: nn.Module, args: tuple, kwargs: dict, seed: int = 0) -> tuple[Expected, ...]:
        """`expect`, with the trajectory of each part. Give it a model that has not been called yet."""
        _, runs = self.explained(model, args, kwargs, seed)
        return tuple(
            replace(
                one,
                parts={name: values[1:] for name, values in run.parts.items()},
                initial={name: values[0] for name, values in run.parts.items()},
                returned=run.returned,
            )
            for one, run in zip(self.expect, runs, strict=True)
        )

    def explained_from(self, states: Sequence[Parts | None], seed: int = 0) -> Any:
        """The output by the equations of a new model, each run begun at a state of yours; None: at its own."""
        args, kwargs = self.inputs()
        model = self.model()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.oracle(model, *args, start=Starts(states), **kwargs)

    def pieces(self, args: tuple, kwargs: dict, at: int) -> tuple[tuple[tuple, dict], tuple[tuple, dict]]:
        """The input in two pieces, cut along time."""

        def part(piece: slice) -> tuple[tuple, dict]:
            def cut(key: int | str, value: Any) -> Any:
                return value[(slice(None),) * self.time_axis + (piece,)] if key in self.cut_inputs else value

            return tuple(cut(k, v) for k, v in enumerate(args)), {k: cut(k, v) for k, v in kwargs.items()}

        return part(slice(None, at)), part(slice(at, None))


class Family:
    """The cases of one file: a decorator that makes an oracle the case that bears its name."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def __call__(self, make: Callable[[], nn.Module], *expect: Expected, **more: Any) -> Callable[[Callable], Case]:
        """`@case(Model, expected(...), style=..., inputs=...)` above the oracle."""
        for one in expect:
            if not one.kind <= KINDS:
                raise ValueError(f"no such kind: {set(one.kind) - KINDS}")

        def named(oracle: Callable) -> Case:
            self.cases.append(Case(name=oracle.__name__, make=make, oracle=oracle, expect=expect, **more))
            return self.cases[-1]

        return named


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """Numbers of a normal distribution, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def series(batch: int = BATCH, steps: int = STEPS, features: int = FEATURES) -> tuple[tuple[Tensor], dict]:
    """The usual input: (batch, time, feature)."""
    return (drawn(batch, steps, features),), {}


def tokens(batch: int = BATCH, steps: int = STEPS) -> tuple[tuple[Tensor], dict]:
    """The usual input of a language model: (batch, time) of integers."""
    return (torch.randint(TOKENS, (batch, steps), generator=torch.Generator().manual_seed(2)),), {}


def zeros(*shape: int) -> Tensor:
    """Zeros, for a state of (batch, unit) unless told otherwise."""
    return torch.zeros(shape or (BATCH, UNITS))


def weights_of(module: nn.Module, suffix: str = "") -> Iterable[Tensor]:
    """Both weights and both biases of one of torch's cells, or of a layer by suffix (`_l0`)."""
    return [getattr(module, name + suffix) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]


def lstm_step(module: nn.Module, x: Tensor, h: Tensor, c: Tensor, suffix: str = "") -> tuple[Tensor, Tensor]:
    """The equations of torch's LSTM."""
    w_x, w_h, b_x, b_h = weights_of(module, suffix)
    i, f, g, o = (x @ w_x.T + b_x + h @ w_h.T + b_h).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(module: nn.Module, x: Tensor, h: Tensor, suffix: str = "") -> Tensor:
    """The equations of torch's GRU."""
    w_x, w_h, b_x, b_h = weights_of(module, suffix)
    r_x, z_x, n_x = (x @ w_x.T + b_x).chunk(3, dim=-1)
    r_h, z_h, n_h = (h @ w_h.T + b_h).chunk(3, dim=-1)
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    return (1 - z) * (n_x + r * n_h).tanh() + z * h


def rnn_step(module: nn.Module, x: Tensor, h: Tensor, suffix: str = "") -> Tensor:
    """The equations of torch's plain RNN."""
    w_x, w_h, b_x, b_h = weights_of(module, suffix)
    return (x @ w_x.T + b_x + h @ w_h.T + b_h).tanh()
