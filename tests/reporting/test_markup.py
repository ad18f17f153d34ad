"""Pages and pieces of HTML: whatever users write stays text, and every piece is closed."""

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.reporting import markup

words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
nasty = words | st.sampled_from(["</script><b>", "<i>&", '"quoted"', "'", "a & b"])


class Read(HTMLParser):
    """The elements and the text of a piece, as a browser reads them."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        if tag != "input":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@given(value=st.recursive(nasty | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=3)))
def test_json_ends_no_script_and_is_read_back_as_it_was(value):
    text = markup.as_json({"value": value})
    assert "<" not in text
    assert "\u2028" not in text
    assert json.loads(text) == {"value": value}


def test_json_without_a_number_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        markup.as_json(float("nan"))


@given(cells=st.lists(st.tuples(nasty, nasty), min_size=1, max_size=3), caption=nasty)
def test_a_table_holds_its_cells_as_text(cells, caption):
    read = Read(markup.table(("name", "value"), cells, caption))
    assert read.texts == [caption, "name", "value", *(cell for row in cells for cell in row)]
    assert set(read.tags) == {"div", "table", "caption", "thead", "tr", "th", "tbody", "td"}
    assert read.attributes[0]["aria-label"] == caption


@given(title=nasty)
def test_a_section_is_named_by_its_title(title):
    read = Read(markup.section("memory", title, "lead", "<p>body</p>"))
    assert read.texts == [title, "lead", "body"]
    assert read.attributes[0] == {"id": "memory", "aria-labelledby": "memory-title"}


@given(reason=nasty)
def test_what_was_not_measured_says_why(reason):
    assert "".join(Read(markup.unmeasured(reason)).texts) == f"Not measured: {reason}"


def test_a_figure_has_its_data_beside_it_and_words_for_those_who_cannot_see_it():
    picture = {"data": [1], "layout": {"height": 300}}
    read = Read(markup.figure("curve", picture, "<strong>Half &lt;life&gt;</strong>: 3", table="<p>facts</p>"))
    plot = next(found for found in read.attributes if found.get("role") == "img")
    assert plot["aria-label"] == "Half <life>: 3"
    assert plot["data-figure"] == "curve-data"
    assert plot["style"] == "height:300px"
    assert '{"data":[1],"layout":{"height":300}}' in read.texts
    assert read.texts[-2:] == ["As a table", "facts"]


def test_one_panel_needs_no_tabs_and_of_several_the_first_is_chosen():
    assert markup.tabs("parts", "Show", {"h": "<p>h</p>"}) == "<p>h</p>"
    read = Read(markup.tabs("parts", "Show", {"h": "<p>1</p>", "<c>": "<p>2</p>"}))
    buttons = [found for tag, found in zip(read.tags, read.attributes, strict=True) if tag == "input"]
    assert ["checked" in button for button in buttons] == [True, False]
    assert read.texts == ["Show", "h", "<c>", "1", "2"]


@given(text=nasty)
def test_an_anchor_is_letters_digits_and_dashes(text):
    found = markup.anchor(text)
    assert found
    assert all(letter.isascii() and (letter.isalnum() or letter == "-") for letter in found)


def test_an_anchor_can_be_read():
    assert (markup.anchor("encoder.lstm.l0"), markup.anchor("")) == ("encoder-lstm-l0", "model")


def test_a_page_holds_its_title_its_contents_and_who_made_it():
    page = markup.document(
        "<run>", markup.contents({"a": "One", "b": "Two"}, {"b": "<ul></ul>"}), "<p>body</p>", "monitor.report()"
    )
    assert "<title>&lt;run&gt;</title>" in page
    assert re.findall(r'<li><a href="#(\w)">(\w+)</a>(<ul></ul>)?</li>', page) == [
        ("a", "One", ""),
        ("b", "Two", "<ul></ul>"),
    ]
    assert "<p>body</p><footer>Made by <code>monitor.report()</code>" in page


def test_no_number_breaks_out_of_its_tile():
    made = markup.tiles([("warning", "<3>", "findings", "a & b")])
    assert '<div class="tile warning"><dt>findings</dt><dd>&lt;3&gt;</dd><dd class="small">a &amp; b</dd></div>' in made
