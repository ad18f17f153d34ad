"""Sick patients with the printed advice followed: what is written in place of what, or the advice itself, run as code.

`FOLLOWED` holds for each code rows of `(patient, replacements)`, where a replacement is `(old, new)` in the source of
the patient, and `RUN` stands for running the advice with the `model` (and the `optimizer`) at hand.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from tests.diagnosis.patients.asked import ASKED
from tests.diagnosis.patients.healthy import Case
from tests.diagnosis.patients.noticed import PAIRS
from tests.diagnosis.patients.sick import SICK

Row = tuple[str, tuple[tuple[str, str], ...] | str]
RUN = "run"

_PACK = "pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)"

FOLLOWED: dict[str, tuple[Row, ...]] = {
    "HS101": (
        ("batch first forgotten last step", (("M(batch_first=False)", "M()"),)),
        ("batch first forgotten tagger", (("M(batch_first=False, num_layers=2)", "M(num_layers=2)"),)),
        ("softmax over the batch", (("dim=0", "dim=-1"),)),
        (
            "normalized over the batch",
            (("x.mean(0)", "x.mean(dim=-1, keepdim=True)"), ("x.std(0)", "x.std(dim=-1, keepdim=True)")),
        ),
    ),
    "HS102": (
        ("softmax over time", (("dim=1", "dim=-1"),)),
        ("normalized over the whole sequence", (("mean(1, ", "mean(-1, "), ("std(1, ", "std(-1, "))),
        ("last state added to every step", (("out + h[-1].unsqueeze(1)", "out"),)),
        ("input rolled the wrong way", (("torch.roll(x, -1, dims=1)", "torch.cat([x[:, :1] * 0, x[:, :-1]], dim=1)"),)),
    ),
    "HS103": (
        ("state taken and not passed on", (("self.lstm(x)", "self.lstm(x, hidden)"),)),
        ("recurrent term forgotten", (("torch.tanh(self.i2h(x))", "torch.tanh(self.i2h(x) + self.h2h(h))"),)),
    ),
    "HS106": (
        (
            "last column of padded rows",
            (
                ("def forward(self, x):", "def forward(self, x, lengths):"),
                ("self.lstm(x)[0][:, -1]", "self.lstm(x)[0][torch.arange(len(x)), lengths - 1]"),
                ("(x,), {", "(x, lengths), {"),
            ),
        ),
        ("last column after unpacking", (("out[:, -1]", "out[torch.arange(len(out)), lengths - 1]"),)),
        ("lengths taken and not used", (("self.lstm(x)", f"self.lstm({_PACK})"),)),
        (
            "layernorm conv ok attention pad",
            (
                (
                    "self.a(o)",
                    "self.a(o).masked_fill(torch.arange(o.size(1))[None, :, None] >= L[:, None, None], -1e9)",
                ),
                ("def forward(self, x):", "def forward(self, x, L):"),
                ("return M(), (x,)", "return M(), (x, L)"),
            ),
        ),
    ),
    "HS107": (
        (
            "last step of a bidirectional output",
            (
                ("out, _ = self.lstm(x)", "_, (h_n, _) = self.lstm(x)"),
                ("out[:, -1, :]", "torch.cat([h_n[-2], h_n[-1]], dim=1)"),
            ),
        ),
        (
            "last step of a bidirectional output time first",
            (("self.lstm(x)[0][-1]", "torch.cat([*self.lstm(x)[1][0][-2:]], dim=1)"),),
        ),
        (
            "last valid step of a bidirectional output",
            (
                (
                    "out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)",
                    "_, (h_n, _) = self.lstm(packed)",
                ),
                ("out[torch.arange(len(x)), lengths - 1]", "torch.cat([h_n[-2], h_n[-1]], dim=1)"),
            ),
        ),
    ),
    "HS108": (
        ("returns the state it was given", (("out, _ = self.lstm(x, hidden)", "out, hidden = self.lstm(x, hidden)"),)),
        ("returns its state in the wrong order", (("(c, h)", "(h, c)"),)),
        ("returns zero state", (("tuple(torch.zeros_like(v) for v in st)", "st"),)),
    ),
    "HS109": (
        (
            "hidden state viewed instead of transposed",
            (("h.view(x.size(0), -1)", "h.transpose(0, 1).reshape(x.size(0), -1)"),),
        ),
        ("last row instead of last step", (("out[-1]", "out[:, -1]"),)),
        ("cell state instead of hidden state", (("hidden[1][-1]", "hidden[0][-1]"),)),
        ("unpacked in the wrong order", (("(c, h)", "(h, c)"),)),
    ),
    "HS110": (
        ("sorted by length and never put back", (("h[-1]", "h[-1][order.argsort()]"),)),
        ("sorted twice instead of put back", (("out[order]", "out[order.argsort()]"),)),
        ("unsort only out", (("h[-1]", "h[-1][ix.argsort()]"),)),
    ),
    "HS111": (
        (
            "packed as if rows were sorted",
            (("pack_padded_sequence(x, lengths, batch_first=True)", _PACK),),
        ),
    ),
    "HS112": (
        (
            "targets fed by chance in any mode",
            (("forced = np.random", "forced = self.training and np.random"),),
        ),
    ),
    "HS202": (
        ("random initial state", (("torch.randn(1, x.size(0), H)", "torch.zeros(1, x.size(0), H)"),)),
        ("random initial state from numpy", (("np.random.randn(x.size(0), H)", "np.zeros((x.size(0), H))"),)),
        (
            "functional dropout that never rests",
            (("F.dropout(out[:, -1], 0.5)", "F.dropout(out[:, -1], 0.5, training=self.training)"),),
        ),
        ("rand hidden init method", (("torch.rand(2", "torch.zeros(2"),)),
    ),
    "HS203": (
        (
            "hidden state kept with its graph",
            (
                (
                    "out, self.hidden = self.lstm(x, self.hidden)",
                    "out, h = self.lstm(x, self.hidden)\n            self.hidden = tuple(p.detach() for p in h)",
                ),
                ("def forward", "def reset_state(self):\n            self.hidden = None\n\n        def forward"),
            ),
        ),
    ),
    "HS204": (
        ("batch size written down", (("torch.zeros(1, B, H)", "x.new_zeros(1, x.size(0), H)"),)),
        ("squeezed batch of one", (("squeeze()", "squeeze(-1)"),)),
        ("fixed view", (("o.reshape(self.bs, 10, 8)", "o.reshape(x.size(0), 10, 8)"),)),
        ("hidden batch mismatch call", (("torch.zeros(1, self.batch_size, 8)", "x.new_zeros(1, x.size(0), 8)"),)),
    ),
    "HS206": (
        (
            "learned state that is no parameter",
            (("torch.randn(1, 1, H, requires_grad=True)", "nn.Parameter(torch.zeros(1, 1, H))"),),
        ),
        (
            "learned state that is detached",
            (("self.init_h.data.repeat(1, x.size(0), 1)", "self.init_h.expand(-1, x.size(0), -1).contiguous()"),),
        ),
        (
            "learned state that the optimizer does not know",
            (("torch.optim.Adam(params)", "torch.optim.Adam(model.parameters())"),),
        ),
    ),
    "HS207": (
        ("cell that writes into its state", (("h += self.i2h(x)", "h = h + self.i2h(x)"),)),
        ("input normalized in place", (("x -= 0.5", "x = x - 0.5"), ("x /= 2", "x = x / 2"))),
        ("zero mask state", (("hidden[:, done] = 0", "hidden = hidden.clone()\n            hidden[:, done] = 0"),)),
    ),
    "HS209": (
        (
            "trained without the state that it is used with",
            (("self.lstm(x) if self.training else self.lstm(x, state)", "self.lstm(x, state)"),),
        ),
    ),
    "HS302": (
        ("output gate never used", (("h = torch.tanh(c)", "h = o.sigmoid() * torch.tanh(c)"),)),
        ("reset gate computed and dropped", (("self.n(torch.cat([x, h], 1))", "self.n(torch.cat([x, r * h], 1))"),)),
        ("reset gate unused", (("self.n(xh)", "self.n(torch.cat([x, r * h], 1))"),)),
    ),
    "HS303": (
        ("one weight for two gates", (("f = torch.sigmoid(self.wi(xh))", "f = torch.sigmoid(self.wf(xh))"),)),
        ("same gate", (("r = torch.sigmoid(self.z(xh))", "r = torch.sigmoid(self.r(xh))"),)),
        ("layer initialized with a constant", RUN),
        ("constant init", (("nn.init.constant_(p, 0.1)", "nn.init.uniform_(p, -0.3, 0.3)"),)),
    ),
    "HS304": (
        ("sigmoid forgotten on the forget gate", (("c = f * c", "c = torch.sigmoid(f) * c"),)),
        ("tanh forgotten on the cell state", (("h = torch.sigmoid(o) * c", "h = torch.sigmoid(o) * torch.tanh(c)"),)),
        ("update gate raw", (("z = self.z(xh)", "z = torch.sigmoid(self.z(xh))"),)),
        ("gru plus", (("h + z * n", "(1 - z) * h + z * n"),)),
        ("one plus the gate", (("(1 + z) * h", "(1 - z) * h"),)),
    ),
    "HS305": (
        ("dropout on one layer", (("M(dropout=0.3)", "M(dropout=0.3, num_layers=2)"),)),
        ("dropout gru", (("dropout=0.2", "num_layers=2, dropout=0.2"),)),
    ),
    "HS306": (
        ("one layer three times in a list", RUN),
        ("shallow copies of a cell", RUN),
    ),
    "HS401": (
        ("nan in the data", (("return M(), (x,), {}", "return M(), (torch.nan_to_num(x),), {}"),)),
        ("log of zero", (("torch.log(x)", "torch.log(x.clamp(min=1e-8) + 0.5)"),)),
        ("sqrt neg", (("self.fc(self.lstm(x)[0]).sqrt()", "(self.fc(self.lstm(x)[0]).relu() + 1e-8).sqrt()"),)),
    ),
    "HS402": (
        ("inputs never scaled", (("floats() * 300 + 1000", "(floats() * 300 + 1000 - 1000) / 300"),)),
        ("unscaled inputs of an lstm", (("floats() * 500", "floats()"),)),
        ("raw prices", (("torch.randn(6, 10, 3) * 50 + 4000", "(torch.randn(6, 10, 3) * 50 + 4000 - 4000) / 50"),)),
        ("loop with weights too large", RUN),
        ("weights huge", RUN),
        ("weights huge", (("for p in m.g.parameters():\n            p.mul_(50)", "m.g.reset_parameters()"),)),
    ),
    "HS403": (
        ("weights of zero", RUN),
        ("relu pushed below zero", RUN),
        ("dead relu", RUN),
        ("update gate that lets nothing in", RUN),
    ),
    "HS404": (
        (
            "positions fed in place of the input",
            (
                ("self.emb(torch.arange(x.size(1)).expand(len(x), -1))", "x"),
                ("self.emb, self.gru = nn.Embedding(50, 6), nn.GRU(6, H", "self.gru = nn.GRU(F_IN, H"),
            ),
        ),
    ),
    "HS406": (("state rounded at every step", (("h.half().float(), c.half().float()", "h, c"),)),),
    "HS501": (
        ("weights too small for a long sequence", RUN),
        ("vanish rnn", RUN),
    ),
    "HS502": (
        ("weights too large", RUN),
        ("explode", RUN),
    ),
    "HS503": (
        ("layer left over", RUN),
        ("second rnn skipped", RUN),
        (
            "encoder detached",
            (("with torch.no_grad():\n                _, h = self.encoder(x)", "_, h = self.encoder(x)"),),
        ),
    ),
    "HS504": (
        ("optimizer made before the head", RUN),
        ("opt head only", RUN),
    ),
}


def followed(name: str, replacements: tuple[tuple[str, str], ...]) -> Case:
    """Return a patient with the replacements made in its source."""
    _, make = SICK.get(name) or ASKED[name]
    source = textwrap.dedent(inspect.getsource(make))
    source = source[source.index("def ") :]
    for old, new in replacements:
        assert old in source, f"{name}: there is no {old!r}"
        source = source.replace(old, new)
    scope = dict(vars(sys.modules[make.__module__]))
    exec(compile(source, make.__module__, "exec"), scope)
    return scope[make.__name__]()  # type: ignore[no-any-return]


def sick(name: str) -> Case:
    """Return the patient as it is."""
    return (SICK.get(name) or ASKED[name])[1]()


PAIRED: dict[str, list[tuple[str, Callable[[], Case], Callable[[], Case]]]] = {}
for _name, (_code, _sick, _healthy) in PAIRS.items():
    PAIRED.setdefault(_code, []).append((_name, _sick, _healthy))


def count(code: str) -> int:
    """Return how many patients of a code are cured by its advice."""
    return len(FOLLOWED.get(code, ())) + len(PAIRED.get(code, []))


def names() -> dict[str, Any]:
    """Return what advice that runs may use."""
    import torch
    from torch import nn

    return {"torch": torch, "nn": nn}
