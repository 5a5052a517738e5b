"""The report's page: what is on it, what is not, and that it is what the files of the run say."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megagspo.config.schema import RewardConfig
from megagspo.errors import DataError, DiskError, MissingError, UnwritableError
from megagspo.measure import full_reward
from megagspo.observe import report
from megagspo.observe.report import write_report
from megagspo.observe.report.samples import full_reward as full_reward_of_page
from megagspo.observe.report.text import number, printable
from megagspo.rollout.store import step_file, write_samples
from megagspo.types import Completion, Prompt, Sample

FOLDER = Path(report.__file__).parent
CONFIG = """\
run:
  name: mine
  dir: runs
  seed: 7
model:
  path: some/model
reward:
- name: exact
  weight: 1.0
algorithm:
  name: gspo
rollout:
  prompts: 4
  responses: 2
trainer:
  steps: 8
"""


def record(step: int) -> dict[str, float]:
    """What a step of `megagspo train` might measure; every value differs from every other."""
    return {
        "reward/mean": 0.1 + step / 97,
        "reward/std": 0.3 + step / 89,
        "reward/solve_none": 0.5 - step / 83,
        "reward/solve_all": step / 79,
        "response/length_mean": 3 + step / 73,
        "response/truncated_fraction": step / 71,
        "policy/loss": step / 67 - 0.03,
        "policy/grad_norm": 1 + step / 61,
        "policy/entropy": 0.5 - step / 59,
        "optim/lr": 1e-4 * step,
        "policy/clip_fraction": step / 53,
        "policy/clip_fraction_low": step / 107,
        "policy/clip_fraction_high": step / 53 - step / 107,
        "mismatch/k3": 10.0 ** (-13 + step / 2),
        "time/rollout": 0.1 + step / 1000,
        "time/train": 0.5,
        "time/step": 0.75 + step / 1000,
        "perf/tokens_per_second": 1234.5 + step,
        "policy/version": step,
    }


def few(step: int) -> dict[str, float]:
    """Little to draw, for properties that do not hang on it."""
    return {"reward/mean": 0.1 + step / 97}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def make(
        records: Sequence[Mapping[str, float]], *, samples: Sequence[Sample] = (), name: str = "run"
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.yaml").write_text(CONFIG)
        lines = [json.dumps({"step": step, **values}) for step, values in enumerate(records, start=1)]
        (directory / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
        if samples:
            write_samples(step_file(directory / "rollouts", 1), samples, step=1, version=0)
        return directory

    return make


def sample(number: int, text: str, *, reward: float = 0.0, prompt: str = "What?") -> Sample:
    return Sample(
        id=f"{number}",
        group=f"group {number}",
        prompt=Prompt(id=f"p/{number}", source="p", text=prompt, token_ids=(1, 2), answer="42"),
        completion=Completion(
            request_id=f"{number}",
            token_ids=(3, 4, 5),
            logprobs=(-0.1, -0.2, -0.3),
            finish_reason="stop",
            version_min=0,
            version_max=0,
        ),
        text=text,
        reward=reward,
        rewards={"exact": reward},
    )


class Page(HTMLParser):
    """Every start tag with its attributes, and the text outside of scripts and styles."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.source = file.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.shown: list[str] = []
        self._within = ""
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self._within = tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within not in ("script", "style"):
            self.shown.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.shown).split())

    @property
    def data(self) -> dict[str, Any]:
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', self.source)
        assert found
        return json.loads(found[1])

    def titles(self) -> list[str]:
        return re.findall(r'<h[23] id="c[^"]*-title">([^<]*?) ?<', self.source)

    def plots(self) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.tags if "plot" in attributes.get("class", "").split()]


def page_of(run: Path) -> Page:
    return Page(write_report(run))


# --- the numbers --------------------------------------------------------------------------------------------


