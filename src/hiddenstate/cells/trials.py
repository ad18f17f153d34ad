"""Trial calls that teach what a module's state looks like, with inputs made up from its sizes where there are none."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .layer import arguments, weights_like
from .listener import unheard
from .native import Form, Native, flatten, matches, rebuild
from .snapshot import untouched

Candidate: TypeAlias = tuple[Native, dict[str, int]]  # a native state of three rows, and the axes they are on
Takes: TypeAlias = Literal["step", "batch first", "time first"]

# What people call the method that makes a first state.
FIRST_STATES = ("init_hidden", "initHidden", "init_state", "initial_state", "init_hidden_state", "initial_hidden")
FIRST_STATES += ("initialize_hidden_state", "get_initial_state", "get_init_state", "begin_state", "zero_state")
FIRST_STATES += ("init_hiddens", "init_states", "initState", "reset_hidden", "make_state")
_learned: WeakKeyDictionary[nn.Module, tuple[int, str | None]] = (
    WeakKeyDictionary()
)  # units, and who makes a first state

ROWS = 3  # neither 1, which broadcasts, nor 2, which `h, c = state` would take apart along the batch
_STEPS = 5


def _silence(module: nn.Module) -> None:
    """Take all hooks away, for as long as the module is untouched: nobody asked to see a trial."""
    for member in module.modules():
        for store in (member._forward_hooks, member._forward_pre_hooks, member._backward_hooks):
            store.clear()


class StateForm(NamedTuple):
    """What a cell's state looks like: its nesting, where its rows are, and what one call takes."""

    form: Form
    axes: dict[str, int]
    takes: Takes = "step"
    sure: bool = True  # seen, rather than guessed


def try_out(module: nn.Module, natives: Sequence[Candidate], sample: Tensor | None = None) -> StateForm | None:
    """Return how `module` takes and gives back one of these native states of three rows; None where nothing fits.

    Each comes with the axes its rows are on. `sample (batch, ...)` is a real step; without it, sizes are guessed.
    """
    with untouched(module), unheard(), torch.no_grad():
        module.eval()  # batch normalization mixes rows in training
        _silence(module)
        steps = list(_steps(module, sample))
        for takes in ("step", "batch first", "time first"):
            for x in steps:
                for native, axes in natives:
                    if _fits(module, x, native, takes) and _rows_apart(module, x, (native, axes), takes):
                        return StateForm(flatten(native)[1], axes, takes)
    return None


def try_step(
    module: nn.Module, natives: Sequence[Candidate], sample: Tensor | None, sizes: Sequence[int]
) -> int | None:
    """Return which of these native states a module takes and gives back in one step, as a cell does; None for none.

    None of them is known to be its own, so it has to be computed anew, and its rows have to be apart as well. Where
    steps are made up, the state may have any of these sizes.
    """
    with untouched(module), unheard(), torch.no_grad():
        module.eval()
        _silence(module)
        steps = [_sampled(sample)] if sample is not None else list(invented_inputs(module, ROWS, units=sizes))
        for x in steps:
            for at, candidate in enumerate(natives):
                if _fits(module, x, candidate[0], "step") and _computes_rows(module, x, candidate):
                    return at
    return None


def _computes_rows(module: nn.Module, x: Tensor, candidate: Candidate) -> bool:
    """Say whether a step makes a new state, each row of its own row of input and state alone."""
    native, axes = candidate
    parts, form = flatten(native)
    before = _trial(module, x, native)
    if before is None or all(torch.equal(before[1][name], part) for name, part in parts.items()):
        return False
    moved = {name: part.clone() for name, part in parts.items()}
    for name, part in moved.items():
        part.select(axes[name], 0).add_(1)
    after = _trial(module, x, rebuild(form, moved))
    gaps = [] if after is None else [(before[1][n] - after[1][n]).movedim(a, 0)[1:] for n, a in axes.items()]
    return (
        after is not None
        and all(bool((gap.abs() < 1e-4).all()) for gap in gaps)
        and _rows_apart(module, x, candidate, "step")
    )


def guesses(module: nn.Module, hidden: int) -> list[Candidate]:
    """Return the states that a module of `hidden` units may take: one tensor or two, by itself or stacked."""
    device, dtype = weights_like(module)
    layers = getattr(module, "num_layers", 1)
    deep = (layers if isinstance(layers, int) else 1) * (2 if getattr(module, "bidirectional", False) is True else 1)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, ROWS, hidden, device=device, dtype=dtype)

    return [
        (zeros(), {"h": 0}),
        ((zeros(), zeros()), {"h": 0, "c": 0}),
        (zeros(deep), {"h": 1}),
        ((zeros(deep), zeros(deep)), {"h": 1, "c": 1}),
    ]


def _laid_out(x: Tensor, takes: Takes) -> Tensor:
    if takes == "step":
        return x
    axis = 1 if takes == "batch first" else 0
    return torch.stack([x] * _STEPS, dim=axis)


def _trial(module: nn.Module, x: Tensor, native: Native) -> tuple[Any, dict[str, Tensor]] | None:
    """Return output and state of a trial call, where it gives back the form of state that it was given."""
    parts, form = flatten(native)
    try:
        result = module.forward(x, native)
    except Exception:  # a trial: whatever a user's cell raises means that this form is not its own
        return None
    pair = isinstance(result, tuple | list) and len(result) == 2
    if matches(form, result):
        output, state = None, flatten(result)[0]
    elif pair and matches(form, result[1]):
        output, state = result[0], flatten(result[1])[0]
    else:
        return None
    return (output, state) if all(state[name].shape == part.shape for name, part in parts.items()) else None


