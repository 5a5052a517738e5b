"""`megagspo report` of a real run, looked at in a real browser."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import require
from tests.e2e.conftest import ROOT
from tools.report_picture import DIGEST, OpenPage, chromium, chromium_path, opened, sources_digest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Command = Callable[..., subprocess.CompletedProcess[str]]
STEPS = 4


@pytest.fixture(scope="session", autouse=True)
def _chromium_is_there() -> None:
    """Before any run is made."""
    require("chromium", chromium_path())


@pytest.fixture(scope="module")
def run(megagspo: Command, warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with evaluations on the way, and the scores that the demo leaves beside it."""
    runs = tmp_path_factory.mktemp("report")
    settings = ("rollout.prompts=8", "rollout.responses=8", "parallel.expert=1", "eval.every=2")
    sizes = (f"trainer.steps={STEPS}", "checkpoint.every=0", "data.eval.0.size=20")
    base = (f"model.path={warm_model}", f"run.dir={runs}", "run.name=mine")
    megagspo("train", "configs/tiny_moe_cpu.yaml", *base, *settings, *sizes)
    for name, score in (("held_out_before.json", 0.25), ("held_out.json", 0.75)):
        (runs / "mine" / name).write_text(json.dumps({"avg@1": score}))
    return runs / "mine"


@pytest.fixture(scope="module")
def report(megagspo: Command, run: Path) -> Path:
    result = megagspo("report", run)
    assert result.stdout.split()[-1] == str(run / "report.html")
    return run / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


VIEWS = [(width, dark) for width in (1280, 400) for dark in (False, True)]


@pytest.fixture(params=VIEWS, ids=[f"{width} {'dark' if dark else 'light'}" for width, dark in VIEWS])
def shown(request: pytest.FixtureRequest, browser: Browser, report: Path) -> Iterator[OpenPage]:
    width, dark = request.param
    with opened(browser, report, width=width, dark=dark) as view:
        yield view


def test_the_page_is_quiet_loads_nothing_and_fits_the_window(
    shown: OpenPage, report: Path, tmp_path: Path
) -> None:
    page = shown.page
    width = page.viewport_size["width"]
    picture = tmp_path / "page.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 50_000  # not a blank page
    assert shown.complaints == []
    assert shown.requests == [report.as_uri()]

    charts = page.locator("figure.chart")
    assert charts.count() >= 15
    for figure in charts.all():
        drawn = [plot.bounding_box() for plot in figure.locator("svg").all() if plot.is_visible()]
        assert len(drawn) == 1, figure.inner_text()
        assert drawn[0]["width"] > 250
        assert drawn[0]["height"] > 100
        assert figure.locator("svg path").count() > 3
    # Everything lies within the window, but for what its own box scrolls.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        """width => [...document.body.querySelectorAll("*")]
            .filter(e => !e.closest(".scroll table, svg") && e.getClientRects().length)
            .map(e => [e, e.getBoundingClientRect()])
            .filter(([, box]) => box.right > width + 0.5 || box.left < -0.5)
            .map(([e]) => e.outerHTML.slice(0, 120))""",
        width,
    )
    assert outside == []


def test_text_is_readable_on_its_ground(shown: OpenPage) -> None:
    """At least 4.5 to 1, as WCAG 2.1 asks (1.4.3), for all text of the page and its charts."""
    low = shown.page.evaluate(
        """() => {
            const rgb = colour => colour.match(/[\\d.]+/g).map(Number);
            const light = colour => rgb(colour).slice(0, 3).map(v => v / 255)
                .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
                .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
            const ground = e => {
                for (; e; e = e.parentElement) {
                    const colour = getComputedStyle(e).backgroundColor;
                    if ((rgb(colour)[3] ?? 1) > 0) return colour;
                }
                return "rgb(255, 255, 255)";
            };
            const found = [];
            for (const e of document.body.querySelectorAll("*")) {
                const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
                if (!own || !e.getClientRects().length || e.closest("script, .cursor")) continue;
                const style = getComputedStyle(e);
                const [a, b] = [light(e.closest("svg") ? style.fill : style.color), light(ground(e))];
                const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
                if (ratio < 4.5) found.push([e.textContent.trim().slice(0, 40), ratio]);
            }
            return found;
        }"""
    )
    assert low == []


def test_pointing_at_a_chart_shows_that_step_everywhere(shown: OpenPage, run: Path) -> None:
    """The values under the pointer and by the keys are those of metrics.jsonl, in every chart at once."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    page = shown.page
    before = page.locator("body").inner_text()
    plot = page.locator("#curve .plot:visible")
    place = json.loads(plot.get_attribute("data-place") or "")
    plot.scroll_into_view_if_needed()
    box = plot.locator("svg").bounding_box()
    assert box
    scale = box["width"] / float((plot.locator("svg").get_attribute("viewBox") or "").split()[2])
    for step in (2, 3):
        x = box["x"] + scale * (place["x"][0] * step + place["x"][1])
        page.mouse.move(x, box["y"] + box["height"] / 2)
        check_values(page.locator("[data-metric]").all(), records[step - 1])
        assert f"step {step}" in plot.inner_text()
        line = float(plot.locator(".cursor line").get_attribute("x1") or "nan")
        assert line == pytest.approx(place["x"][0] * step + place["x"][1])
    page.mouse.move(0, 0)
    plot.focus()
    page.keyboard.press("Home")
    check_values(page.locator("[data-metric]").all(), records[0])
    assert "step 1" in page.locator("#spoken").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("body").inner_text() == before
    page.keyboard.press("End")  # what the script writes of the last step is what the page says without it
    assert page.locator("#numbers").inner_text() in before
    check_values(page.locator("[data-metric]").all(), records[-1])
    assert shown.complaints == []


