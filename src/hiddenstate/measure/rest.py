"""Measuring a model without leaving a trace on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..cells import Hook, undisturbed


@contextmanager
def at_rest(module: nn.Module) -> Iterator[None]:
    """Hold a module in eval mode with its weights out of the graph; all is put back, also after an exception.

    Inside, gradients flow to inputs and states, whatever the grad mode outside.
    """
    weights = [(weight, weight.requires_grad) for weight in module.parameters()]
    cuda = any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers()))
    with ExitStack() as stack:
        stack.enter_context(undisturbed(module))
        stack.enter_context(_without_our_hooks(module))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if cuda:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            warnings.filterwarnings("ignore", message="(?i).*tf32")  # some versions of torch, when flags are put back
            # cuDNN has no backward for a recurrent layer in eval mode; torch's own kernels have one.
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        try:
            module.eval()
            for weight, _ in weights:
                weight.requires_grad_(False)
            yield
        finally:
            for weight, flag in weights:
                weight.requires_grad_(flag)


@contextmanager
def _without_our_hooks(module: nn.Module) -> Iterator[None]:
    # A Carry would take the states of a measurement for those of its training, a recorder for a run.
    stores = [store for member in module.modules() for store in (member._forward_hooks, member._forward_pre_hooks)]
    before = [(store, dict(store)) for store in stores if any(isinstance(hook, Hook) for hook in store.values())]
    try:
        for store, hooks in before:
            for key, hook in hooks.items():
                if isinstance(hook, Hook):
                    del store[key]
        yield
    finally:
        for store, hooks in before:
            store.clear()
            store.update(hooks)
