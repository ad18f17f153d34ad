"""The sections of the page: each says what was measured, and why something was not."""

import dataclasses
import json
import re

import pytest
import torch
from torch import nn

from hiddenstate.reporting import sections
from hiddenstate.reporting.evidence import Unmeasured, gather
from tests.reporting.conftest import TEXT, Sick, Tagger
from tests.support.calling import plain_call

SECTIONS = {
    "findings": sections.findings,
    "layers": sections.layers,
    "states": sections.states,
    "memory": sections.memory,
    "distances": sections.distances,
    "trajectories": sections.trajectories,
    "spectrum": sections.spectrum,
}


def evidence_of(model, x, **options):
    plain = {"tokens": None, "labels": None, "lengths": None, "batch_axis": 0, "doctor": {}, "tell": lambda _: None}
    return gather(plain_call(model, x), **{**plain, **options})


@pytest.fixture(scope="module")
def evidence():
    torch.manual_seed(0)
    x = torch.tensor([[ord(symbol) for symbol in TEXT], [ord("x")] * len(TEXT), list(range(len(TEXT)))])
    return evidence_of(Tagger(), x, tokens=list(TEXT), labels=["text", "constant <i>", "rising"])


@pytest.fixture(scope="module")
def sick():
    torch.manual_seed(0)
    return evidence_of(Sick(), torch.randint(0, 128, (4, 9)))


def data(html, name):
    """The data of the figure with that name."""
    return json.loads(re.search(rf'id="{name}-data">(.*?)</script>', html).group(1))["data"]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_its_name_and_one_title(evidence, name):
    html = SECTIONS[name](evidence)
    assert html.startswith(f'<section id="{name}"')
    assert html.count("<h2") == 1
    assert "constant <i>" not in html


def test_findings_are_told_in_order_with_the_first_one_open(sick):
    html = sections.findings(sick)
    codes = re.findall(r'<span class="code">(\w+)</span>', html)
    assert codes == [finding.code for finding in sick.findings]
    assert html.count(" open>") == 1
    assert html.index(" open>") < html.index(codes[0])


def test_a_healthy_model_is_said_to_be(evidence):
    assert "<strong>Nothing found.</strong>" in sections.findings(evidence)


@pytest.mark.parametrize("name", ["findings", "memory"])
def test_what_could_not_be_measured_is_said_in_its_place(evidence, name):
    without = dataclasses.replace(evidence, findings=Unmeasured("no <time>"), memory=Unmeasured("no <time>"))
    assert '<p class="unmeasured">Not measured: no &lt;time&gt;</p>' in SECTIONS[name](without)


def test_every_layer_has_a_line_with_its_sizes(evidence):
    html = sections.layers(evidence)
    assert re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", html)[7:] == [
        "lstm", "lstm", "h 10, c 10", "2", "forward", "6", f"{sum(w.numel() for w in Tagger().lstm.parameters()):,}",
    ]  # fmt: skip


def test_every_part_and_gate_of_every_track_is_drawn(evidence):
    html = sections.states(evidence)
    for track in evidence.tracks:
        for part in (*track.traj.states, *track.traj.gates):
            (trace,) = data(html, f"track-{track.name.replace('.', '-')}-{part}")
            torch.testing.assert_close(torch.tensor(trace["z"]), track.traj.part(part)[0].T, rtol=5e-3, atol=1e-3)


def test_of_more_tracks_than_fit_the_rest_is_named():
    found = evidence_of(nn.GRU(2, 2, num_layers=sections.TRACKS + 1, batch_first=True), torch.randn(2, 4, 2))
    html = sections.states(found)
    assert f"Of 9 tracks 8 are drawn, not: l{sections.TRACKS}</p>" in html
    assert f'id="track-l{sections.TRACKS}"' not in html


def test_the_memory_curve_is_there_with_its_sentence(evidence):
    html = sections.memory(evidence)
    torch.testing.assert_close(
        torch.tensor(data(html, "memory-curve")[2]["y"]), evidence.memory.curve, rtol=1e-3, atol=0
    )
    assert str(evidence.memory)[1:] in html


def test_an_input_that_moves_nothing_has_no_curve(evidence):
    still = dataclasses.replace(evidence.memory, input_reaches=False)
    html = sections.memory(dataclasses.replace(evidence, memory=still))
    assert "the input does not move the output at all" in html
    assert "memory-curve" not in html


def test_distances_are_those_between_steps_and_between_rows(evidence):
    html = sections.distances(evidence)
    h = evidence.tracks[-1].traj.h[0]
    for name, expected in (("steps", torch.cdist(h, h)), ("rows", evidence.comparison.distances)):
        (trace,) = data(html, f"distances-{name}")
        torch.testing.assert_close(torch.tensor(trace["z"]), expected, rtol=5e-3, atol=1e-2)


def test_equal_labels_are_told_apart(evidence):
    html = sections.distances(dataclasses.replace(evidence, labels=["same", "same", "other"]))
    assert data(html, "distances-rows")[0]["x"] == ["0: same", "1: same", "other"]


def test_one_state_alone_has_no_distances():
    html = sections.distances(evidence_of(nn.GRU(2, 3, batch_first=True), torch.randn(1, 1, 2)))
    assert "Not measured: there is one state only." in html


def test_each_row_has_its_path(evidence):
    assert [path["name"] for path in data(sections.trajectories(evidence), "paths")] == evidence.labels


def test_states_that_are_not_finite_have_no_path():
    html = sections.trajectories(evidence_of(nn.GRU(2, 3, batch_first=True), torch.full((1, 4, 2), torch.nan)))
    assert "Not measured: there is no state without NaN or Inf: nothing is left to project." in html


def test_the_spectrum_is_drawn_for_each_layer_or_says_why_not(evidence):
    assert data(sections.spectrum(evidence), "spectrum-lstm")
    both = evidence_of(nn.GRU(2, 3, bidirectional=True, batch_first=True), torch.randn(2, 4, 2))
    assert "Not measured: it runs in both directions: there is no single next state." in sections.spectrum(both)


@pytest.mark.parametrize(("value", "shown"), [(3.14159, "3.14"), (float("inf"), "∞"), (float("nan"), "–")])
def test_a_number_fits_on_a_tile(value, shown):
    assert sections.number(value) == shown
