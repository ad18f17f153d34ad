"""Names of torch's own that torch does not promise, and what each part of the library needs them for.

A new version of torch may drop any of them. They are looked up when the library is loaded: where one is gone, an error
says so in a sentence, rather than an AttributeError in the middle of a run. What a part can do without is not listed
here: it asks `lookup`, and goes another way.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from .errors import UnsupportedTorch

# part -> name -> what it is needed for
NEEDED: dict[str, dict[str, str]] = {
    "cells": {
        "torch._C._autograd._top_saved_tensors_default_hooks": "tell a call that checkpointing may run again",
        "torch._C._autograd._unsafe_set_version_counter": "put tensors of a model back as they were",
        "torch._C._current_graph_task_id": "tell a layer that is run again within a backward pass",
        "torch._C._dynamo.eval_frame": "tell whether torch.compile is at work",
        "torch._C._is_any_autocast_enabled": "run a step of a loop again as it was run",
    },
    "recording": {
        "torch._C._get_mkldnn_enabled": "record an LSTM by the kernel that torch runs it with",
        "torch._VF": "hear the kernels of recurrent layers",
        "torch._cudnn_rnn_flatten_weight": "run one layer of a stack by cuDNN",
    },
    "diagnosis": {
        "torch._C.DisableTorchFunction": "look at a call without being traced",
        "torch.nn.modules.batchnorm._BatchNorm": "know layers that mix rows on purpose",
        "torch.nn.modules.conv._ConvNd": "know layers that look ahead on purpose",
    },
    "serve": {
        "torch._C._len_torch_dispatch_stack": "tell whether a caller's mode would change what the model computes",
        "torch._C._len_torch_function_stack": "tell whether a caller's mode would change what the model computes",
    },
}
_LOADED_LATER = {"diagnosis", "serve"}


def lookup(name: str) -> Any | None:
    """Return what a dotted name of torch's stands for, None where this version of torch has it no more."""
    _, *inner = name.split(".")
    try:
        return reduce(getattr, inner, torch)
    except AttributeError:
        return None


def require(part: str) -> None:
    """Raise `UnsupportedTorch` where a name is gone that a part cannot do without."""
    for name, what in NEEDED.get(part, {}).items():
        if lookup(name) is None:
            raise UnsupportedTorch(
                f"torch {torch.__version__} has no {name}, which hiddenstate.{part} needs to {what}. Torch does not "
                f"promise this name. Use torch 2.11 or one of the versions after it that have it, or look for a newer "
                f"hiddenstate."
            )


for _part in NEEDED.keys() - _LOADED_LATER:
    require(_part)
