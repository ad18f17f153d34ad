"""The picture of a report in the README: run the demo, then python -m tests.reporting.picture demo/report.html."""

import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.support.browser import browser

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "assets" / "report.png"


def take(report: Path) -> None:
    """Photograph the top of a report."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as context:
        page = context.new_page()
        page.set_viewport_size({"width": 1180, "height": 1480})
        page.goto(report.resolve().as_uri())
        page.wait_for_selector(".plot[data-drawn]")
        page.wait_for_timeout(500)
        page.screenshot(path=PICTURE)
    Image.open(PICTURE).convert("RGB").quantize(200).save(PICTURE, optimize=True)


if __name__ == "__main__":
    take(Path(sys.argv[1]))
