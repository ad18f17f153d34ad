"""The command line: `hiddenstate demo | layers | diagnose | report | bench | serve`."""

from .app import main

__all__ = ["main"]