def check_values(readouts: list, record: dict[str, float]) -> None:
    for readout in readouts:
        name, shown = readout.get_attribute("data-metric"), readout.text_content()
        if name in record:
            assert float(shown.replace(",", "")) == pytest.approx(record[name], rel=0.05, abs=6e-4), name
        else:
            assert shown == "–", name


def test_the_page_tells_the_run(browser: Browser, report: Path) -> None:
    with opened(browser, report, width=1280) as shown:
        text = shown.page.locator("body").inner_text()
    for words in (
        *("mine", "GSPO on Qwen3MoeForCausalLM", "4 of 4", "all made", "8 prompts × 8 responses a step"),
        *("held-out avg@1", "0.250 → 0.750", "Groups without contrast", "Time of a step"),
        *("Calculate", "expected", "Step 1", "Step 4", "rollout.response_length_max", "schedule: linear"),
    ):
        assert words in text, words


def test_the_picture_is_made_and_says_of_which_sources(browser: Browser, run: Path, tmp_path: Path) -> None:
    from PIL import Image

    picture = tmp_path / "pictures" / "report.png"
    subprocess.run(
        [sys.executable, "tools/report_picture.py", str(run), str(picture)], cwd=ROOT, check=True, timeout=120
    )
    with Image.open(picture) as image:
        assert image.text[DIGEST] == sources_digest()
        assert image.width == 1280
        assert len(image.getcolors(1 << 24) or ()) > 20


def test_a_run_without_metrics_is_a_mistake_of_the_user(megagspo: Command, tmp_path: Path) -> None:
    result = megagspo("report", tmp_path, check=False)
    assert result.returncode == 2
    assert "config.yaml" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_report_of_a_warm_up(
    megagspo: Command, warm_model: Path, browser: Browser, tmp_path: Path
) -> None:
    output = tmp_path / "warm.html"
    megagspo("report", warm_model.parent, "--output", output)
    digest = hashlib.sha256(output.read_bytes()).digest()
    megagspo("report", warm_model.parent, "--output", output)
    assert hashlib.sha256(output.read_bytes()).digest() == digest
    with opened(browser, output, width=400) as shown:
        text = shown.page.locator("body").inner_text()
        assert shown.complaints == []
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= 400
    assert "Supervised warm-up on" in text
    assert "Reward" not in text
