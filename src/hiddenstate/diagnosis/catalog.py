"""Every code the doctor knows, with its title; each has a page in docs/findings."""

from __future__ import annotations

TITLES = {
    "HS101": "samples of a batch influence each other",
    "HS102": "a step sees the future",
    "HS103": "state ignored",
    "HS104": "input ignored",
    "HS105": "gradient cut",
    "HS106": "padding counts",
    "HS107": "last step of a bidirectional output",
    "HS108": "split is not whole",
    "HS109": "wrong slice of the final state",
    "HS110": "row order lost around packing",
    "HS201": "state survives from call to call",
    "HS202": "random initial state in eval",
    "HS203": "the graph grows",
    "HS204": "one batch size only",
    "HS205": "not registered",
    "HS206": "learned initial state that is not trained",
    "HS207": "state changed in place",
    "HS301": "double non-linearity",
    "HS302": "gate or weight computed, never used",
    "HS303": "two gates always identical",
    "HS304": "gate or state beyond its bound",
    "HS305": "dropout on a single layer",
    "HS401": "NaN or Inf",
    "HS402": "saturated",
    "HS403": "dead or all zero",
    "HS404": "identical across the batch",
    "HS405": "constant over time",
    "HS501": "gradient vanishes through time",
    "HS502": "gradient explodes through time",
    "HS503": "parameters without gradient",
    "HS504": "parameters missing from the optimizer",
}

# code -> the codes that are its consequences: where the first is an error or a warning, the others are left out.
CONSEQUENCES = {
    "HS401": {
        *("HS101", "HS102", "HS103", "HS104", "HS105", "HS106", "HS108", "HS110", "HS201", "HS202", "HS402", "HS403"),
        *("HS404", "HS405", "HS501", "HS502", "HS503", "HS302", "HS304"),
    },
    "HS110": {"HS101", "HS106", "HS204"},
    "HS101": {
        *("HS102", "HS103", "HS104", "HS105", "HS106", "HS107", "HS108", "HS110", "HS302", "HS404", "HS405", "HS501"),
        *("HS502", "HS503"),
    },
    "HS103": {"HS105", "HS108", "HS302", "HS501", "HS503"},
    "HS104": {"HS302", "HS404", "HS405", "HS503"},
    "HS105": {"HS302", "HS501", "HS503"},
    "HS107": {"HS106", "HS109", "HS302", "HS503"},
    "HS109": {"HS102", "HS103", "HS104", "HS106", "HS107", "HS302", "HS503", "HS501"},
    "HS201": {"HS108", "HS202"},
    "HS205": {"HS202", "HS503", "HS504"},
    "HS206": {"HS205", "HS302", "HS503", "HS504"},
    "HS302": {"HS503"},
    "HS303": {"HS302", "HS503"},
    "HS207": {"HS101", "HS102", "HS105", "HS108", "HS110", "HS201", "HS302", "HS501", "HS502", "HS503"},
    "HS403": {"HS103", "HS104", "HS303", "HS402", "HS501", "HS503", "HS302"},
    "HS405": {"HS403", "HS404"},
    "HS502": {"HS104", "HS304"},
}
