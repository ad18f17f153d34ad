"""`hiddenstate::unroll`: a module run along time as one operator, so that a graph of torch's holds it whole.

The operator runs the module itself, by whichever engine: a graph does not depend on what is decided there. What the
backward pass needs stays beside the graph, under a number that the graph hands on, as long as the graph keeps it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch_names import lookup
from ..errors import BadInput, Untraceable
from .contracts import Contract, check_leaves, found_contract, leaves_of
from .unsaved import unsaved

_force_keys = lookup("torch._C._ForceDispatchKeyGuard")
_included, _excluded = (lookup(f"torch._C._dispatch_tls_local_{which}_set") for which in ("include", "exclude"))


def _eager_keys() -> tuple[Any, Any] | None:
    """Return which dispatch keys are at work where nothing is: in a thread of its own, since this may be a trace."""
    if _included is None or _excluded is None:
        return None
    with ThreadPoolExecutor(1) as thread:
        found: tuple[Any, Any] = thread.submit(lambda: (_included(), _excluded())).result()
    return found


_EAGER = _eager_keys()
AVAILABLE = _force_keys is not None and _EAGER is not None  # else calls stay out of graphs


@dataclass(frozen=True, slots=True, eq=False)
class KeptRun:
    """A run whose backward pass may come: what came out, with its graph, and the tensors that wait for gradients."""

    outputs: list[Tensor]
    leaves: list[Tensor]


_kept: dict[int, KeptRun] = {}
_numbers = itertools.count(1)
_TAGS = tuple(
    getattr(torch.Tag, tag) for tag in ("nondeterministic_seeded", "cudagraph_unsafe") if hasattr(torch.Tag, tag)
)


@torch.library.custom_op(
    "hiddenstate::unroll",
    mutates_args=(),
    schema="(str cell, Tensor[] held, Tensor x, Tensor[] state, Tensor?[] marks, bool[] wanted) -> Tensor[]",
    tags=_TAGS,
)
def unroll_operator(
    cell: str,
    held: Sequence[Tensor],
    x: Tensor,
    state: Sequence[Tensor],
    marks: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Return outputs, the parts of the final state, and the number under which the run is kept.

    `marks` are the lengths and the resets; `wanted` says of each of the other tensors whether it waits for a gradient.
    """
    contract, count, (lengths, resets) = found_contract(cell), len(held), marks
    with _as_users_run(), unsaved(), torch.set_grad_enabled(any(wanted)):
        leaves = [_leaf(tensor, asked) for tensor, asked in zip((*held, x, *state), wanted, strict=True)]
        out, final = contract.run(leaves[:count], leaves[count], leaves[count + 1 :], lengths=lengths, resets=resets)
    outputs = [out, *final.values()]
    _check_shapes(contract, outputs, x)
    number = torch.tensor(next(_numbers), device="cpu")
    if any(wanted):
        asked = [leaf for leaf, needed in zip(leaves, wanted, strict=True) if needed]
        module = contract.module()
        assert module is not None
        check_leaves(module, leaves_of(outputs), asked)
        _keep(number, KeptRun(outputs, asked))
    # Copies: whoever compiles the graph may write into what it was given.
    return [*(output.detach().clone(memory_format=torch.contiguous_format) for output in outputs), number]


@unroll_operator.register_fake
def _shapes(
    cell: str,
    held: Sequence[Tensor],
    x: Tensor,
    state: Sequence[Tensor],
    marks: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor]:
    made = [x.new_empty(shape, dtype=dtype) for shape, dtype in found_contract(cell).shapes(x)]
    return [*made, torch.empty((), dtype=torch.int64, device="cpu")]


