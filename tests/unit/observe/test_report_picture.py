"""The README's picture of a report."""

from __future__ import annotations

from PIL import Image

from tests.conftest import REPOSITORY
from tools.report_picture import DIGEST, sources_digest

PICTURE = REPOSITORY / ".github" / "pictures" / "report.png"


def test_the_picture_shows_the_page_as_it_is_now() -> None:
    with Image.open(PICTURE) as image:
        drawn_by = image.text.get(DIGEST)
    assert drawn_by == sources_digest(), (
        "the page has changed since its picture was taken: run "
        f"`python tools/report_picture.py runs/demo {PICTURE.relative_to(REPOSITORY)}` "
        "(after `make demo`), and look at it"
    )
