"""What all pages share."""

import re

from hiddenstate.reporting.document import contents, document, tiles


def test_a_page_holds_its_title_its_contents_and_who_made_it():
    page = document("<run>", contents({"a": "One", "b": "Two"}, {"b": "<ul></ul>"}), "<p>body</p>", "monitor.report()")
    assert "<title>&lt;run&gt;</title>" in page
    assert re.findall(r'<li><a href="#(\w)">(\w+)</a>(<ul></ul>)?</li>', page) == [
        ("a", "One", ""),
        ("b", "Two", "<ul></ul>"),
    ]
    assert "<p>body</p><footer>Made by <code>monitor.report()</code>" in page


def test_no_number_breaks_out_of_its_tile():
    made = tiles([("warning", "<3>", "findings", "a & b")])
    assert '<div class="tile warning"><dt>findings</dt><dd>&lt;3&gt;</dd><dd class="small">a &amp; b</dd></div>' in made
