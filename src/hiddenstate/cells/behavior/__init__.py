"""Recurrence found by what a model does: the state of a computation is what crosses between repetitions."""
