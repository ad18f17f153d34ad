"""The page as a file: complete, self-contained, safe; the model comes back as it was."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import hiddenstate as hs
from hiddenstate.errors import BadInput, NotRecurrent
from tests.reporting.conftest import TEXT, Tagger
from tests.support.calling import plain_call
from tests.support.models import Deep
from tests.support.untouched import untouched


class Page(HTMLParser):
    """What a browser would see: ids, links, scripts, and the text of everything else."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.sources, self.open, self.texts, self.scripts = [], [], [], [], [], {}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if tag == "a" else []
        self.sources += [found[name] for name in ("src", "data") if name in found]
        if tag not in ("meta", "link", "input", "br"):
            self.open.append((tag, found))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        tag, found = self.open[-1] if self.open else ("", {})
        if tag == "script":
            self.scripts[found.get("id", f"code {len(self.scripts)}")] = data
        elif tag != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


@pytest.fixture(scope="module")
def page(pages):
    return Page(pages["healthy"])


def test_every_element_is_closed_and_every_id_is_there_once(page):
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))


def test_every_link_leads_to_a_place_on_the_page(page):
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)


def test_nothing_is_loaded_from_anywhere(pages, page):
    assert page.sources == []
    own = re.sub(r"<script>.*?</script>", "", pages["healthy"].read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.search(r"https?://|@import|url\(", own)


def test_every_section_is_there_and_in_the_contents(page):
    for name in ("findings", "layers", "states", "memory", "distances", "trajectories", "spectrum"):
        assert name in page.ids
        assert f"#{name}" in page.links


def test_every_figure_has_data_and_words(page):
    drawn = [name.removesuffix("-data") for name in page.scripts if name.endswith("-data")]
    for part in ("h", "c", "input", "forget", "candidate", "output", "gates"):
        assert f"track-lstm-l0-{part}" in drawn
    for name in drawn:
        content = json.loads(page.scripts[f"{name}-data"])
        assert content["data"]
        assert f"{name}-words" in page.ids


def test_the_states_on_the_page_are_those_of_the_model(tmp_path, tokens):
    model = Tagger()
    with hs.record(model, gates=True) as rec, torch.no_grad():
        model(tokens)
    shown = Page(hs.report(model, tokens, path=tmp_path / "r.html", tokens=list(TEXT)))
    for part, values in (("h", rec["lstm.l1"].h), ("forget", rec["lstm.l1"].gates["forget"])):
        (trace,) = json.loads(shown.scripts[f"track-lstm-l1-{part}-data"])["data"]
        torch.testing.assert_close(torch.tensor(trace["z"]), values[0].T, atol=1e-3, rtol=5e-3)
        assert trace["x"][2] == "2 · ␣"
        assert trace["y"] == list(range(10))


def test_what_users_name_cannot_break_the_page(pages, page):
    text = pages["healthy"].read_text(encoding="utf-8")
    assert "constant <i>" not in text
    assert "constant <i>" in page.text
    (trace,) = json.loads(page.scripts["track-lstm-l0-h-data"])["data"]
    assert trace["x"][TEXT.index("<")].endswith("&lt;")


def test_a_healthy_model_is_said_to_be(page):
    assert "Nothing found." in page.text


def test_findings_come_first_and_can_be_opened(pages):
    sick = Page(pages["sick"])
    assert sick.ids.index("findings") < sick.ids.index("layers")
    assert "HS101" in sick.text
    assert "batch_first" in sick.text
    assert '<details class="finding error" open>' in pages["sick"].read_text(encoding="utf-8")


def test_the_size_is_far_below_the_limit(pages):
    assert pages["healthy"].stat().st_size < 6e6


def test_a_page_about_very_many_units_is_still_a_page(tmp_path):
    model, x = nn.RNN(1, 1600, batch_first=True), torch.randn(2, 4, 1)
    path = hs.report(model, x, path=tmp_path / "wide.html")
    assert path.stat().st_size < 6e6
    text = Page(path).text
    assert "every 4th of 1,600 units" in text
    assert "1,600 coordinates: eigenvalues of matrices that large take minutes" in text


def test_a_page_about_very_many_steps_is_still_a_page(tmp_path):
    path = hs.report(nn.RNN(1, 40, batch_first=True), torch.randn(1, 3000, 1), path=tmp_path / "long.html")
    assert path.stat().st_size < 6e6
    text = Page(path).text
    assert "means of 2 of 3,000 steps" in text
    assert "1 of every 15 steps" in text


def test_the_model_comes_back_as_it_was(tmp_path, tokens):
    model = Tagger().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    carry = hs.Carry(model)
    model(tokens)
    kept = {name: part.clone() for name, part in carry.state.items()}
    own = [(sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()]
    stream = torch.get_rng_state()
    hs.report(model, tokens, path=tmp_path / "r.html")
    assert torch.equal(torch.get_rng_state(), stream)
    assert [(sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()] == own
    assert all(m.training for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(part, kept[name]) for name, part in carry.state.items())


MODELS = {
    "a bare layer": (nn.GRU(3, 5, batch_first=True), torch.randn(2, 7, 3), {}),
    "a bare layer, time first": (nn.LSTM(3, 5), torch.randn(7, 2, 3), {"batch_axis": 1}),
    "both directions": (nn.LSTM(3, 5, bidirectional=True, batch_first=True), torch.randn(2, 7, 3), {}),
    "several layers": (Deep(), torch.randn(2, 7, 3), {}),
    "one row": (nn.RNN(3, 5, batch_first=True), torch.randn(1, 7, 3), {}),
    "one step": (nn.GRU(3, 5, batch_first=True), torch.randn(2, 1, 3), {}),
    "unbatched": (nn.GRU(3, 5, batch_first=True), torch.randn(7, 3), {}),
    "relu": (nn.RNN(3, 5, nonlinearity="relu", batch_first=True), torch.randn(2, 7, 3), {}),
    "projected": (nn.LSTM(3, 5, proj_size=2, batch_first=True), torch.randn(2, 7, 3), {}),
    "in double": (nn.GRU(3, 5, batch_first=True).double(), torch.randn(2, 7, 3).double(), {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_gets_its_page(name, tmp_path):
    model, x, more = MODELS[name]
    page = Page(hs.report(model, x, path=tmp_path / "r.html", **more))
    assert page.open == []
    assert any(script.endswith("-h-data") for script in page.scripts)


class Stepper(nn.Module):
    """A cell stepped in the user's own loop."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs, 1)


def test_a_cell_in_a_loop_gets_its_page_too(tmp_path):
    page = Page(hs.report(Stepper(), torch.randn(2, 6, 3), path=tmp_path / "r.html"))
    assert "track-cell-h-data" in page.scripts
    assert "spectrum-cell-data" in page.scripts


class Generator(nn.Module):
    """A fused layer, called step by step."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x):
        state, outputs = None, []
        for step in x.split(1, dim=1):
            output, state = self.lstm(step, state)
            outputs.append(output)
        return torch.cat(outputs, dim=1)


def test_a_fused_layer_that_is_called_step_by_step_is_one_run(tmp_path):
    model, x = Generator(), torch.randn(2, 6, 3)
    page = Page(hs.report(model, x, path=tmp_path / "r.html"))
    (trace,) = json.loads(page.scripts["track-lstm-l0-h-data"])["data"]
    torch.testing.assert_close(torch.tensor(trace["z"]), model(x)[0].T, atol=1e-3, rtol=5e-3)
    assert "spectrum-lstm-data" in page.scripts


class Translator(nn.Module):
    """An encoder and a decoder, with steps of their own."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(3, 6, batch_first=True)
        self.decoder = nn.GRU(2, 6, batch_first=True)

    def forward(self, source, target):
        return {"output": self.decoder(target, self.encoder(source)[1])[0]}


def test_the_memory_of_a_decoder_reaches_into_its_encoder(tmp_path):
    page = Page(hs.report(Translator(), torch.randn(2, 7, 3), torch.randn(2, 4, 2), path=tmp_path / "r.html"))
    assert len(json.loads(page.scripts["memory-curve-data"])["data"][2]["x"]) == 7


@pytest.mark.parametrize("cell", [nn.LSTMCell(3, 5), nn.GRUCell(3, 5)], ids=["lstm", "gru"])
def test_one_step_of_a_bare_cell_gets_a_page(cell, tmp_path):
    page = Page(hs.report(cell, torch.randn(4, 3), path=tmp_path / "r.html"))
    assert "track-l0-h-data" in page.scripts


def test_packed_input_is_reported_to_its_real_length(tmp_path):
    packed = pack_padded_sequence(torch.randn(2, 7, 3), torch.tensor([5, 3]), batch_first=True)
    page = Page(hs.report(nn.GRU(3, 5, batch_first=True), packed, path=tmp_path / "r.html"))
    (trace,) = json.loads(page.scripts["track-l0-h-data"])["data"]
    assert trace["x"] == [0, 1, 2, 3, 4]


def test_nan_in_the_states_is_drawn_as_gaps_and_said(tmp_path):
    x = torch.randn(1, 6, 3)
    x[0, 3] = torch.nan
    page = Page(hs.report(nn.GRU(3, 5, batch_first=True), x, path=tmp_path / "r.html"))
    (trace,) = json.loads(page.scripts["track-l0-h-data"])["data"]
    assert trace["z"][0][3] is None
    assert "15 values are NaN or Inf" in page.text


class TestBadInput:
    def test_a_model_without_recurrence_is_refused(self, tmp_path):
        with pytest.raises(
            NotRecurrent, match=r"Linear has no recurrent layer, so there is nothing to report on.*hs.register"
        ):
            hs.report(nn.Linear(2, 2), torch.randn(1, 2), path=tmp_path / "r.html")

    def test_what_is_no_model_is_refused(self, tmp_path):
        with pytest.raises(BadInput, match=r"made of an nn.Module, but this is int"):
            hs.report(3, path=tmp_path / "r.html")

    def test_no_input_is_refused_with_the_shape_that_is_wanted(self, tmp_path):
        with pytest.raises(BadInput, match=r"needs what the model is called with.*\(batch, time, 3\)"):
            hs.report(nn.GRU(3, 5, batch_first=True), path=tmp_path / "r.html")

    def test_inputs_that_do_not_fit_are_refused_with_the_shape_that_is_wanted(self, tmp_path):
        with pytest.raises(
            BadInput, match=r"GRU cannot be called with \(2, 7, 4\) float32: .*takes \(batch, time, 3\)"
        ):
            hs.report(nn.GRU(3, 5, batch_first=True), torch.randn(2, 7, 4), path=tmp_path / "r.html")
        with pytest.raises(BadInput, match=r"first recurrent layer, the model itself, takes \(time, batch, 3\)"):
            hs.report(nn.GRU(3, 5), torch.randn(2, 7, 4), path=tmp_path / "r.html")

    @pytest.mark.parametrize(("tokens", "message"), [
        (["a"], r"1 tokens for row 0, but it has 7 steps: one for each step is needed"),
        ([["a"] * 7, ["b"] * 6], r"6 tokens for row 1, but it has 7 steps"),
        ([["a"] * 7] * 3, r"tokens for 3 rows, but the input has 2"),
    ])  # fmt: skip
    def test_a_wrong_count_of_tokens_is_refused(self, tokens, message, tmp_path):
        with pytest.raises(BadInput, match=message):
            hs.report(nn.GRU(3, 5, batch_first=True), torch.randn(2, 7, 3), tokens=tokens, path=tmp_path / "r.html")

    def test_a_wrong_count_of_labels_is_refused(self, tmp_path):
        with pytest.raises(BadInput, match="there are 1 labels, but 2 rows"):
            hs.report(nn.GRU(3, 5, batch_first=True), torch.randn(2, 7, 3), labels=["a"], path=tmp_path / "r.html")

    def test_a_path_that_cannot_be_written_is_refused_before_the_model_is_called(self, tmp_path):
        (tmp_path / "file").write_text("")
        calls = []
        model = nn.GRU(3, 5, batch_first=True)
        model.register_forward_pre_hook(lambda *_: calls.append(1))
        with pytest.raises(BadInput, match=r"cannot be written to .*file/r.html"):
            hs.report(model, torch.randn(2, 7, 3), path=tmp_path / "file" / "r.html")
        with pytest.raises(BadInput, match=r"it is a folder; a file name is needed"):
            hs.report(model, torch.randn(2, 7, 3), path=tmp_path)
        assert calls == []

    def test_an_older_page_survives_a_failure(self, tmp_path, monkeypatch):
        path = tmp_path / "r.html"
        path.write_text("older")
        monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            hs.report(nn.GRU(3, 5, batch_first=True), torch.randn(2, 7, 3), path=path)
        assert path.read_text() == "older"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_batch_axis_that_is_none_is_refused(self, tmp_path):
        with pytest.raises(BadInput, match=r"batch_axis is 0 .* or 1 .* but is 2"):
            hs.report(nn.GRU(3, 5), torch.randn(2, 7, 3), path=tmp_path / "r.html", batch_axis=2)


def test_tokens_may_be_a_string_for_each_row(tmp_path):
    page = Page(
        hs.report(nn.GRU(3, 5, batch_first=True), torch.randn(2, 3, 3), tokens=["abc", "def"], path=tmp_path / "r.html")
    )
    (trace,) = json.loads(page.scripts["track-l0-h-data"])["data"]
    assert trace["x"] == ["0 · a", "1 · b", "2 · c"]


class OwnCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size, self.inner = 3, 4, nn.Linear(7, 4)

    def forward(self, x, h):
        h = torch.tanh(self.inner(torch.cat([x, h], dim=1)))
        return h, h


@pytest.mark.parametrize("batch_axis", [0, 1])
@pytest.mark.parametrize("cell", [OwnCell(), nn.LSTMCell(3, 4), nn.GRUCell(3, 4)])
def test_a_cell_by_itself_is_stepped_along_its_input(cell, batch_axis, tmp_path):
    x = torch.randn(2, 6, 3) if batch_axis == 0 else torch.randn(6, 2, 3)
    with untouched(cell):
        page = hs.report(cell, x, batch_axis=batch_axis, path=tmp_path / "cell.html").read_text(encoding="utf-8")
    assert type(cell).__name__ in page
    assert "CellAlongTime" not in page


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(9, 4), nn.GRU(4, 5, batch_first=True)

    def forward(self, tokens):
        return self.gru(self.embed(tokens))[0]


@pytest.mark.parametrize(
    "tokens", [["abcd", "abcdef"], [list("abcd"), list("abcdef")], list("abcd")], ids=["strings", "lists", "one row"]
)
def test_tokens_are_not_asked_for_at_padded_steps(tokens, tmp_path):
    x = torch.randint(1, 9, (2, 6))
    x[0, 4:] = 0
    page = hs.report(Tokens(), x, tokens=tokens, lengths=torch.tensor([4, 6]), path=tmp_path / "tokens.html")
    assert page.exists()


def test_padding_that_only_the_user_knows_of_counts_for_nothing(tmp_path):
    from hiddenstate.reporting.evidence import gather

    x = torch.randint(1, 9, (2, 6))
    lengths = torch.tensor([4, 6])
    options = {"tokens": None, "labels": None, "batch_axis": 0, "doctor": {}, "tell": lambda _: None}
    model = Tokens()
    found = gather(plain_call(model, x), lengths=lengths, **options).tracks[0]
    assert found.traj.lengths.tolist() == [4, 6]
    assert not found.traj.h[0, 4:].any()
    expected = hs.measure.saturation(model(x).detach(), lengths=lengths)
    assert found.saturation.mean_abs == pytest.approx(expected.mean_abs, rel=1e-5)


def test_a_loader_is_reported_by_its_first_batch_and_all_its_states(tmp_path):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru = nn.Embedding(9, 4, padding_idx=0), nn.GRU(4, 6, batch_first=True)

        def forward(self, tokens):
            return self.gru(self.embed(tokens))[0]

    rows = [torch.randint(1, 9, (n,)) for n in (5, 3, 4, 6, 2)]
    batches = [torch.nn.utils.rnn.pad_sequence(rows[at : at + 2], batch_first=True) for at in (0, 2, 4)]
    model = Tagger()
    with untouched(model):
        path = hs.report(model, ((batch, torch.zeros(len(batch))) for batch in batches), path=tmp_path / "page.html")
    page = path.read_text(encoding="utf-8")
    assert "The whole data set" in page
    assert "All states of 3 batches, 5 rows" in page
    assert "<td>20</td>" in page  # real steps: padding does not count
    alone = hs.report(model, batches[0], path=tmp_path / "alone.html").read_text(encoding="utf-8")
    assert "The whole data set" not in alone


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_shown_what_is_being_done_and_nothing_else_is(tmp_path, monkeypatch, capsys, terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    hs.report(torch.nn.GRU(3, 4, batch_first=True), torch.randn(2, 9, 3), path=tmp_path / "r.html")
    said = capsys.readouterr()
    assert said.out == ""
    assert ("report: asking the doctor …" in said.err) == terminal


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_array_is_taken_as_a_tensor(tmp_path, dtype):
    x = torch.randn(3, 9, 3).numpy().astype(dtype)
    page = hs.report(nn.GRU(3, 6, batch_first=True), x, path=tmp_path / "page.html").read_text()
    assert "3 rows" in page
