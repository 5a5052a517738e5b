"""How good a model is on held-out prompts: `megagspo eval`, and `eval/avg@k` while training."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megagspo.assembly import Respondent, Run, respondent
from megagspo.config import Config
from megagspo.convert.safetensors_io import HfCheckpoint
from megagspo.inputs import inputs_for_evaluation
from megagspo.measure import full_reward
from megagspo.platform.device import pick_platform
from megagspo.rollout.embedded.engine import EmbeddedEngine
from megagspo.rollout.store import check_finite
from megagspo.scores import Answered, scores
from megagspo.stages import respond
from megagspo.types import Sample

# Evaluation draws its samples as step 0 does, which no training step shares: always the same seeds, before
# and after.
_STEP = 0


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `evaluate` found. solved: the reward of a right response; scores: see `scores.scores`; sources:
    the same for each entry of data.eval, empty where there is only one."""

    model: str
    temperature: float
    samples_per_prompt: int
    samples: Sequence[Sample]
    solved: float
    scores: dict[str, float]
    sources: dict[str, dict[str, float]]

    def as_json(self) -> dict[str, Any]:
        """What `--json` writes. A key with an @ is a score; the others say of what."""
        about = {
            "model": self.model,
            "prompts": _prompts(self.samples),
            "samples_per_prompt": self.samples_per_prompt,
            "temperature": self.temperature,
        }
        return {**about, **self.scores, **({"sources": self.sources} if self.sources else {})}

    def heading(self) -> str:
        """What was scored, in words."""
        return (
            f"{self.model}: {_prompts(self.samples)} held-out prompts, {self.samples_per_prompt} responses "
            f"to each at temperature {self.temperature:g}"
        )

    def table(self) -> Table:
        """The scores for people: a row each, with a column for each source where there are several."""
        table = Table(caption="± standard error over prompts" if _prompts(self.samples) > 1 else None)
        table.add_column("")
        table.add_column("all" if self.sources else "score", justify="right")
        for source in self.sources:
            table.add_column(source, justify="right", overflow="fold")
        for name in self.scores:
            if not name.endswith("_standard_error"):
                table.add_row(name, *(_shown(found, name) for found in (self.scores, *self.sources.values())))
        return table


def held_out_metrics(run: Run, answering: Respondent) -> dict[str, float]:
    """`eval/avg@k` every `eval.every` steps, through the engine that rollouts come from."""
    every, k = run.config.eval.every, run.config.eval.samples
    if not every or run.step % every:
        return {}
    samples = respond(answering, run.inputs.prompts.held_out, responses=k, step=_STEP)
    check_finite(samples)
    return {f"eval/avg@{k}": statistics.fmean(sample.reward for sample in samples)}


def evaluate(config: Config) -> Evaluation:
    """Scores the Hugging Face model at `model.path` on `data.eval`, `eval.samples` responses to each prompt.

    One process on `platform.device`, no Megatron; shows its progress on a terminal.
    """
    platform = pick_platform(config.platform.device, threads=config.platform.threads_per_rank)
    inputs = inputs_for_evaluation(config)
    HfCheckpoint(config.model.path)  # names what is missing or damaged; transformers only fails
    dtype = getattr(torch, config.model.dtype) if config.model.dtype else platform.default_dtype
    engine = EmbeddedEngine.from_pretrained(config.model.path, dtype=dtype, device=platform.device)
    k, prompts = config.eval.samples, inputs.prompts.held_out
    console = Console(stderr=True)
    columns = (
        TextColumn("evaluating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with respondent(config, inputs, engine) as answering, bar:
        task = bar.add_task("evaluating", total=len(prompts) * k)
        samples = respond(
            answering, prompts, responses=k, step=_STEP, progress=lambda ended: bar.advance(task, ended)
        )
        check_finite(samples)
        answered = _answered(answering)
    solved = full_reward(config.reward)
    return Evaluation(
        model=config.model.path,
        temperature=config.rollout.temperature,
        samples_per_prompt=k,
        samples=samples,
        solved=solved,
        scores=scores(samples, solved=solved, answered=answered),
        sources=_by_source(samples, solved=solved, answered=answered),
    )


def _answered(answering: Respondent) -> Answered | None:
    """Answers and verdicts of the reward that votes are counted by, where one of them knows answers."""
    voter = answering.scorer.voter
    if voter is None:
        return None
    name, reward = voter
    return lambda sample: (reward.answer(sample.text), sample.rewards[name] >= 1.0)


def _by_source(
    samples: Sequence[Sample], *, solved: float, answered: Answered | None
) -> dict[str, dict[str, float]]:
    sources: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        sources[sample.prompt.source].append(sample)
    if len(sources) == 1:
        return {}
    return {
        name: {"prompts": _prompts(members), **scores(members, solved=solved, answered=answered)}
        for name, members in sources.items()
    }


def _prompts(samples: Sequence[Sample]) -> int:
    return len({sample.group for sample in samples})


def _shown(found: dict[str, float], name: str) -> str:
    error = found.get(f"{name}_standard_error")
    return f"{found[name]:.3f}" + (f" ± {error:.3f}" if error is not None else "")