def _rows_apart(module: nn.Module, x: Tensor, candidate: Candidate, takes: Takes) -> bool:
    """Say whether another first row leaves the other rows' states alone; if not, the rows are not where we think."""
    if not x.is_floating_point():
        return True
    native, axes = candidate
    before = _trial(module, _laid_out(x, takes), native)
    after = _trial(module, _laid_out(torch.cat([x[:1] + 1, x[1:]]), takes), native)
    if before is None or after is None:
        return False
    floating = {name: part for name, part in before[1].items() if part.is_floating_point()}
    gaps = [(part - after[1][name]).movedim(axes[name], 0)[1:] for name, part in floating.items()]
    return all(bool((gap.abs() < 1e-4).all()) for gap in gaps)


def _fits(module: nn.Module, x: Tensor, native: Native, takes: Takes) -> bool:
    trial = _trial(module, _laid_out(x, takes), native)
    if trial is None:
        return False
    output = trial[0]
    if takes == "step":
        # More axes than one step gives: the rows were taken for the steps of a sequence.
        return not isinstance(output, Tensor) or x.dim() > 2 or output.dim() < 3
    expected = (ROWS, _STEPS) if takes == "batch first" else (_STEPS, ROWS)
    return isinstance(output, Tensor) and output.dim() > 1 and tuple(output.shape[:2]) == expected


def _steps(module: nn.Module, sample: Tensor | None) -> Iterator[Tensor]:
    if sample is not None:
        yield _sampled(sample)
    else:
        yield from invented_inputs(module, ROWS)


def _sampled(sample: Tensor) -> Tensor:
    return sample[:1].expand(ROWS, *sample.shape[1:]).contiguous()


def read_form(module: nn.Module) -> Form | None:
    """Read `h, c = state` out of the source, for cells that cannot be tried."""
    try:
        source = inspect.getsource(type(module).forward)
        name = arguments(type(module))[1]
    except (OSError, TypeError, IndexError):
        return None
    return ("h", "c") if re.search(rf"^\s*\(?\w+\s*,\s*\w+\)?\s*=\s*{name}\s*$", source, re.MULTILINE) else None


def starts_by_number(module: nn.Module) -> bool:
    """Say whether a cell's own `initial_state` can be called with a number of rows; some want an input."""
    try:
        with untouched(module), torch.no_grad():
            return bool(flatten(call_initial_state(module, 2))[0])
    except Exception:  # whatever a user's method raises means no
        return False


def call_initial_state(module: nn.Module, batch: int) -> Any:
    """Call a cell's own `initial_state`, or what makes its first state under another name."""
    return call_first_state(module, own_start(module) or "initial_state", batch)


def call_first_state(module: nn.Module, name: str, *rows: int) -> Any:
    """Call a method that makes a first state, with device and dtype where it insists on them."""
    method: Callable[..., Any] = getattr(module, name)
    device, dtype = weights_like(module)
    extra = {"device": device, "dtype": dtype}
    parameters = inspect.signature(method).parameters.values()
    needed = {p.name: extra[p.name] for p in parameters if p.name in extra and p.default is p.empty}
    return method(*rows, **needed)


def remember(module: nn.Module, units: int, start: str | None) -> None:
    """Remember how large the state of a cell is that does not say so, and which of its methods makes the first one."""
    _learned[module] = units, start


def units_of(module: nn.Module) -> int | None:
    """Return how many units the state of a cell has: as it says, or as was learned; None where nobody knows."""
    units = getattr(module, "hidden_size", None)
    return units if is_int(units) else _learned.get(module, (None, None))[0]


def own_start(module: nn.Module) -> str | None:
    """Return the name of the method that makes a cell's first state; None where it begins with zeros."""
    return "initial_state" if hasattr(module, "initial_state") else _learned.get(module, (0, None))[1]


def is_learned(module: nn.Module) -> bool:
    """Say whether a module was seen to take and give back a state as a cell does, whatever it says of itself."""
    return module in _learned


def is_int(value: object) -> bool:
    """Say whether this is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


_NAMES = ("input_size", "in_features", "input_dim", "n_in", "input_dims")


def invented_inputs(module: nn.Module, *shape: int, units: Sequence[int] = ()) -> Iterator[Tensor]:
    """Yield inputs `(*shape, feature)`, or tokens `(*shape)`, that a module may take, the likeliest first.

    `units` are the sizes that its state may have, where it does not say so.
    """
    device, dtype = weights_like(module)
    generator = torch.Generator().manual_seed(0)
    widths: set[int] = set()
    tables: set[int] = set()
    for size, is_vocabulary in _sizes(module, units):
        if size < 1 or size in (tables if is_vocabulary else widths):
            continue
        (tables if is_vocabulary else widths).add(size)
        if is_vocabulary:
            yield torch.randint(size, shape, generator=generator).to(device)
        else:
            yield torch.randn(*shape, size, generator=generator, dtype=torch.float64).to(device, dtype)
    if not tables:
        yield torch.zeros(shape, dtype=torch.int64, device=device)  # tokens that are looked up in some other way


def _sizes(module: nn.Module, units: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield sizes and whether each is that of a vocabulary."""
    hidden = units_of(module)
    for inner in module.modules():
        if isinstance(inner, nn.Embedding):
            yield inner.num_embeddings, True
        for size in (getattr(inner, name, None) for name in _NAMES):
            if isinstance(size, int):
                yield size, False
    for size in units if hidden is None else (hidden,):  # products with x and h side by side
        for inner in module.modules():
            if isinstance(inner, nn.Linear):
                yield inner.in_features - size, False
    for parameter in module.parameters():
        if parameter.dim() == 2:
            yield parameter.shape[0], False
            yield parameter.shape[1], False