def test_the_charts_numbers_are_those_of_the_file(make_run: Callable[..., Path]) -> None:
    records = [record(step) for step in range(1, 9)]
    data = page_of(make_run(records)).data
    assert data["steps"] == list(range(1, 9))
    assert data["metrics"] == {name: [r[name] for r in records] for name in records[0]}
    assert data["elapsed"] == pytest.approx(
        [math.fsum(r["time/step"] for r in records[:n]) for n in range(1, 9)]
    )


def test_a_drawn_line_goes_through_the_numbers_of_the_file(make_run: Callable[..., Path]) -> None:
    """The drawing's own path against the values, by the place that the page gives to its script. Also with a
    logarithmic axis (k3 grows by more than a factor of ten)."""
    records = [record(step) for step in range(1, 9)]
    page = page_of(make_run(records))
    for name in ("policy/grad_norm", "mismatch/k3"):
        plot = next(p for p in page.plots() if p["data-series"] == json.dumps([name]))
        svg = page.source[page.source.index(plot["aria-label"]) :]
        place = json.loads(plot["data-place"])
        assert place["logarithmic"] == (name == "mismatch/k3")
        lines = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: var\(--s1\)', svg)
        drawn = [tuple(map(float, point)) for point in re.findall(r"[ML] (\S+) (\S+)", lines[0])]
        expected = [
            (
                place["x"][0] * step + place["x"][1],
                place["y"][0] * (math.log10(r[name]) if place["logarithmic"] else r[name]) + place["y"][1],
            )
            for step, r in enumerate(records, start=1)
        ]
        # Points on one straight line are drawn as one; the ends are always there. Nobody sees half a pixel.
        assert drawn[0] == pytest.approx(expected[0], abs=0.5)
        assert drawn[-1] == pytest.approx(expected[-1], abs=0.5)
        for x, y in drawn:
            assert min(math.dist((x, y), point) for point in expected) < 0.5


def test_an_absent_metric_has_no_chart_and_no_number(make_run: Callable[..., Path]) -> None:
    everything = page_of(make_run([record(step) for step in range(1, 5)], name="all"))
    few = [{"policy/loss": 2.0 / step, "time/train": 0.5, "time/step": 0.6} for step in range(1, 5)]
    page = page_of(make_run(few, name="few"))
    assert "Groups without contrast" in everything.titles()
    assert "Reward" not in page.text
    assert "Supervised warm-up" in page.text
    assert page.titles() == ["Learning curve", "Loss", "Time of a step"]
    assert set(page.data["metrics"]) == {"policy/loss", "time/train", "time/step"}
    for name in ("KL to the reference", "Model FLOPs utilisation", "Further metrics"):
        assert name not in everything.text + page.text


def test_a_metric_that_no_panel_knows_gets_a_chart(make_run: Callable[..., Path]) -> None:
    page = page_of(make_run([{**few(step), "routing/volatility": 0.1 * step} for step in range(1, 4)]))
    assert "routing/volatility" in page.titles()
    assert "Further metrics" in page.text


def test_a_metric_recorded_now_and_then_is_absent_between(make_run: Callable[..., Path]) -> None:
    records = [record(step) | ({"eval/avg@4": step / 10} if step % 2 == 0 else {}) for step in range(1, 7)]
    page = page_of(make_run(records))
    assert page.data["metrics"]["eval/avg@4"] == [None, 0.2, None, 0.4, None, 0.6]
    assert "held-out avg@4" in page.text
    assert "Held-out avg@4 0.200 → 0.600 at step 2 and at step 6" in page.text


