"""Every exception and warning this library raises on purpose.

HiddenStateError              catch this to catch them all
├── StateMismatch             a state does not fit the layer, batch, device or file it meets  (ValueError)
├── StateFileError            a file does not hold a state, or no longer does                 (ValueError)
├── BadInput                  an argument cannot mean what it says                            (ValueError)
├── NotRecurrent              a module is no recurrent layer or cell, or a model has none      (TypeError)
├── CarryError                a state cannot be carried on without mixing or breaking things   (RuntimeError)
├── DiagnosisFailed           a model has a finding as grave as fail_on names                   (AssertionError)
├── LawBroken                 what `hiddenstate.testing` checks does not keep a law             (AssertionError)
├── Untraceable               a cell cannot run by a schedule, only step by step, and why          (RuntimeError)
├── MissingExtra              a library is needed that comes with an extra                     (ImportError)
├── UnsupportedTorch          this version of torch lacks a name that the library needs         (ImportError)
├── ServeError                a served session cannot do what was asked of it                  (RuntimeError)
│   ├── NotServable           a model cannot be served: pieces would not equal the whole, or rows would mix
│   ├── SessionLost           a session cannot be continued: unknown, expired, or another model's
│   ├── SessionExists         a session of this name is there already
│   ├── SequenceGap           an input does not follow the last one, and its answer is not kept either
│   ├── ModelFailed           the model raised, or gave NaN; the session is as it was
│   ├── StoreFailed           the store did not take the new states; nothing was acknowledged
│   │   └── StoreBusy         the store is locked by somebody else at this moment
│   └── Overloaded            there is no room for more sessions or inputs just now
│       └── DeadlineExceeded  the turn of an input did not come in time, so it was not applied         (TimeoutError)
├── UnknownTrack              a recording or a model has no track of this name                 (KeyError)
├── SeveralRuns               a track was run more than once: which run is meant is unclear    (LookupError)
└── RecordingFileError        a folder does not hold a recording, or no longer does            (ValueError)

HiddenStateWarning            filter this to filter them all                                   (UserWarning)
├── UnrollWarning             a cell runs step by step, and slower than it might
├── CarryWarning              carrying goes on, but not as one might think
└── RecordingWarning          the run goes on, but its recording does not
"""

__all__ = [
    "BadInput",
    "CarryError",
    "CarryWarning",
    "DeadlineExceeded",
    "DiagnosisFailed",
    "HiddenStateError",
    "HiddenStateWarning",
    "LawBroken",
    "MissingExtra",
    "ModelFailed",
    "NotRecurrent",
    "NotServable",
    "Overloaded",
    "RecordingFileError",
    "RecordingWarning",
    "SequenceGap",
    "ServeError",
    "SessionExists",
    "SessionLost",
    "SeveralRuns",
    "StateFileError",
    "StateMismatch",
    "StoreBusy",
    "StoreFailed",
    "UnknownTrack",
    "UnrollWarning",
    "UnsupportedTorch",
    "Untraceable",
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


class ServeError(HiddenStateError, RuntimeError):
    """A served session cannot do what was asked of it."""


class NotServable(ServeError):
    """A model cannot be served: its pieces would not equal the whole, or its rows would mix."""


class SessionLost(ServeError):
    """A session cannot be continued; `reason` is "unknown", "expired" or "model". A zero state is never given."""

    def __init__(self, message: str, reason: str = "unknown") -> None:
        """Say why."""
        super().__init__(message)
        self.reason = reason


class SessionExists(ServeError):
    """A session of this name is there already."""


class SequenceGap(ServeError):
    """An input does not follow the last one, and its answer is not kept either; `seq` is the last one applied."""

    def __init__(self, message: str, seq: int = 0) -> None:
        """Say what was expected."""
        super().__init__(message)
        self.seq = seq


class ModelFailed(ServeError):
    """The model raised, or gave NaN; the session is as it was."""


class StoreFailed(ServeError):
    """The store did not take the new states; nothing was acknowledged."""


class StoreBusy(StoreFailed):
    """The store is locked by somebody else at this moment."""


class Overloaded(ServeError):
    """There is no room for more sessions or inputs just now."""


class DeadlineExceeded(Overloaded, TimeoutError):
    """The turn of an input did not come in time, so it was not applied."""


class UnknownTrack(HiddenStateError, KeyError):
    """A recording or a model has no track of this name."""

    __str__ = Exception.__str__  # a KeyError would show its message in quotes


class SeveralRuns(HiddenStateError, LookupError):
    """A track was run more than once, so which run is meant is unclear."""


class RecordingFileError(HiddenStateError, ValueError):
    """A folder does not hold a recording, or no longer does."""


class Untraceable(HiddenStateError, RuntimeError):
    """A cell cannot run by a schedule, only step by step: the reason, and the line where it shows."""

    def __init__(self, reason: str, line: str = "") -> None:
        """Keep the reason as half a sentence that goes on from 'because'."""
        super().__init__(f"{reason} ({line})" if line else reason)
        self.reason, self.line = reason, line


class DiagnosisFailed(HiddenStateError, AssertionError):
    """A model has a finding as grave as `fail_on` names, or graver."""


class LawBroken(HiddenStateError, AssertionError):
    """A cell, adapter, store or rule does not keep a law that the library relies on; the message says which."""


class UnsupportedTorch(HiddenStateError, ImportError):
    """This version of torch lacks a name, not promised by torch, that the library needs."""


class HiddenStateWarning(UserWarning):
    """Something goes on, but perhaps not as one might think."""


class UnrollWarning(HiddenStateWarning):
    """A cell runs step by step, and slower than it might."""


class CarryWarning(HiddenStateWarning):
    """Carrying goes on, but perhaps not as one might think."""


class RecordingWarning(HiddenStateWarning):
    """The run goes on, but its recording does not."""
