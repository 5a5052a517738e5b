"""The README's picture: the head of a report's page as PNG. Needs Chromium and the `dev` extra's playwright.

    python tools/report_picture.py runs/demo .github/pictures/report.png

The picture carries a digest of the sources that drew it, so that a test can say when it is out of date.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megagspo.errors import MegagspoError
from megagspo.observe.report import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SOURCES = Path(__file__).resolve().parent.parent / "megagspo" / "observe" / "report"
DIGEST = "megagspo-report-sources"  # the PNG's text chunk
WIDTH, HEIGHT = 1280, 1132


def chromium_path() -> str | None:
    """The system's Chromium, None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def sources_digest() -> str:
    """SHA-256 over names and contents of everything that makes the page."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        if file.suffix in (".py", ".html", ".css", ".js"):
            digest.update(f"{file.name}\n".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium that asks the network for nothing of its own."""
    from playwright.sync_api import sync_playwright

    quiet = ("background-networking", "component-update", "sync")
    arguments = ["--no-sandbox", "--disable-gpu", *(f"--disable-{what}" for what in quiet), "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@dataclass(frozen=True)
class OpenPage:
    """A page in the browser and what happened on it. complaints: errors and warnings, in words; requests: the
    addresses it asked for, its own first."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def opened(
    browser: Browser, file: Path, *, width: int, height: int = HEIGHT, dark: bool = False
) -> Iterator[OpenPage]:
    """Opens a file in a window of so many CSS pixels."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    try:
        shown = OpenPage(context.new_page())
        shown.page.on("request", lambda request: shown.requests.append(request.url))
        shown.page.on("pageerror", lambda error: shown.complaints.append(f"page error: {error}"))
        shown.page.on(
            "console",
            lambda message: (
                shown.complaints.append(f"{message.type}: {message.text}")
                if message.type in ("error", "warning")
                else None
            ),
        )
        shown.page.goto(file.resolve().as_uri())
        yield shown
    finally:
        context.close()


def picture(run: Path, destination: Path) -> None:
    """Writes the picture of a run's report, with the digest of its sources."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    with tempfile.TemporaryDirectory() as directory:
        report = write_report(run, output=Path(directory) / "report.html")
        with chromium() as browser, opened(browser, report, width=WIDTH) as shown:
            pixels = shown.page.screenshot()
    information = PngInfo()
    information.add_text(DIGEST, sources_digest())
    destination.parent.mkdir(parents=True, exist_ok=True)
    # 256 colours are enough for charts, and a third of the size.
    Image.open(io.BytesIO(pixels)).convert("RGB").quantize(256).save(
        destination, pnginfo=information, optimize=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: python tools/report_picture.py runs/demo .github/pictures/report.png",
    )
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="the directory of a run")
    parser.add_argument("png", metavar="PNG", type=Path, help="the picture to write")
    arguments = parser.parse_args()
    if chromium_path() is None:
        sys.exit(
            "error: there is no chromium on this machine: apt-get install chromium, or your system's way"
        )
    try:
        picture(arguments.run, arguments.png)
    except MegagspoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    print(f"wrote {arguments.png}")


if __name__ == "__main__":
    main()