def test_values_that_are_not_finite_leave_gaps_and_are_named(make_run: Callable[..., Path]) -> None:
    records = [record(step) for step in range(1, 10)]
    for step, value in ((2, math.nan), (5, math.inf), (6, -math.inf)):
        records[step - 1]["policy/entropy"] = value
        records[step - 1]["time/train"] = value
        records[step - 1]["reward/std"] = value
    page = page_of(make_run(records))
    assert page.data["metrics"]["policy/entropy"][1] == "NaN"
    assert page.data["metrics"]["policy/entropy"][4:6] == ["Infinity", "-Infinity"]
    assert "policy/entropy (3)" in page.text
    plot = next(p for p in page.plots() if p["data-series"] == '["policy/entropy"]')
    svg = page.source[page.source.index(plot["aria-label"]) :]
    line = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: var\(--s1\)', svg)[0]
    assert line.count("M ") == 3  # step 1 alone, 3 to 4, 7 to 9
    drawings = page.source[page.source.index("<main>") : page.source.index('id="data"')]
    assert not re.search(r"\bnan\b|\binf\b", "".join(re.findall(r"<svg.*?</svg>", drawings)))


def test_a_metric_that_is_never_finite_keeps_its_empty_chart(make_run: Callable[..., Path]) -> None:
    page = page_of(make_run([{**record(step), "policy/loss": math.nan} for step in range(1, 4)]))
    assert "Loss" in page.titles()
    assert "Loss over 3 steps. policy/loss: no finite value." in page.source


def test_a_long_run_says_that_its_areas_are_means(make_run: Callable[..., Path]) -> None:
    def timed(step: int) -> dict[str, float]:
        return {"time/train": 1.0 + step % 3, "time/step": 5.0}

    assert "Areas are means" not in page_of(make_run([timed(s) for s in range(1, 401)], name="short")).text
    page = page_of(make_run([timed(s) for s in range(1, 1001)], name="long"))
    assert "Areas are means of 3 steps." in page.text
    assert len(page.data["metrics"]["time/train"]) == 1000


def test_before_and_after_come_from_the_files_of_scores(make_run: Callable[..., Path]) -> None:
    run = make_run([few(step) for step in range(1, 9)])
    assert "before and after" not in page_of(run).text
    sources = {"a": {"avg@1": 1.0}}
    after = {"model": "m", "prompts": 8, "avg@1": 0.875, "avg@1_standard_error": 0.125, "sources": sources}
    (run / "held_out.json").write_text(json.dumps(after))
    assert "Held-out avg@1 0.875 of the exported model" in page_of(run).text
    (run / "held_out_before.json").write_text('{"model": "w", "avg@1": 0.25, "pass@1": 0.25}')
    assert "Held-out avg@1 0.250 → 0.875 before and after the run: +0.625" in page_of(run).text
    assert "held-out after avg@1 0.875 ± 0.125" in page_of(run).text
    (run / "held_out_before.json").write_text('{"avg@1": 0.25, "avg@1_standard_error": 0.5}')
    assert "after the run: +0.625; standard errors 0.500, 0.125" in page_of(run).text
    (run / "held_out_before.json").write_text('{"avg@1": ')
    assert "held_out_before.json cannot be read and is left out" in page_of(run).text


def test_a_run_with_one_step_and_one_still_going_on(make_run: Callable[..., Path]) -> None:
    page = page_of(make_run([record(1)], name="one"))
    assert "1 of 8 still going on, or stopped there" in page.text
    assert page_of(make_run([few(step) for step in range(1, 9)], name="all")).text.count("8 of 8 all made")


def test_a_last_line_cut_short_is_left_out_and_said(make_run: Callable[..., Path]) -> None:
    run = make_run([few(step) for step in range(1, 4)])
    assert "cut short" not in page_of(run).text
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    page = page_of(run)
    assert page.data["steps"] == [1, 2, 3]
    assert "The last line of metrics.jsonl is cut short and left out" in page.text


# --- what came from a model or a user -----------------------------------------------------------------------


HOSTILE = '</pre><script>alert("x")</script><img src="http://example.org/x.png" onerror=alert(1)>&amp;\'`'


