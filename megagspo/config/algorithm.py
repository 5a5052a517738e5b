"""The `algorithm` section: which objective, and its settings, whose defaults depend on it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megagspo.config.section import AtLeastOne, NotNegative, NotNegativeInt, Positive, Section

AlgorithmName = Literal[
    "gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "cispo", "rloo", "reinforce_pp", "hybrid"
]
Aggregation = Literal["sequence_mean", "token_mean", "constant_length"]
Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
Scale = Literal["group_std", "batch_std", "none"]
Estimator = Literal["k1", "k2", "k3"]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class AlgorithmDefaults:
    """What an algorithm uses where the configuration is silent. clip_low None: no lower bound."""

    clip_low: float | None
    clip_high: float
    aggregation: Aggregation
    baseline: Baseline
    scale: Scale


SEQUENCE_RANGE = (3e-4, 4e-4)
"""The clip range of sequence ratios, arXiv 2507.18071, section 5.1."""
TOKEN_RANGE = (0.2, 0.2)
"""The clip range of token ratios, arXiv 1707.06347 and 2402.03300."""

DEFAULTS: dict[AlgorithmName, AlgorithmDefaults] = {
    "gspo": AlgorithmDefaults(*SEQUENCE_RANGE, "sequence_mean", "group_mean", "group_std"),
    "gspo_token": AlgorithmDefaults(*SEQUENCE_RANGE, "sequence_mean", "group_mean", "group_std"),
    "grpo": AlgorithmDefaults(*TOKEN_RANGE, "sequence_mean", "group_mean", "group_std"),
    "dr_grpo": AlgorithmDefaults(*TOKEN_RANGE, "constant_length", "group_mean", "none"),  # arXiv 2503.20783
    "dapo": AlgorithmDefaults(0.2, 0.28, "token_mean", "group_mean", "group_std"),  # arXiv 2503.14476
    "cispo": AlgorithmDefaults(None, 4.0, "token_mean", "group_mean", "group_std"),  # arXiv 2506.13585
    "rloo": AlgorithmDefaults(*TOKEN_RANGE, "token_mean", "leave_one_out", "none"),  # arXiv 2402.14740
    "reinforce_pp": AlgorithmDefaults(*TOKEN_RANGE, "token_mean", "batch_mean", "batch_std"),  # 2501.03262
    "hybrid": AlgorithmDefaults(*SEQUENCE_RANGE, "sequence_mean", "group_mean", "group_std"),  # a = 1
}


def between_ranges(weight: float) -> tuple[float, float]:
    """The clip range of `hybrid`: interpolated in the log between those of sequence and token ratios.

    ln(1 + eps) = a ln(1 + eps_sequence) + (1 - a) ln(1 + eps_token), the low end likewise with 1 - eps; the
    ends a = 1 and a = 0 are exact.
    """
    if weight in (0.0, 1.0):
        return SEQUENCE_RANGE if weight else TOKEN_RANGE

    def blend(sequence: float, token: float) -> float:
        return math.expm1(weight * math.log1p(sequence) + (1 - weight) * math.log1p(token))

    low = -blend(-SEQUENCE_RANGE[0], -TOKEN_RANGE[0])
    return low, blend(SEQUENCE_RANGE[1], TOKEN_RANGE[1])


class AdvantageConfig(Section):
    """A = (reward - baseline) / (std + eps), or reward - baseline with scale none; 0 in a constant group."""

    baseline: Baseline = "group_mean"
    """What is subtracted from a reward: the mean of its group of responses, that of the group's other
    responses, that of the whole batch, or nothing. Default leave_one_out for rloo, batch_mean for
    reinforce_pp."""
    scale: Scale = "group_std"
    """What it is divided by: the standard deviation of its group or of the batch, or nothing. Default none
    for dr_grpo and rloo, batch_std for reinforce_pp."""
    ddof: Annotated[NotNegativeInt, Field(le=1)] = 1
    """1: the unbiased standard deviation (divides by n - 1); 0: the population's."""
    eps: Positive = 1e-6
    """Added to the standard deviation."""


class KLConfig(Section):
    """KL(policy || reference), a frozen copy of the policy; x = log pi_ref - log pi at each loss token."""

    coefficient: NotNegative = 0.0
    """Weight of the KL term; 0 leaves the reference out altogether."""
    estimator: Estimator = "k3"
    """k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x."""
    where: Literal["loss", "reward"] = "loss"
    """loss: added to the loss, at the policy being trained; reward: subtracted from rewards, summed over the
    response, at the policy that the ratio is taken against."""
    reference_every: NotNegativeInt = 0
    """The reference becomes the current policy every so many steps; 0: it stays the policy the run began
    with."""


