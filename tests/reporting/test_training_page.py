"""The page of a training run: findings as they came and went, and what drifted along it."""

import json
import re

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.diagnosis import samples
from hiddenstate.errors import BadInput


@pytest.fixture
def run(monkeypatch):
    """A run in which saturation begins at call 4 and ends at call 8, of a model called <b>."""
    monkeypatch.setattr(samples, "_SHARE", float("inf"))
    torch.manual_seed(0)
    model = type("Net<b>", (nn.Sequential,), {})(nn.RNN(3, 8, batch_first=True))
    with hs.Monitor(model, every=1) as monitor:
        for call in range(12):
            model((1000 if 4 <= call < 8 else 1) * torch.randn(4, 9, 3))[0].square().mean().backward()
    return monitor


def pictures(page):
    found = re.findall(r'<script type="application/json" id="([\w-]+)-data">(.*?)</script>', page)
    return {name: json.loads(text) for name, text in found}


def test_findings_are_drawn_from_their_beginning_to_their_end(run, tmp_path):
    page = run.report(tmp_path / "run.html").read_text("utf-8")
    drawn = pictures(page)["findings-along"]["data"]
    bars = {
        line: (base, length)
        for trace in drawn
        for line, base, length in zip(trace["y"], trace["base"], trace["x"], strict=True)
    }
    assert bars["HS402 saturated · 0"] == (4, 4)
    assert "<dt>calls</dt><dd>4 to 8</dd>" in page
    assert "Made by <code>monitor.report(path)</code>" in page


def test_drift_is_drawn_along_the_run_on_one_axis(run, tmp_path):
    drawn = pictures(hs.report(run, path=tmp_path / "run.html").read_text("utf-8"))
    assert {"memory-memory", "saturation-saturated", "states-norm", "gradients-gradient_first"} <= drawn.keys()
    (line,) = drawn["saturation-saturated"]["data"]
    assert line["x"] == list(range(12))
    assert [value > 0.5 for value in line["y"]] == [4 <= call < 8 for call in range(12)]
    assert len(drawn["memory-memory"]["data"][0]["x"]) == 12
    assert len({tuple(picture["layout"]["xaxis"]["range"]) for picture in drawn.values()}) == 1


def test_no_name_breaks_out(run, tmp_path):
    page = run.report(tmp_path / "run.html").read_text("utf-8")
    assert "Net&lt;b&gt; in training" in page
    assert "Net<b>" not in page


def test_a_run_without_findings_or_looks_is_a_page_too(tmp_path):
    with pytest.warns(match="not a single training call"), hs.Monitor(nn.GRU(3, 4)) as monitor:
        page = monitor.report(tmp_path / "none.html").read_text("utf-8")
    assert "Nothing found</strong> at any look" in page
    assert "0 training calls · 0 looks" in page


def test_what_was_not_looked_at_stands_among_the_findings(tmp_path):
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.memory = nn.Linear(4, 8), torch.zeros(5, 8)

        def forward(self, x):
            self.memory = torch.tanh(self.w(x) + self.memory).detach()
            return torch.tanh(self.w(x) + self.memory)

    model = Kept()
    monitor = hs.Monitor(model, every=1)

    def train():
        for _ in range(4):
            model(torch.randn(5, 4)).sum().backward()

    with pytest.warns(match="does not look at"):
        train()
    monitor.close()
    page = monitor.report(tmp_path / "kept.html").read_text("utf-8")
    assert "Not looked at: memory, kept from call to call" in page


def test_a_monitor_takes_no_inputs(run, tmp_path):
    with pytest.raises(BadInput, match=r"a report of a Monitor shows what it has seen, and takes no inputs"):
        hs.report(run, torch.randn(4, 9, 3), path=tmp_path / "run.html")
    with pytest.raises(BadInput, match="cannot be written"):
        run.report(tmp_path)
