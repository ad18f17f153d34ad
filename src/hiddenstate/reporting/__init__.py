"""Reports: one page of pictures, numbers and verdicts about a model's hidden state, in a file that needs no network."""

from .model_run import misfit
from .report import report

__all__ = ["misfit", "report"]
