"""Scores of a model from its responses to held-out prompts: avg@k, pass@k, maj@k. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from megagspo.types import Sample

Answered = Callable[[Sample], tuple[str | None, bool]]
"""Of a response: its answer as text, None where it has none; and whether the answer is right."""


def scores(samples: Sequence[Sample], *, solved: float, answered: Answered | None = None) -> dict[str, float]:
    """The scores of k responses to each prompt, by name. solved: the reward of a response that is right.

    avg@k                 the mean reward, first over the responses to a prompt, then over prompts
    avg@k_standard_error  of avg@k over prompts, see `standard_error`; absent with a single prompt
    pass@j                the mean of `pass_at` over prompts, for j = 1, 2, 4, ... below k, and k
    maj@k                 the mean of `majority` over prompts; absent without `answered`
    """
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    sizes = {len(group) for group in groups.values()}
    assert len(sizes) == 1, f"prompts have {sorted(sizes)} responses; all need the same number"
    (k,) = sizes
    means = [statistics.fmean(sample.reward for sample in group) for group in groups.values()]
    right = [sum(sample.reward >= solved for sample in group) for group in groups.values()]
    found = {f"avg@{k}": statistics.fmean(means)}
    if len(means) > 1:
        found[f"avg@{k}_standard_error"] = standard_error(means)
    for j in [*(2**i for i in range(k.bit_length()) if 2**i < k), k]:
        found[f"pass@{j}"] = statistics.fmean(pass_at(j, responses=k, right=c) for c in right)
    if answered is not None:
        found[f"maj@{k}"] = statistics.fmean(majority(map(answered, group)) for group in groups.values())
    return found


def standard_error(means: Sequence[float]) -> float:
    """The standard error of the mean of prompts' means: their sample standard deviation / sqrt(prompts).

    The unit is the prompt: responses to one prompt are alike, and counting each as an observation of its own
    would make the error too small. mean +- 1.96 standard errors is a 95 % interval by the normal
    approximation (arXiv 2411.00640), for the chance of drawing these prompts.
    """
    return statistics.stdev(means) / math.sqrt(len(means))


def pass_at(k: int, *, responses: int, right: int) -> float:
    """The chance that k of a prompt's responses, drawn without replacement, contain a right one:
    1 - C(n - c, k) / C(n, k) with n responses, c of them right. Averaged over prompts this is pass@k without
    bias (Chen et al. 2021, arXiv 2107.03374, equation 1); 1 - (1 - c/n)^k is biased. Needs k <= n."""
    assert 1 <= k <= responses, f"pass@{k} of {responses} responses"
    return 1.0 - math.comb(responses - right, k) / math.comb(responses, k)


def majority(votes: Iterable[tuple[str | None, bool]]) -> float:
    """Whether the answer that most responses to a prompt give is right (self-consistency, arXiv 2203.11171).

    Each response with an answer has one vote; answers are one answer when their texts are equal. 1 or 0 for
    the answer with the most votes; of several with as many votes, the share that is right: what breaking
    the tie by chance gives on average. 0 when no response has an answer.
    """
    right: dict[str, bool] = {}
    count: Counter[str] = Counter()
    for answer, is_right in votes:
        if answer is not None:
            count[answer] += 1
            right[answer] = is_right
    most = max(count.values(), default=0)
    winners = [answer for answer, number in count.items() if number == most]
    return statistics.fmean(right[answer] for answer in winners) if winners else 0.0
