"""Experiments that are run once and asked by several checks."""
