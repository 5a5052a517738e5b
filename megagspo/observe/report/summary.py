"""The head of the page, and what the run directory says about where the run was made."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megagspo.observe.report.reading import RunData
from megagspo.observe.report.text import count, duration, number

_ERROR = (
    "_standard_error"  # what `megagspo eval` appends to the name of a score for that of its standard error
)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One figure of the summary. start: what it was at first, where it says how something changed."""

    label: str
    value: str
    about: str
    start: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A line of the table of facts."""

    what: str
    value: str


def algorithm(run: RunData) -> str:
    """What was done, in words."""
    if run.supervised:
        return "Supervised warm-up"
    return str(run.setting("algorithm.name", "reinforcement learning")).upper()


def tiles(run: RunData) -> Iterator[Tile]:
    """The figures that matter most, of those the run has."""
    yield from _held_out(run)
    metrics = run.metrics
    for name, label in (("reward/mean", "Reward in training"), ("policy/loss", "Loss")):
        points = metrics.points(name)
        if points and (name == "reward/mean" or run.supervised):
            (first, start), (last, end) = points[0], points[-1]
            about = f"mean of step {first} and of step {last}" if last > first else f"mean of step {first}"
            yield Tile(
                label=label, start=number(start) if last > first else None, value=number(end), about=about
            )
    yield _steps(run)
    elapsed = metrics.elapsed()
    if elapsed:
        typical = duration(statistics.median(metrics.finite("time/step")))
        yield Tile(
            label="Time in steps",
            value=duration(elapsed[-1]),
            about=f"{typical} a step; start-up and saving not counted",
        )
    speed = metrics.finite("perf/tokens_per_second")
    if speed:
        yield Tile(
            label="Throughput",
            value=number(statistics.median(speed)),
            about="tokens a second, median of the steps",
        )
    differences = metrics.finite("mismatch/logprob_abs_mean")
    if differences:
        yield Tile(
            label="Trainer against engine",
            value=number(max(differences)),
            about="nats, largest mean difference of log-probabilities in a step",
        )


def _held_out(run: RunData) -> Iterator[Tile]:
    before, after = run.held_out.before, run.held_out.after
    shared = [name for name in after if name in before]
    if shared:
        name = shared[0]
        change = after[name] - before[name]
        about = f"before and after the run: {'+' if change >= 0 else '−'}{number(abs(change))}"
        errors = [scores[name + _ERROR] for scores in (before, after) if name + _ERROR in scores]
        if len(errors) == 2:
            about += f"; standard errors {number(errors[0])}, {number(errors[1])}"
        yield Tile(
            label=f"Held-out {name}",
            start=number(before[name]),
            value=number(after[name]),
            about=about,
        )
        return
    during = [name for name in run.metrics.values if name.startswith("eval/")]
    if during:
        points = run.metrics.points(during[0])
        (first, start), (last, end) = points[0], points[-1]
        yield Tile(
            label=f"Held-out {during[0].removeprefix('eval/')}",
            start=number(start) if last > first else None,
            value=number(end),
            about=f"at step {first} and at step {last}" if last > first else f"at step {first}",
        )
    for name, score in [*after.items()][: 0 if during else 1]:
        yield Tile(label=f"Held-out {name}", value=number(score), about="of the exported model")


def _steps(run: RunData) -> Tile:
    last, planned = run.metrics.steps[-1], run.setting("trainer.steps")
    if not isinstance(planned, int):
        return Tile(label="Steps", value=str(last), about="recorded")
    about = "all made" if last >= planned else "still going on, or stopped there"
    return Tile(label="Steps", value=f"{last} of {planned}", about=about)


def lead(run: RunData) -> str:
    """One sentence under the run's name."""
    parts = [f"{algorithm(run)} on {model(run) or 'a model'}"]
    if not run.supervised and run.setting("rollout.prompts"):
        prompts, responses = run.setting("rollout.prompts"), run.setting("rollout.responses")
        parts.append(f"{prompts} prompts × {responses} responses a step")
    parts.append(f"{ranks(run)}, seed {run.setting('run.seed', 0)}")
    return "; ".join(parts)


def model(run: RunData) -> str | None:
    """The architecture in words, where the run directory holds its configuration."""
    if run.model is None:
        return None
    config = run.model.config
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    parts = [str(name or "a model")]
    if run.model.parameters:
        parts.append(f"{count(run.model.parameters)} parameters")
    if config.get("num_hidden_layers"):
        parts.append(f"{config['num_hidden_layers']} layers")
    if config.get("num_experts"):
        parts.append(f"{config['num_experts']} experts, {config.get('num_experts_per_tok', '?')} a token")
    return f"{parts[0]} ({', '.join(parts[1:])})" if parts[1:] else parts[0]


def ranks(run: RunData) -> str:
    """How the run was divided, as far as the run directory tells."""
    axes = ("tensor", "pipeline", "expert", "expert_tensor", "data")
    sizes = {axis: run.setting(f"parallel.{axis}") for axis in axes}
    cuts = ", ".join(
        f"{axis.replace('_', '-')} {size}" for axis, size in sizes.items() if size not in (None, 1, "auto")
    )
    cuts = f"parallel: {cuts}" if cuts else "not divided"
    if run.other_ranks is None:
        return cuts
    return f"{run.other_ranks + 1} ranks ({cuts})" if run.other_ranks else f"1 rank ({cuts})"


def facts(run: RunData) -> Iterator[Fact]:
    """What the run directory says about model, machine and files."""
    found = {
        "started from": run.setting("model.path"),
        "model": model(run),
        "weights as exported": run.model and run.model.config.get("dtype"),
        "written by transformers": run.model and run.model.config.get("transformers_version"),
        "number format": run.setting("model.dtype", "not set: float32 on a CPU, bfloat16 on a GPU"),
        "device": run.setting("platform.device"),
        "ranks": ranks(run),
        "threads a rank": run.setting("platform.threads_per_rank"),
        "peak memory": _peak(run),
        "checkpoints kept": ", ".join(f"step {step}" for step in run.checkpoints) or "none",
        "exported": "hf/" if run.model and run.model.source == "hf" else "no",
    }
    for label, scores in (("before", run.held_out.before), ("after", run.held_out.after)):
        found[f"held-out {label}"] = ", ".join(_score(scores, name) for name in scores if _ERROR not in name)
    for what, value in found.items():
        if value not in (None, ""):
            yield Fact(what=what, value=str(value))


def _score(scores: Mapping[str, float], name: str) -> str:
    error = f" ± {number(scores[name + _ERROR])}" if name + _ERROR in scores else ""
    return f"{name} {number(scores[name])}{error}"


def _peak(run: RunData) -> str | None:
    values = run.metrics.finite("memory/peak_gib")
    return f"{number(max(values))} GiB, first rank" if values else None
