"""Who makes the next state: recurrent layers and cells, found in any model."""

from .adapter import Adapter, Spec
from .custom import CellAdapter
from .finding import Layer, Layers, as_layer, layers, register, unwrap
from .hooks import Handle, Hook, uncompiled
from .native import Form, flatten, rebuild
from .probing import undisturbed

__all__ = [
    "Adapter",
    "CellAdapter",
    "Form",
    "Handle",
    "Hook",
    "Layer",
    "Layers",
    "Spec",
    "as_layer",
    "flatten",
    "layers",
    "rebuild",
    "register",
    "uncompiled",
    "undisturbed",
    "unwrap",
]
