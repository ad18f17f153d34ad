"""Diagnosis: what is wrong with a model's state, how we know, and what to change."""

from .diagnose import diagnose
from .episodes import Episode
from .monitor import Monitor
from .report import Finding, Report
from .thresholds import Thresholds
from .writers import CsvWriter, JsonlWriter, MonitorWriter

Writer = MonitorWriter  # its older name, which stays promised

__all__ = [
    "CsvWriter",
    "Episode",
    "Finding",
    "JsonlWriter",
    "Monitor",
    "MonitorWriter",
    "Report",
    "Thresholds",
    "Writer",
    "diagnose",
]