class CorrectionConfig(Section):
    """Trainer-rollout correction c = exp(log pi_old of the trainer - log pi of the engine), a weight on the
    objective's term."""

    mode: Literal["none", "truncate", "mask"] = "none"
    """truncate: min(c, high); mask: c where low <= c <= high, else 0."""
    level: Literal["token", "sequence"] = "token"
    """One weight a token, or one a response."""
    sequence_form: Literal["geometric_mean", "product"] = "geometric_mean"
    """With level sequence: exp of the mean of a response's log-ratios, or of their sum."""
    low: NotNegative = 0.5
    """With mode mask: smaller weights become 0."""
    high: Positive = 2.0
    """With mode truncate: larger weights become this; with mode mask: larger weights become 0."""


class OffPolicyMaskConfig(Section):
    """Drops whole responses that went bad off-policy (DeepSeek-V3.2 report)."""

    threshold: NotNegative | None = None
    """Drops a response with a negative advantage whose mean (log pi of the engine - log pi of the policy) is
    above it."""


class OverlongConfig(Section):
    """DAPO's soft punishment of length (arXiv 2503.14476, eq. 13)."""

    buffer: NotNegativeInt = 0
    """Tokens before rollout.response_length_max over which the punishment rises from 0 to the full; 0: no
    punishment."""
    penalty: NotNegative = 0.0
    """The full punishment, subtracted from the reward."""


class AlgorithmConfig(Section):
    """The objective. Every value is concrete: what was left out, or null, has the algorithm's default."""

    name: AlgorithmName = "gspo"
    """gspo: one importance ratio a response; gspo_token: the same with an advantage a token; grpo, dr_grpo,
    dapo, rloo, reinforce_pp: one ratio a token; cispo: truncated weights on log-likelihood; hybrid: a blend
    of sequence and token ratio."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = 3e-4
    """The ratio is kept at or above 1 - clip_low. Default 3e-4 for gspo, gspo_token, 0.2 for token ratios,
    none for cispo, between them for hybrid."""
    clip_high: Positive = 4e-4
    """The ratio is kept at or below 1 + clip_high. Default 4e-4 for gspo, gspo_token, 0.28 for dapo, 4.0 for
    cispo, 0.2 for other token ratios, between them for hybrid."""
    aggregation: Aggregation = "sequence_mean"
    """sequence_mean: mean over each response, then over responses; token_mean: over all tokens;
    constant_length: sum over each response / length_constant, then mean over responses. gspo: sequence_mean
    only."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    kl: KLConfig = KLConfig()
    """The leash to a reference policy."""
    entropy_coefficient: NotNegative = 0.0
    """Weight of the mean entropy, subtracted from the loss."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """With a negative advantage the term is kept at or above dual_clip x advantage (arXiv 1912.09729)."""
    log_ratio_max: Positive = 20.0
    """Log-ratios are clamped to this size before exp."""
    hybrid_weight: Share = 0.5
    """With hybrid: a, the share of the sequence ratio; 1 is gspo_token, 0 is grpo."""
    length_constant: AtLeastOne | None = None
    """With aggregation constant_length: the divisor. Default rollout.response_length_max."""
    allow_wide_clip: bool = False
    """Accept a clip range from 0.05 on for sequence ratios, which is refused otherwise as meant for token
    ratios."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Whose log-probabilities are in the ratio's denominator: the trainer's, recomputed, or the engine's."""
    correction: CorrectionConfig = CorrectionConfig()
    """How the difference between trainer and engine is corrected."""
    off_policy_mask: OffPolicyMaskConfig = OffPolicyMaskConfig()
    """Which responses are dropped as too far off-policy."""
    overlong: OverlongConfig = OverlongConfig()
    """How long responses are punished."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by groups of further prompts (arXiv 2503.14476, section
    3.2)."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_algorithm(cls, values: Any) -> Any:
        """Fills in what depends on the algorithm, so that a saved configuration holds the values used."""
        name = values.get("name", "gspo") if isinstance(values, dict) else None
        if not isinstance(name, str) or name not in DEFAULTS:
            return values  # for what comes next to complain about
        defaults = asdict(DEFAULTS[name])
        weight = values.get("hybrid_weight", 0.5)
        if name == "hybrid" and isinstance(weight, int | float) and 0 <= weight <= 1:
            defaults["clip_low"], defaults["clip_high"] = between_ranges(weight)
        advantage = {key: defaults.pop(key) for key in ("baseline", "scale")}
        given = {key: value for key, value in values.items() if value is not None or key not in defaults}
        filled = defaults | given
        if isinstance(mine := given.get("advantage") or {}, dict):
            stated = {key: value for key, value in mine.items() if value is not None}
            filled["advantage"] = advantage | stated
        return filled

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy's log-probabilities are wanted."""
        return self.kl.coefficient > 0

    @property
    def needs_trainer_pass(self) -> bool:
        """Whether the trainer computes log-probabilities of its own before the updates."""
        return self.old_logprobs == "trainer" or self.correction.mode != "none"