@torch.library.custom_op(
    "hiddenstate::unroll_backward",
    mutates_args=(),
    schema="(Tensor number, Tensor[] given, Tensor[] grads) -> Tensor[]",
    tags=_TAGS[1:],
)
def backward_operator(number: Tensor, given: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the tensors that wait for one."""
    kept = _kept.get(int(number))
    if kept is None:
        raise Untraceable(
            "the backward pass of a cell in a graph of torch's comes when what it needs is gone: the graph was copied, "
            "moved to another process or kept by hooks on saved tensors. Keep the call out of the graph with "
            "torch.compiler.disable."
        )
    pairs = [(out, grad) for out, grad in zip(kept.outputs, grads, strict=True) if out.requires_grad]
    roots, seeds = [out for out, _ in pairs], [grad.to(out.dtype) for out, grad in pairs]
    # Of a tensor that is given twice, as tied weights are, all of the gradient goes to its first place.
    leaves = {id(leaf): leaf for leaf in kept.leaves}
    # Kept for a second backward pass through the same graph; it goes when the graph does.
    grads = torch.autograd.grad(roots, tuple(leaves.values()), seeds, retain_graph=True, allow_unused=True)
    found = dict(zip(leaves, grads, strict=True))
    made = [found.pop(id(leaf), None) for leaf in kept.leaves]
    whole = torch.contiguous_format
    return [
        torch.zeros_like(leaf, memory_format=whole) if grad is None else grad.clone(memory_format=whole)
        for grad, leaf in zip(made, kept.leaves, strict=True)
    ]


@backward_operator.register_fake
def _grad_shapes(number: Tensor, given: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in given]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, held, x, state, _, wanted = inputs
    tensors = (*held, x, *state)
    ctx.wanted, ctx.held = wanted, len(held)
    ctx.outputs = [(out.shape, out.dtype, out.device) for out in output[:-1]]
    ctx.save_for_backward(output[-1], *(tensor for tensor, asked in zip(tensors, wanted, strict=True) if asked))


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    number, *given = ctx.saved_tensors
    whole = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.outputs, strict=False)
    ]
    waiting = iter(torch.ops.hiddenstate.unroll_backward(number, given, whole))
    found = [next(waiting) if asked else None for asked in ctx.wanted]
    return None, found[: ctx.held], found[ctx.held], found[ctx.held + 1 :], None, None


def _no_second(ctx: Any, *grads: Any) -> Any:
    raise Untraceable(
        "second derivatives of a cell in a graph of torch's are not there: its backward pass is one operator. Keep the "
        "call out of the graph with torch.compiler.disable."
    )


unroll_operator.register_autograd(_backward, setup_context=_setup)
backward_operator.register_autograd(_no_second)


def kept_runs() -> int:
    """Return how many runs wait for a backward pass."""
    return len(_kept)


def _keep(number: Tensor, run: KeptRun) -> None:
    key = int(number)
    _kept[key] = run
    weakref.finalize(number, _kept.pop, key, None)


def _leaf(tensor: Tensor, asked: bool) -> Tensor:
    """Return the tensor itself where it can wait for a gradient, so that a cell's own weights are known as such."""
    if asked and tensor.is_leaf and tensor.requires_grad:
        return tensor
    return tensor.detach().requires_grad_() if asked else tensor


def _check_shapes(contract: Contract, outputs: Sequence[Tensor], x: Tensor) -> None:
    expected = contract.shapes(x)
    found = [(tuple(output.shape), output.dtype) for output in outputs]
    if len(found) == len(expected) and all((tuple(e[0]), e[1]) == f for e, f in zip(expected, found, strict=True)):
        return
    raise BadInput(
        f"a graph expects {contract.name} to give {_listed(expected)}, as when it was compiled, but now it "
        f"gives {_listed(found)}. Often something of the module was changed since: torch.compiler.reset() has all "
        f"compiled anew; a state that changes its shape stays out of a graph, by torch.compiler.disable."
    )


def _listed(kinds: Sequence[tuple[tuple[Any, ...], torch.dtype]]) -> str:
    return ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in kinds)


@contextmanager
def _as_users_run() -> Iterator[None]:
    """Run as users' own code does: an operator is called below autograd and autocast, and ours needs both."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad(), _force_keys(*_EAGER):  # type: ignore[misc]
            yield
    else:
        with _force_keys(*_EAGER):  # type: ignore[misc]
            yield
