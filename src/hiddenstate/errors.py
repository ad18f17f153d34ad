"""Every exception and warning this library raises on purpose.

HiddenStateError              catch this to catch them all
├── StateMismatch             a state does not fit the layer, batch, device or file it meets  (ValueError)
├── StateFileError            a file does not hold a state, or no longer does                 (ValueError)
├── BadInput                  an argument cannot mean what it says                            (ValueError)
├── NotRecurrent              a module is no recurrent layer or cell, or a model has none      (TypeError)
├── CarryError                a state cannot be carried on without mixing or breaking things   (RuntimeError)
└── MissingExtra              a library is needed that comes with an extra                     (ImportError)

HiddenStateWarning            filter this to filter them all                                   (UserWarning)
└── CarryWarning              carrying goes on, but not as one might think
"""

__all__ = [
    "BadInput",
    "CarryError",
    "CarryWarning",
    "HiddenStateError",
    "HiddenStateWarning",
    "MissingExtra",
    "NotRecurrent",
    "StateFileError",
    "StateMismatch",
]


class HiddenStateError(Exception):
    """Something this library refuses to do, with the way out in its message."""


class StateMismatch(HiddenStateError, ValueError):
    """A state does not fit the layer, batch, device or file it meets."""


class StateFileError(HiddenStateError, ValueError):
    """A file does not hold a state, or no longer does."""


class BadInput(HiddenStateError, ValueError):
    """An argument cannot mean what it says."""


class NotRecurrent(HiddenStateError, TypeError):
    """A module is no recurrent layer or cell, or a model has none."""


class CarryError(HiddenStateError, RuntimeError):
    """A state cannot be carried on without mixing or breaking things."""


class MissingExtra(HiddenStateError, ImportError):
    """A library is needed that comes with an extra of this one."""


class HiddenStateWarning(UserWarning):
    """Something goes on, but perhaps not as one might think."""


class CarryWarning(HiddenStateWarning):
    """Carrying goes on, but perhaps not as one might think."""