def test_answers_prompts_and_settings_are_text(make_run: Callable[..., Path]) -> None:
    samples = [
        sample(1, HOSTILE, reward=1.0, prompt=f"prompt {HOSTILE}"),
        sample(2, HOSTILE),
        sample(3, "right to left \u202e, a bell \x07, half a pair \ud83d"),
    ]
    run = make_run([{**few(1), f"odd/{HOSTILE}": 1.0}], name="odd")
    harmless = page_of(run)
    # A lone surrogate is not UTF-8: it comes from JSON's \ud83d alone, so the file is written as such.
    rollouts = run / "rollouts" / "step_000001.jsonl"
    rollouts.parent.mkdir()
    lines = [
        {"step": 1, **vars(s), "prompt": vars(s.prompt), "completion": vars(s.completion)} for s in samples
    ]
    rollouts.write_text("".join(json.dumps(line, default=dict) + "\n" for line in lines))
    (run / "config.yaml").write_text(CONFIG.replace("name: mine", f"name: {json.dumps(HOSTILE)}"))
    page = page_of(run)
    for tag in ("script", "img", "link", "iframe"):
        assert [t for t, _ in page.tags].count(tag) == [t for t, _ in harmless.tags].count(tag), tag
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.text.count(" ".join(HOSTILE.split())) >= 4  # title, heading, prompt, answers, settings
    assert r"right to left \u{202e}, a bell \u{7}, half a pair \u{d83d}" in page.text


def test_the_page_loads_nothing(make_run: Callable[..., Path]) -> None:
    page = page_of(
        make_run([record(step) for step in range(1, 4)], samples=[sample(1, "see http://example.org")])
    )
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster"):
            assert attributes.get(name, "#").startswith(("#", "data:,")), (tag, attributes)
    styles = "".join(re.findall(r"<style>.*?</style>", page.source, re.DOTALL)) + "".join(
        attributes.get("style", "") + attributes.get("clip-path", "") for _, attributes in page.tags
    )
    assert "@import" not in styles
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)", styles))
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


def test_ids_are_unique_and_references_lead_somewhere(make_run: Callable[..., Path]) -> None:
    page = page_of(make_run([record(step) for step in range(1, 9)]))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        for name in ("href", "xlink:href", "aria-labelledby"):
            target = attributes.get(name, "").removeprefix("#")
            assert not target or target.startswith("data:") or target in ids, attributes
    assert all(attributes["aria-label"] for attributes in page.plots())


def test_right_and_wrong_answers_of_the_first_and_last_step(make_run: Callable[..., Path]) -> None:
    run = make_run([few(step) for step in range(1, 4)])
    for step in (1, 2, 3):
        answers = [sample(i, f"step {step} answer {i}", reward=float(i % 2)) for i in range(10)]
        write_samples(step_file(run / "rollouts", step), answers, step=step, version=step - 1)
    text = page_of(run).text
    for shown in ("step 1 answer 0", "step 1 answer 1", "step 3 answer 4", "step 3 answer 5"):
        assert shown in text
    assert "step 2 answer" not in text
    assert "step 1 answer 6" not in text  # three of each kind are enough
    assert text.count("5 of 10 answers right") == 2


def test_broken_rollouts_are_named_and_left_out(make_run: Callable[..., Path]) -> None:
    run = make_run([few(1)], samples=[sample(1, "fine")])
    step_file(run / "rollouts", 2).write_text('{"step": 2, "rew')
    text = page_of(run).text
    assert "fine" in text
    assert "rollouts/step_000002.jsonl cannot be read and is left out" in text


def test_right_means_what_the_metrics_mean_by_it() -> None:
    for weights in ((1.0,), (0.9, 0.1), (1.0, -0.5), (0.0,)):
        listed = [
            {"name": name, "weight": weight} for name, weight in zip(("exact", "math"), weights, strict=False)
        ]
        rewards = [RewardConfig.model_validate(entry) for entry in listed]
        assert full_reward_of_page({"reward": listed}) == full_reward(rewards)


