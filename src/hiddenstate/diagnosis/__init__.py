"""Verdicts: what is wrong with a model's state, how we know, and what to change."""

from .diagnose import diagnose
from .finding import Finding
from .monitor import Episode, Monitor
from .report import Report
from .thresholds import Thresholds
from .writers import CsvWriter, JsonlWriter, Writer

__all__ = [
    "CsvWriter",
    "Episode",
    "Finding",
    "JsonlWriter",
    "Monitor",
    "Report",
    "Thresholds",
    "Writer",
    "diagnose",
]
