"""Experiments with a patient, each made once in a diagnosis, when a rule first asks for what it shows."""
