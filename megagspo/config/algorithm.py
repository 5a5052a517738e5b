"""The `algorithm` section: which objective, and its settings, whose defaults depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megagspo.config.section import NotNegativeInt, Positive, Section

AlgorithmName = Literal["gspo", "grpo"]
Aggregation = Literal["sequence_mean", "token_mean"]


@dataclass(frozen=True)
class AlgorithmDefaults:
    """What an algorithm uses where the configuration is silent."""

    clip_low: float
    clip_high: float
    aggregation: Aggregation


DEFAULTS: dict[AlgorithmName, AlgorithmDefaults] = {
    "gspo": AlgorithmDefaults(3e-4, 4e-4, "sequence_mean"),  # arXiv 2507.18071, section 5.1
    "grpo": AlgorithmDefaults(0.2, 0.2, "sequence_mean"),  # arXiv 2402.03300
}


def _default(field: str) -> Any:
    """The default of a field that depends on the algorithm: looked up by the name validated before it."""
    return Field(default_factory=lambda data: getattr(DEFAULTS[data["name"]], field))


class AdvantageConfig(Section):
    """A = (reward - baseline) / (std + eps), or reward - baseline with scale none; 0 in a constant group."""

    baseline: Literal["group_mean", "none"] = "group_mean"
    """What is subtracted from a reward: the mean of its group of responses, or nothing."""
    scale: Literal["group_std", "none"] = "group_std"
    """What it is divided by: the standard deviation of its group, or nothing."""
    ddof: Annotated[NotNegativeInt, Field(le=1)] = 1
    """1: the unbiased standard deviation (divides by n - 1); 0: the population's."""
    eps: Positive = 1e-6
    """Added to the standard deviation."""


class AlgorithmConfig(Section):
    """The objective. Every value is concrete: what was left out, or null, has the algorithm's default."""

    name: AlgorithmName = "gspo"
    """gspo: one importance ratio a response; grpo: one a token."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = _default("clip_low")
    """The ratio is kept at or above 1 - clip_low. Default 3e-4 for gspo, 0.2 for grpo."""
    clip_high: Positive = _default("clip_high")
    """The ratio is kept at or below 1 + clip_high. Default 4e-4 for gspo, 0.2 for grpo."""
    aggregation: Aggregation = _default("aggregation")
    """sequence_mean: mean over each response, then over responses; token_mean (not gspo): over all tokens."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    log_ratio_max: Positive = 20.0
    """Log-ratios are clamped to this size before exp."""
    allow_wide_clip: bool = False
    """Accept a gspo clip range from 0.05 on, which is refused otherwise as a range meant for token ratios."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Whose log-probabilities are in the ratio's denominator: the trainer's, recomputed, or the engine's."""

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        by_name = AlgorithmDefaults.__dataclass_fields__
        return {key: value for key, value in values.items() if value is not None or key not in by_name}
