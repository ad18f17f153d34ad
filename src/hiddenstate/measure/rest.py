"""Measuring a model without leaving a trace on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..cells import unheard, untouched


@contextmanager
def at_rest(module: nn.Module) -> Iterator[None]:
    """Hold a module in eval mode with its weights out of the graph; all is put back, also after an exception.

    Inside, gradients flow to inputs and states, whatever the grad mode outside. Those who listen
    already do not hear it: a Carry would take the states of a measurement for those of its training.
    """
    cuda = any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers()))
    with ExitStack() as stack:
        stack.enter_context(untouched(module))
        stack.enter_context(unheard())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if cuda:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            warnings.filterwarnings("ignore", message="(?i).*tf32")  # some versions of torch, when flags are put back
            # cuDNN has no backward for a recurrent layer in eval mode; torch's own kernels have one.
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        module.eval()
        for weight in module.parameters():
            weight.requires_grad_(False)
        yield
