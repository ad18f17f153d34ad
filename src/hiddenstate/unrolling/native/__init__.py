"""Loops as C: a body's graph is written as C code, compiled, and run without Python between steps."""

from .runner import CompiledRunner, Unsupported

__all__ = ["CompiledRunner", "Unsupported"]
