"""Probes: experiments with a patient, each made once in a diagnosis, when a rule first asks for its result."""
