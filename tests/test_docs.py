"""The pages: every link leads somewhere, every block of Python runs as it is printed, and the site builds strictly."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import hiddenstate

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^```(\w*)", re.MULTILINE)
LANGUAGES = {"python", "text", "console", "bash", "json", "yaml", ""}

QUESTIONS = (
    "carry-state-across-batches",
    "reset-single-rows",
    "record-every-cell-state",
    "my-custom-cell-does-not-learn",
    "train-with-k1-and-k2",
    "encoder-to-decoder",
    "see-hidden-states",
    "keep-a-hidden-state",
    "use-states-in-between",
    "debug-a-cell",
)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[int, str]]:
    """The blocks of plain Python on a page, each with the line it begins on; examples with `>>>` run as doctests."""
    text = page.read_text(encoding="utf-8")
    found = [(text[: match.start(1)].count("\n"), match[1]) for match in PYTHON.finditer(text)]
    return [(line, code) for line, code in found if not code.lstrip().startswith(">>>")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_within_the_repository_leads_somewhere(page):
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_reached_from_the_index():
    reached: set[Path] = set()
    waiting = [ROOT / "docs" / "index.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page not in reached and page in PAGES:
            reached.add(page)
            waiting += [page.parent / link for link in LINK.findall(page.read_text(encoding="utf-8"))]
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - reached == set()


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")  # within Lightning
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_the_python_on_a_page_runs_as_it_is_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # What the index says of every page: these three are imported. Blocks of a page go on from one another.
    names = {"__name__": page.stem, "torch": torch, "nn": torch.nn, "hs": hiddenstate}
    ran = []
    for line, code in blocks(page):
        # Blank lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * line + code, str(page), "exec"), names)
        ran.append(line)
    assert ran == [line for line, _ in blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_of_code_escapes_the_tests_by_its_language(page):
    opened = FENCE.findall(page.read_text(encoding="utf-8"))[::2]
    assert set(opened) <= LANGUAGES


def test_every_question_has_its_page():
    assert {page.stem for page in (ROOT / "docs" / "how-to").glob("*.md")} >= set(QUESTIONS)


def test_every_part_has_a_page_in_the_reference():
    parts = {path.name.removesuffix(".py") for path in (ROOT / "src" / "hiddenstate").iterdir()}
    parts = {name for name in parts if not name.startswith("_") and name not in ("cli", "py.typed")}
    assert {page.stem for page in (ROOT / "docs" / "api").glob("*.md")} - {"index"} == parts


def test_every_part_has_a_page_of_its_own():
    called = {"reporting": "report"}  # after the function that people call
    parts = {path.name for path in (ROOT / "src" / "hiddenstate").iterdir() if (path / "__init__.py").exists()}
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert {called.get(part, part) for part in parts} - pages == set()


def test_contributing_stays_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 52


def test_the_readme_fits_on_one_screen_with_one_picture_and_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 50
    assert len(re.findall(r"!\[[^\]]+\]\([^)]+\)", text)) == 1
    assert all(command in text for command in ("make demo", "make test"))
    ((_, example),) = blocks(ROOT / "README.md")
    assert len(example.splitlines()) <= 12


@pytest.mark.slow
def test_the_site_builds_strictly_and_every_page_is_on_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env={"NO_MKDOCS_2_WARNING": "1", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        place = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert (tmp_path / place).is_file()
        assert f'href="{place}"' in home or place.startswith(("findings/", "api/"))
    # It opens without a network: no page asks for anything elsewhere.
    for page in tmp_path.rglob("*.html"):
        asked = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text(encoding="utf-8")
        )
        assert asked == [], page


@pytest.mark.long
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are not kept in the repository"
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert "image/png" in shown


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "how-to").glob("*.md")), ids=lambda page: page.stem)
def test_every_how_to_ends_with_what_to_do_where_it_does_not_work(page):
    headings = [line for line in page.read_text().splitlines() if line.startswith("## ")]
    assert headings[-1] == "## If it does not work"
