"""Verdicts: what is wrong with a model's state, how we know, and what to change."""

from .diagnose import diagnose
from .finding import Finding
from .report import Report
from .thresholds import Thresholds

__all__ = ["Finding", "Report", "Thresholds", "diagnose"]
