"""Trial calls that show what a module's state looks like; if there are no inputs, they are made up from its sizes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..state import tensors
from .first_states import ROWS, Candidate, call_initial_state, candidates, remember, units_of
from .listener import unheard
from .native import Form, Native, flatten, rebuild
from .returned import parted
from .signature import arguments, give_state
from .snapshot import untouched
from .weights import weights_like

Takes: TypeAlias = Literal["step", "batch first", "time first"]

_STEPS = 5
_in_vain: WeakSet[nn.Module] = WeakSet()  # modules for which no input could be made up that they accept as a cell


def _silence(module: nn.Module) -> None:
    """Remove all hooks, inside `untouched`, which restores them: users' hooks should not see a trial."""
    for member in module.modules():
        for store in (member._forward_hooks, member._forward_pre_hooks, member._backward_hooks):
            store.clear()


class StateForm(NamedTuple):
    """What a cell's state looks like: its nesting, its batch axes, and what one call takes."""

    form: Form
    axes: dict[str, int]
    takes: Takes = "step"
    sure: bool = True  # observed, not guessed


def try_out(module: nn.Module, natives: Sequence[Candidate], sample: Tensor | None = None) -> StateForm | None:
    """Call `module` with each of these native states of three rows; return the form of the first that it gives back.

    Each state comes with the batch axes of its parts. `sample (batch, ...)` is a real step; without it, sizes are
    guessed.
    """
    with untouched(module), unheard(), torch.no_grad():
        module.eval()  # in training mode, batch normalization would mix the rows
        _silence(module)
        steps = list(_steps(module, sample))
        for takes in ("step", "batch first", "time first"):
            for x in steps:
                for native, axes in natives:
                    if _fits(module, x, native, takes) and _rows_apart(module, x, (native, axes), takes):
                        return StateForm(flatten(native)[1], axes, takes)
    return None


def learn(
    module: nn.Module, sample: Tensor | None = None, *, parts: int | None = None, handed: Any = None
) -> StateForm | None:
    """Find and remember the form of a cell's state, for a cell that does not say its size; return None if it fails.

    Nothing else says that this is a cell, so it must return the state it is given, computed anew, with its rows
    separate.

    Args:
        module: A cell that takes its state in one argument.
        sample: One step of its input, `(batch, ...)`; without it, one is made up.
        parts: The number of tensors in the state, if `module` gathers the state arguments of another cell.
        handed: A state that a call with this step was given.
    """
    owner = module if parts is None else next(module.children())
    if sample is None and owner in _in_vain:
        return None
    if sample is not None and sample.dim() > (2 if sample.is_floating_point() else 1):
        frames = all(part.dim() == sample.dim() > 3 for part in tensors(handed).values())
        if handed is None or not frames:
            return None  # the input may be a sequence: other modules than cells take a sequence and a state
    with untouched(module), unheard(), torch.no_grad():
        module.eval()
        _silence(module)
        ways, sizes = candidates(owner, sample, parts=parts, handed=handed)
        steps = [_sampled(sample)] if sample is not None else list(invented_inputs(module, ROWS, units=sizes))
        for x in steps:
            for candidate, start in ways:
                if _fits(module, x, candidate[0], "step") and _computes_rows(module, x, candidate):
                    remember(owner, candidate, start)
                    return StateForm(flatten(candidate[0])[1], candidate[1])
    if sample is None:
        _in_vain.add(owner)
    return None


def _computes_rows(module: nn.Module, x: Tensor, candidate: Candidate) -> bool:
    """Say whether a step computes a new state, each row of it from its own row of input and state alone."""
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


def _laid_out(x: Tensor, takes: Takes) -> Tensor:
    if takes == "step":
        return x
    axis = 1 if takes == "batch first" else 0
    return torch.stack([x] * _STEPS, dim=axis)


def _trial(module: nn.Module, x: Tensor, native: Native) -> tuple[Any, dict[str, Tensor]] | None:
    """Return output and state of a trial call, if it returns a state of the form it was given."""
    parts, form = flatten(native)
    try:
        args, kwargs = give_state(module, ((x,), {}), native)
        result = module.forward(*args, **kwargs)
    except Exception:  # a trial call: the user's cell does not take this form
        return None
    found = parted(module, form, result)
    if found is None:
        return None
    output, state = found[0], flatten(found[1])[0]
    return (output, state) if all(state[name].shape == part.shape for name, part in parts.items()) else None


def _rows_apart(module: nn.Module, x: Tensor, candidate: Candidate, takes: Takes) -> bool:
    """Say whether changing the first row leaves the other rows' states alone; if not, the batch axis is wrong."""
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
        # More axes than the output of one step has: the rows were taken for the steps of a sequence.
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
    """Read `h, c = state` from the source code, for cells that cannot be called on trial."""
    return None if _unpacked_names(type(module)) is None else ("h", "c")


def cell_comes_first(kind: type[nn.Module]) -> bool:
    """Say whether a cell's forward unpacks its state as `c, h = state`."""
    names = [set(name.lower().split("_")) for name in _unpacked_names(kind) or ("", "")]
    return bool(names[0] & {"c", "cx", "ct", "cell"}) and bool(names[1] & {"h", "hx", "ht", "hidden"})


def _unpacked_names(kind: type[nn.Module]) -> tuple[str, str] | None:
    taken = arguments(kind)
    return _read_unpacked(kind.forward, taken[1]) if len(taken) > 1 else None


@lru_cache(maxsize=1024)
def _read_unpacked(forward: Callable[..., Any], name: str) -> tuple[str, str] | None:
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return None
    found = re.search(rf"^\s*\(?(\w+)\s*,\s*(\w+)\)?\s*=\s*{name}\s*$", source, re.MULTILINE)
    return None if found is None else (found[1], found[2])


def starts_by_number(module: nn.Module) -> bool:
    """Say whether a cell's `initial_state` can be called with a number of rows; some require an input instead."""
    try:
        with untouched(module), torch.no_grad():
            return bool(flatten(call_initial_state(module, 2))[0])
    except Exception:  # it cannot
        return False


_NAMES = ("input_size", "in_features", "input_dim", "n_in", "input_dims")


def invented_inputs(module: nn.Module, *shape: int, units: Sequence[int] = ()) -> Iterator[Tensor]:
    """Yield inputs `(*shape, feature)`, or tokens `(*shape)`, that a module may accept, the likeliest first.

    `units` are possible sizes of its state, if it does not say its size.
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
            yield torch.randint(size, shape, generator=generator, device="cpu").to(device)
        else:
            yield torch.randn(*shape, size, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)
    if not tables:
        yield torch.zeros(shape, dtype=torch.int64, device=device)  # tokens that are looked up without an nn.Embedding


def _sizes(module: nn.Module, units: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield sizes, and for each whether it is the size of a vocabulary."""
    hidden = units_of(module)
    for inner in module.modules():
        if isinstance(inner, nn.Embedding):
            yield inner.num_embeddings, True
        for size in (getattr(inner, name, None) for name in _NAMES):
            if isinstance(size, int):
                yield size, False
    for size in units if hidden is None else (hidden,):  # weights that multiply x and h side by side
        for inner in module.modules():
            if isinstance(inner, nn.Linear):
                yield inner.in_features - size, False
    for parameter in module.parameters():
        if parameter.dim() == 2:
            yield parameter.shape[0], False
            yield parameter.shape[1], False
