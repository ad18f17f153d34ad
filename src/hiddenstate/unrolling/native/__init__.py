"""Loops as C: a body's graph is written as C code, compiled, and run without Python between steps."""

from .products import own_products, product
from .runner import CompiledRunner, Unsupported

__all__ = ["CompiledRunner", "Unsupported", "own_products", "product"]
