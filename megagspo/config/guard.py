"""Which settings of an objective are refused, and which are warned of: what published recipes get wrong.

Needs the `algorithm` section alone, so that `megagspo conformance` guards as `megagspo train` does.
"""

from __future__ import annotations

from collections.abc import Iterator

from megagspo.config.algorithm import SEQUENCE_RANGE, AlgorithmConfig
from megagspo.errors import ConfigError

# A sequence ratio is a geometric mean over tokens and stays far closer to 1 than a token ratio.
WARN_ABOVE = 0.01
REFUSE_FROM = 0.05


def guard(algorithm: AlgorithmConfig) -> list[str]:
    """Warnings for the user to read. Raises ConfigError where the settings contradict the objective."""
    _refuse_combinations(algorithm)
    return [*_wide_clip(algorithm), *_doubtful(algorithm), *_without_effect(algorithm)]


def check_group_size(algorithm: AlgorithmConfig, responses: int) -> None:
    """Raises ConfigError for one response a prompt with a group baseline or scale: every advantage would be
    0."""
    advantage = algorithm.advantage
    grouped = advantage.baseline in ("group_mean", "leave_one_out") or advantage.scale == "group_std"
    if responses == 1 and grouped:
        raise ConfigError(
            f"rollout.responses=1 with algorithm.advantage.baseline={advantage.baseline}, "
            f"scale={advantage.scale}: a group of one response has no spread to learn from: "
            "set rollout.responses=2 or more, or a baseline and scale over the batch "
            "(batch_mean, batch_std) or none"
        )


def check_token_advantages(algorithm: AlgorithmConfig) -> None:
    """Raises ConfigError for advantages that differ within a response where the objective has one ratio a
    response."""
    if algorithm.name == "gspo":
        raise ConfigError(
            "algorithm.name=gspo with an advantage a token: the plain sequence form has one a response: set "
            "algorithm.name=gspo_token, which is equal to it where advantages are"
        )


def _refuse_combinations(algorithm: AlgorithmConfig) -> None:
    name = algorithm.name
    if name == "gspo" and algorithm.aggregation != "sequence_mean":
        raise ConfigError(
            f"algorithm.aggregation={algorithm.aggregation} with algorithm.name=gspo: gspo has one ratio a "
            "response and averages over responses; otherwise long responses weigh more: set "
            "algorithm.aggregation=sequence_mean or algorithm.name=grpo"
        )
    if name in ("gspo", "cispo") and algorithm.dual_clip is not None:
        why = "its ratios are sequence ratios" if name == "gspo" else "it has no ratio in the gradient"
        raise ConfigError(
            f"algorithm.dual_clip={algorithm.dual_clip:g} with algorithm.name={name}: {why}, which dual clip "
            "is not made for: remove algorithm.dual_clip"
        )
    if name == "cispo" and algorithm.clip_low is not None:
        raise ConfigError(
            f"algorithm.clip_low={algorithm.clip_low:g} with algorithm.name=cispo: its weights are cut above "
            "only (arXiv 2506.13585): remove algorithm.clip_low"
        )
    if algorithm.correction.mode == "mask" and algorithm.correction.low > algorithm.correction.high:
        raise ConfigError(
            f"algorithm.correction.low={algorithm.correction.low:g} is above "
            f"high={algorithm.correction.high:g}: every token would be masked: lower low"
        )


def _wide_clip(algorithm: AlgorithmConfig) -> Iterator[str]:
    widest = max(algorithm.clip_low or 0.0, algorithm.clip_high)
    if algorithm.name not in ("gspo", "gspo_token") or widest <= WARN_ABOVE:
        return
    low, high = SEQUENCE_RANGE
    message = (
        f"algorithm.clip_low={algorithm.clip_low:g}, clip_high={algorithm.clip_high:g} is a wide range for "
        f"the sequence ratios of {algorithm.name}, which hardly ever leave it; the paper has {_short(low)} "
        f"and {_short(high)} (arXiv 2507.18071, section 5.1)"
    )
    if widest >= REFUSE_FROM and not algorithm.allow_wide_clip:
        raise ConfigError(
            f"{message}: from {REFUSE_FROM} on it is refused: remove both keys to have the paper's "
            "values, or set algorithm.allow_wide_clip=true"
        )
    yield message


def _doubtful(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.kl.coefficient > 0 and (algorithm.kl.estimator, algorithm.kl.where) == ("k1", "loss"):
        yield (
            "algorithm.kl.estimator=k1 in the loss: its expected gradient is zero on-policy, so it holds the "
            "policy nowhere: use k3 or k2, or algorithm.kl.where=reward"
        )
    if algorithm.correction.mode != "none" and algorithm.old_logprobs == "rollout":
        yield (
            "algorithm.correction with algorithm.old_logprobs=rollout: the ratio already has the engine's "
            "log-probabilities below the line, the mismatch counts twice: set algorithm.old_logprobs=trainer"
        )
    if algorithm.name == "dr_grpo" and algorithm.advantage.scale == "group_std":
        yield (
            "algorithm.advantage.scale=group_std with algorithm.name=dr_grpo: not dividing by the group's "
            "deviation is what it is about (arXiv 2503.20783): remove the key"
        )
    if algorithm.name == "gspo_token" and algorithm.aggregation != "sequence_mean":
        yield (
            f"algorithm.aggregation={algorithm.aggregation} with algorithm.name=gspo_token: long responses "
            "weigh more than in the paper's mean over responses (arXiv 2507.18071, eq. 13): remove the key"
        )


def _without_effect(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Settings that do nothing, for lack of another one."""
    overlong = algorithm.overlong
    if (overlong.buffer > 0) != (overlong.penalty > 0):
        given, absent = ("buffer", "penalty") if overlong.buffer else ("penalty", "buffer")
        yield (
            f"algorithm.overlong.{given}={getattr(overlong, given):g} without {absent}: no length is "
            f"punished: set algorithm.overlong.{absent} too (arXiv 2503.14476 has a buffer of a fifth of the "
            "longest response, and penalty 1)"
        )
    if algorithm.kl.reference_every > 0 and not algorithm.needs_reference:
        yield (
            f"algorithm.kl.reference_every={algorithm.kl.reference_every} with algorithm.kl.coefficient=0: "
            "there is no reference: set a coefficient, or remove the key"
        )
    if algorithm.length_constant is not None and algorithm.aggregation != "constant_length":
        yield (
            f"algorithm.length_constant={algorithm.length_constant} with "
            f"algorithm.aggregation={algorithm.aggregation}, which does not divide by it: remove the key, or "
            "set algorithm.aggregation=constant_length"
        )


def _short(value: float) -> str:
    """3e-4 for 0.0003."""
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
