"""Which metrics are drawn together, and what a reader should know about each chart.

A metric that no panel names gets one of its own under "Further metrics", so a new metric needs no line here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megagspo.observe.report.series import Metrics


@dataclass(frozen=True, kw_only=True)
class Series:
    """A metric, and its name in the legend."""

    metric: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart.

    kind: lines, or a stack whose parts add up; spread: the metric that is drawn as a band of plus and minus
    its value around the first series; whole: what a stack's parts should add up to; from_zero: the axis
    begins at 0 where no value is negative; logarithmic: the axis is where all values are positive and they
    differ by more than a factor of ten.
    """

    title: str
    unit: str
    series: tuple[Series, ...]
    about: str = ""
    kind: Literal["lines", "stack"] = "lines"
    spread: str | None = None
    whole: str | None = None
    from_zero: bool = True
    logarithmic: bool = False

    @property
    def metrics(self) -> set[str]:
        """Every metric it shows."""
        named = {series.metric for series in self.series}
        return named | {name for name in (self.spread, self.whole) if name is not None}


@dataclass(frozen=True, kw_only=True)
class Section:
    """Charts under one heading."""

    title: str
    panels: tuple[Panel, ...]


def _one(
    metric: str, title: str, unit: str, about: str = "", *, from_zero: bool = True, logarithmic: bool = False
) -> Panel:
    series = (Series(metric=metric, label=""),)
    return Panel(
        title=title, unit=unit, series=series, about=about, from_zero=from_zero, logarithmic=logarithmic
    )


def _many(title: str, unit: str, about: str = "", /, **labels: str) -> Panel:
    series = tuple(Series(metric=metric, label=label) for label, metric in labels.items())
    return Panel(title=title, unit=unit, about=about, series=series)


_LEARNING = (
    replace(
        _one(
            "reward/mean",
            "Reward and its spread",
            "",
            "The band is one standard deviation of the step's rewards to either side.",
        ),
        spread="reward/std",
    ),
    _many(
        "Groups without contrast",
        "share of prompts",
        "All responses to a prompt wrong, or all right: such a group has no advantage to learn from.",
        **{"all wrong": "reward/solve_none", "all right": "reward/solve_all"},
    ),
    _one("response/length_mean", "Response length", "tokens, mean of the responses"),
    _one(
        "response/truncated_fraction",
        "Truncated responses",
        "of the responses",
        "Cut off at rollout.response_length_max.",
    ),
)
_OPTIMISATION = (
    _one("policy/loss", "Loss", "mean of the updates", from_zero=False),
    _one("policy/grad_norm", "Gradient norm", "before clipping, mean of the updates"),
    _one("policy/entropy", "Entropy", "nats a token"),
    _one("policy/kl_ref", "KL to the reference", "nats a token"),
    _many(
        "Clipped tokens",
        "share of tokens",
        "Outside the clip range on the side where the gradient is zero.",
        low="policy/clip_fraction_low",
        high="policy/clip_fraction_high",
        both="policy/clip_fraction",
    ),
    replace(
        _many("Importance ratio", "", mean="policy/ratio_mean", largest="policy/ratio_max"), from_zero=False
    ),
    _one("optim/lr", "Learning rate", "at the step's last update"),
)
_MISMATCH = (
    _one(
        "mismatch/logprob_abs_mean",
        "Log-probabilities apart by",
        "nats a token",
        "Trainer against rollout engine for the same tokens and weights, before any update.",
        logarithmic=True,
    ),
    _one("mismatch/k3", "KL, engine to trainer", "nats a token, k3 estimate", logarithmic=True),
    _one(
        "mismatch/ratio_in_eps",
        "Mismatch in clip ranges",
        "1 = at the edge",
        "Mean over responses of the mean log-ratio, in units of the clip range on its side.",
        from_zero=False,
    ),
)
_STAGES = {"rollout": "rollout", "old_logprob": "old log-probs", "train": "train", "push": "push"}


def _speed(metrics: Metrics) -> tuple[Panel, ...]:
    found = [name.removeprefix("time/") for name in metrics.values if name.startswith("time/")]
    stages = [name for name in (*_STAGES, *sorted(found)) if name in found and name != "step"]
    stack = Panel(
        title="Time of a step",
        unit="seconds",
        series=tuple(
            Series(metric=f"time/{stage}", label=_STAGES.get(stage, stage.replace("_", " ")))
            for stage in dict.fromkeys(stages)
        ),
        about="Wall clock, stages on top of each other; the rest is what no stage accounts for.",
        kind="stack",
        whole="time/step",
    )
    return (
        stack,
        _one(
            "perf/tokens_per_second",
            "Throughput",
            "tokens a second",
            "Tokens trained on, prompts included, over the whole step.",
        ),
        _one("perf/samples_per_second", "Samples", "a second", "Sequences trained on, over the whole step."),
        _one("perf/packing_efficiency", "Packing efficiency", "of packed places hold tokens"),
        _one("perf/mfu", "Model FLOPs utilisation", "share"),
        _one("memory/peak_gib", "Peak memory", "GiB so far, first rank"),
    )


# In the table of all metrics, but no chart: it counts the steps.
_UNDRAWN = {"policy/version"}


def sections(metrics: Metrics) -> Iterator[Section]:
    """The charts for those metrics that the run has; nothing for the others."""
    areas = {
        "Learning": _LEARNING,
        "Optimisation": _OPTIMISATION,
        "Trainer against engine": _MISMATCH,
        "Speed": _speed(metrics),
    }
    # The learning curve at the head of the page shows the held-out scores.
    claimed = _UNDRAWN | {name for name in metrics.values if name.startswith("eval/")}
    claimed |= {name for panels in areas.values() for panel in panels for name in panel.metrics}
    further = tuple(_one(name, name, "", from_zero=False) for name in metrics.values if name not in claimed)
    for title, panels in (*areas.items(), ("Further metrics", further)):
        present = tuple(shown for panel in panels if (shown := _present(panel, metrics)))
        if present:
            yield Section(title=title, panels=present)


def learning_curve(metrics: Metrics) -> Panel | None:
    """What the run is about: reward and held-out score, or the loss of a warm-up. None without either."""
    held_out = tuple(
        Series(metric=name, label=f"held-out {name.removeprefix('eval/')}")
        for name in metrics.values
        if name.startswith("eval/")
    )
    reward = Series(metric="reward/mean", label="reward in training, mean of the step")
    about = (
        "Steps below, time spent in steps above. The figures are those of the last step; point at a chart, "
        "or focus it and use the arrow keys, to read all charts at another."
    )
    panel = Panel(title="Learning curve", unit="", series=(reward, *held_out), about=about)
    if "reward/mean" not in metrics.values:
        loss = Series(metric="policy/loss", label="loss, nats a token")
        panel = replace(panel, series=(loss, *held_out), from_zero=False)
    return _present(panel, metrics)


def _present(panel: Panel, metrics: Metrics) -> Panel | None:
    """The panel without the metrics that the run lacks; None when nothing is left. A metric without a finite
    value keeps its panel, which is empty: the run has the metric."""
    series = tuple(entry for entry in panel.series if entry.metric in metrics.values)
    if not series:
        return None
    spread = panel.spread if panel.spread in metrics.values else None
    whole = panel.whole if panel.whole in metrics.values else None
    return replace(panel, series=series, spread=spread, whole=whole)
