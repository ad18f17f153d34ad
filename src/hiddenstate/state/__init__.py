"""What a hidden state is: named tensors at one instant."""

from .files import load
from .rows import Rows
from .value import State

__all__ = ["Rows", "State", "load"]
