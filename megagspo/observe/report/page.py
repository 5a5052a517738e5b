"""The page: what the template is given, and its rendering."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megagspo.observe.report.catalogue import Panel, learning_curve, sections
from megagspo.observe.report.drawing import COLOURS, Drawing, Mark, Size, area_width, draw
from megagspo.observe.report.reading import RunData
from megagspo.observe.report.series import Metrics, summaries
from megagspo.observe.report.summary import algorithm, facts, lead, tiles
from megagspo.observe.report.text import number

_CARD = Size(width=360, height=180)
# The learning curve is as wide as the page, and drawn anew for a narrow screen, where its text would be tiny.
_CURVE = {"wide": Size(width=1080, height=300), "narrow": Size(width=360, height=240)}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of a chart's legend. colour: number of the series' colour, 0 for a value that has no line; last:
    the last recorded value, as text; unit: where it belongs to this value alone."""

    label: str
    metric: str
    colour: int
    last: str
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A panel as the template needs it. unit: of all values, where there are several; about: what to know of
    it; drawings: by the screen they are for; spoken: the chart in words."""

    name: str
    panel: Panel
    unit: str
    about: str
    entries: tuple[Entry, ...]
    drawings: dict[str, Drawing]
    spoken: str

    def place(self, kind: str) -> dict[str, Any]:
        """Where values lie in a drawing, for page.js."""
        place = asdict(self.drawings[kind])
        return {key: value for key, value in place.items() if key != "svg"} | {
            "dots": self.panel.kind == "lines"
        }


def render(run: RunData) -> str:
    """The whole page as HTML."""
    here = files("megagspo.observe.report")
    script = here.joinpath("page.js").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    environment.filters["svg"] = Markup
    template = environment.from_string(here.joinpath("page.html").read_text(encoding="utf-8"))
    metrics = run.metrics
    curve = _learning_curve(run)
    charts = [
        (section.title, [_card(panel, metrics, name=f"c{i}-{j}") for j, panel in enumerate(section.panels)])
        for i, section in enumerate(sections(metrics))
    ]
    return template.render(
        run=run,
        algorithm=algorithm(run),
        lead=lead(run),
        tiles=list(tiles(run)),
        facts=list(facts(run)),
        progress=_progress(run),
        curve=curve,
        sections=charts,
        summaries=list(summaries(metrics)),
        config_blocks=_blocks(run.config_text),
        data=_data(metrics),
        style=Markup(here.joinpath("page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _card(panel: Panel, metrics: Metrics, *, name: str) -> Chart:
    drawing = draw(panel, metrics=metrics, size=_CARD, name=name)
    return _chart(panel, metrics, name=name, drawings={"card": drawing})


def _learning_curve(run: RunData) -> Chart | None:
    panel = learning_curve(run.metrics)
    if panel is None:
        return None
    before, after = run.held_out.before, run.held_out.after
    shared = [name for name in before if name in after] if not run.supervised else []
    marks, labels = [], []
    if shared:
        score, steps = shared[0], run.metrics.steps
        own = [i for i, series in enumerate(panel.series) if series.metric == f"eval/{score}"]
        colour = own[0] if own else len(panel.series)
        marks = [
            Mark(step=steps[0] - 1, value=before[score], colour=colour),
            Mark(step=steps[-1], value=after[score], colour=colour),
        ]
        label = f"held-out {score}, before and after"
        last = f"{number(before[score])} → {number(after[score])}"
        labels = [Entry(label=label, metric="", colour=colour % COLOURS + 1, last=last)]
    drawings = {
        kind: draw(panel, metrics=run.metrics, size=size, name=f"curve-{kind}", marks=marks, clock=True)
        for kind, size in _CURVE.items()
    }
    return _chart(panel, run.metrics, name="curve", drawings=drawings, more=labels)


def _chart(
    panel: Panel, metrics: Metrics, *, name: str, drawings: dict[str, Drawing], more: Sequence[Entry] = ()
) -> Chart:
    entries = [*_entries(panel, metrics), *more]
    spoken = "; ".join(_in_words(entry, metrics) for entry in entries if entry.metric in metrics.values)
    return Chart(
        name=name,
        panel=panel,
        unit=panel.unit if len(panel.series) > 1 else "",
        about=_about(panel, metrics),
        entries=tuple(entries),
        drawings=drawings,
        spoken=f"{panel.title} over {len(metrics.steps)} steps. {spoken}.",
    )


def _about(panel: Panel, metrics: Metrics) -> str:
    width = area_width(len(metrics.steps))
    if width == 1 or not (panel.spread or panel.kind == "stack"):
        return panel.about
    return f"{panel.about} Areas are means of {width} steps."


def _entries(panel: Panel, metrics: Metrics) -> Iterator[Entry]:
    for position, series in enumerate(panel.series):
        yield Entry(
            label=series.label,
            metric=series.metric,
            colour=position % COLOURS + 1,
            last=_last(metrics, series.metric),
            unit=panel.unit if len(panel.series) == 1 else "",
        )
    if panel.spread:
        yield Entry(label="±", metric=panel.spread, colour=0, last=_last(metrics, panel.spread))
    if panel.whole:
        yield Entry(label="rest", metric="", colour=len(panel.series) % COLOURS + 1, last="")
        yield Entry(label="whole step", metric=panel.whole, colour=0, last=_last(metrics, panel.whole))


def _last(metrics: Metrics, name: str) -> str:
    return number(metrics.points(name)[-1][1])


def _in_words(entry: Entry, metrics: Metrics) -> str:
    finite = metrics.finite(entry.metric)
    if not finite:
        return f"{entry.label or entry.metric}: no finite value"
    first, last = metrics.points(entry.metric)[0][1], metrics.points(entry.metric)[-1][1]
    return (
        f"{entry.label or entry.metric}: first {number(first)}, last {number(last)}, "
        f"between {number(min(finite))} and {number(max(finite))}"
    )


def _data(metrics: Metrics) -> dict[str, Any]:
    """The numbers behind the charts, exactly those of metrics.jsonl. JSON has no word for NaN and infinity:
    they are text; null is absent."""
    return {
        "steps": metrics.steps,
        "elapsed": metrics.elapsed(),
        "metrics": {
            name: [
                value if value is None or math.isfinite(value) else number(value)
                for value in metrics.values[name]
            ]
            for name in metrics.values
        },
    }


def _progress(run: RunData) -> float | None:
    """The share of the planned steps that is made, where some are left."""
    planned = run.setting("trainer.steps")
    if not isinstance(planned, int) or run.metrics.steps[-1] >= planned:
        return None
    return run.metrics.steps[-1] / planned


def _blocks(text: str) -> list[str]:
    """The text of a configuration, cut where a section begins."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if not blocks or not line.startswith((" ", "-", "#")):
            blocks.append([])
        blocks[-1].append(line)
    return ["\n".join(block) for block in blocks]
