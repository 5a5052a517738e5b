"""How good a model is on held-out prompts: avg@k and the unbiased pass@k."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

import torch

from megagspo.assembly import Respondent, Run, load_tokenizer, respondent
from megagspo.config import Config
from megagspo.data import load_prompts
from megagspo.errors import ConfigError
from megagspo.measure import full_reward
from megagspo.rollout.embedded.engine import EmbeddedEngine
from megagspo.stages import respond
from megagspo.types import Sample

# Evaluation draws its samples as step 0 does, which no training step shares: always the same seeds, before
# and after.
_STEP = 0


def average(samples: Sequence[Sample]) -> float:
    """avg@k: the mean reward over all responses, k to each prompt."""
    return statistics.fmean(sample.reward for sample in samples)


def pass_at(k: int, samples: Sequence[Sample], *, solved: float) -> float:
    """pass@k without bias (arXiv 2107.03374, eq. 1): the mean over prompts of 1 - C(n - c, k) / C(n, k),
    where c of the n responses get at least `solved`. Needs n >= k responses to every prompt."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample.reward >= solved)
    return statistics.fmean(
        1 - math.comb(len(right) - sum(right), k) / math.comb(len(right), k) for right in groups.values()
    )


def held_out_metrics(run: Run, answering: Respondent) -> dict[str, float]:
    """`eval/avg@k` every `eval.every` steps, through the engine that rollouts come from."""
    every, k = run.config.eval.every, run.config.eval.samples
    if not every or run.step % every:
        return {}
    return {f"eval/avg@{k}": average(respond(answering, run.prompts.held_out, responses=k, step=_STEP))}


def evaluate(config: Config) -> tuple[dict[str, float], list[Sample]]:
    """The scores of the Hugging Face model at `model.path` on `data.eval`, `eval.samples` responses to each
    prompt.

    Returns avg@k, and pass@j for j = 1, 2, 4, ... up to k, with the samples. One process, no Megatron.
    """
    tokenizer = load_tokenizer(config.model.path)
    prompts = load_prompts(config.data, tokenizer).held_out
    if not prompts:
        raise ConfigError("data.eval is empty: there is nothing to evaluate on; give it a source")
    dtype = getattr(torch, config.model.dtype or "float32")
    engine = EmbeddedEngine.from_pretrained(config.model.path, dtype=dtype)
    k = config.eval.samples
    with respondent(config, tokenizer, engine) as answering:
        samples = respond(answering, prompts, responses=k, step=_STEP)
    full = full_reward(config.reward)
    passes = {f"pass@{2**i}": pass_at(2**i, samples, solved=full) for i in range(k.bit_length())}
    return {f"avg@{k}": average(samples), **passes}, samples
