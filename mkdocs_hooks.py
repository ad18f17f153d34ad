"""What the site adds to the pages in docs/: the pages at the root of the repository, and a navigation without gaps.

In mkdocs.yml an entry of the navigation may be a pattern, which stands for all pages that match it, or a lone star,
which stands for all that no other entry names: a new page is in the navigation as soon as it is written.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

SHIM = "https://unpkg.com/iframe-worker/shim"
ROOT = Path(__file__).parent
AT_THE_ROOT = {f"{name}.md": f"{name.lower()}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")}
LINK = re.compile(r"(?<!\!)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Replace each pattern of the navigation by the pages it stands for."""
    folder = Path(config.docs_dir)
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    leaves = _leaves(config.nav)
    exactly = set(leaves)
    pages = [page for page in pages if page in exactly or not config.not_in_nav.match_file(page)]
    named = {page for page in pages if any(leaf != "*" and fnmatch(page, leaf) for leaf in leaves)}

    def expand(entry: Any) -> list[Any]:
        if isinstance(entry, list):
            return [one for part in entry for one in expand(part)]
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            inside = inner if isinstance(inner, str) and "*" not in inner else expand(inner)
            return [{title: inside}] if inside else []
        if entry == "*":
            return [page for page in pages if page not in named]
        return [page for page in pages if fnmatch(page, entry) and page not in exactly] if "*" in entry else [entry]

    config.nav = expand(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages at the root of the repository to the site."""
    for name, page in AT_THE_ROOT.items():
        # Written for the root; on the site it stands where docs/ is.
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to pages at the root to their copies; what else lies outside the site is named, not linked."""
    depth = page.file.src_uri.count("/")
    generated = page.file.src_uri in AT_THE_ROOT.values()
    here = ROOT if generated else (ROOT / "docs" / page.file.src_uri).parent

    def lead(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        path = (here / target).resolve()
        if path.parent == ROOT and path.name in AT_THE_ROOT:
            return f"[{text}]({'../' * depth}{AT_THE_ROOT[path.name]}{anchor})"
        outside = path.exists() and not path.is_relative_to(ROOT / "docs")
        return text if outside else match[0]

    return LINK.sub(lead, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Take the shim that lets the search work on file:// from the site itself, not from a network."""
    return output.replace(SHIM, f"{'../' * page.file.src_uri.count('/')}assets/iframe-worker.js")


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for pages that are no Markdown, such as the one for a missing page."""
    return output_content.replace(SHIM, "/assets/iframe-worker.js")


def _leaves(entry: Any) -> list[str]:
    if isinstance(entry, dict):
        return [leaf for inner in entry.values() for leaf in _leaves(inner)]
    if isinstance(entry, list):
        return [leaf for inner in entry for leaf in _leaves(inner)]
    return [entry]
