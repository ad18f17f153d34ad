"""One page: pictures, numbers and verdicts about a model's hidden state, in a file that needs no network."""

from .report import report
from .running import misfit

__all__ = ["misfit", "report"]