# --- the file -----------------------------------------------------------------------------------------------


def test_the_same_run_gives_the_same_bytes(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """In another process with other hash seeds, time zone, place and settings of matplotlib, too."""
    run = make_run([record(step) for step in range(1, 9)], samples=[sample(1, "x")])
    first = write_report(run, output=tmp_path / "first.html").read_bytes()
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copytree(run, tmp_path / "elsewhere" / "run")
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 9\naxes.facecolor: red\n")
    code = "import sys; from pathlib import Path; from megagspo.observe.report import write_report; "
    code += "write_report(Path(sys.argv[1]))"
    environment = {"PYTHONHASHSEED": "5", "TZ": "Asia/Tokyo", "MATPLOTLIBRC": str(tmp_path / "matplotlibrc")}
    subprocess.run([sys.executable, "-c", code, str(moved)], check=True, env={**os.environ, **environment})
    assert (moved / "report.html").read_bytes() == first


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run([few(1)])
    with pytest.raises(UnwritableError, match=r"nowhere.*--output"):
        write_report(run, output=tmp_path / "nowhere" / "report.html")
    with pytest.raises(UnwritableError, match="a directory"):
        write_report(run, output=tmp_path)
    written = write_report(run).read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match=r"no space left.*--output"):
        write_report(run)
    assert (run / "report.html").read_bytes() == written
    assert not list(run.glob(".report.html*"))


def test_mistakes_name_the_thing_the_place_and_the_remedy(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run([])
    with pytest.raises(MissingError, match=r"no directory .*gone.*runs/NAME"):
        write_report(tmp_path / "gone")
    with pytest.raises(MissingError, match=r"no config\.yaml.*runs/NAME"):
        write_report(tmp_path)
    with pytest.raises(MissingError, match=r"no metrics yet.*metrics\.jsonl.*step 1"):
        write_report(run)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(MissingError, match="no metrics yet"):
        write_report(run)
    (run / "metrics.jsonl").write_text('{"step": 1, "policy/lo')
    with pytest.raises(MissingError, match="no metrics yet"):
        write_report(run)
    (run / "metrics.jsonl").write_text('{"step": 1}\nbroken\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2, is not JSON.*remove"):
        write_report(run)
    (run / "metrics.jsonl").write_text('{"step": 1, "policy/loss": "high"}\n')
    with pytest.raises(DataError, match=r"line 1: policy/loss is 'high', not a number"):
        write_report(run)
    for text in ("run: [", "just words", "reward: exact"):
        (run / "config.yaml").write_text(text)
        with pytest.raises(DataError, match=r"config\.yaml (cannot be read|holds no configuration)"):
            write_report(run)
    assert not (run / "report.html").exists()


def test_numbers_are_short_and_round_halves_up() -> None:
    values = (
        0.0,
        0.0625,
        -0.0625,
        0.25,
        12.345678,
        999.96,
        1234.5,
        3e-7,
        -4.56e-12,
        1e9,
        math.nan,
        -math.inf,
    )
    expected = "0 0.063 -0.063 0.250 12.35 1000.0 1,235 3.0e-7 -4.6e-12 1.0e+9 NaN -Infinity"
    assert " ".join(map(number, values)) == expected


def test_printable_keeps_ordinary_text() -> None:
    text = "Δx ≥ 3 \n\t семь 七 😀"
    assert printable(text) == text


def test_the_wheel_carries_what_the_page_is_made_of() -> None:
    project = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["megagspo.observe.report"]
    needed = {file.name for file in FOLDER.iterdir() if file.is_file() and file.suffix != ".py"}
    assert needed == {"page.html", "page.css", "page.js"}
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for name in needed)


def test_neither_the_command_line_nor_the_package_loads_matplotlib_before_it_is_asked() -> None:
    code = (
        "import megagspo.cli, megagspo.observe.report, sys; "
        "assert not {'matplotlib', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
