"""What the responses of a step teach: advantages and correction weights, from rewards and log-probabilities.

Everything here is data about the policy before the updates; nothing carries a gradient. The training loop and
`megagspo conformance` both go through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megagspo.algo.advantages import advantages, token_advantages
from megagspo.algo.corrections import correction_weights
from megagspo.algo.kl import kl_estimate
from megagspo.algo.shaping import returns_to_go
from megagspo.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, kw_only=True)
class Responses:
    """Trainable responses of a step; the lists run parallel. Log-probabilities are those of a response's
    trainable tokens, [tokens] each, nats; None where the configuration does not ask for them.

    rewards: as scored, length punishment included; groups: ids; old_logprobs: of the policy that the ratio is
    taken against; trainer_logprobs: the trainer's own before the updates; token_advantages: given per token
    (multi-turn turns), they take the place of what would be computed.
    """

    rewards: Sequence[float]
    groups: Sequence[str]
    old_logprobs: Sequence[Tensor]
    trainer_logprobs: Sequence[Tensor] | None = None
    rollout_logprobs: Sequence[Tensor] | None = None
    ref_logprobs: Sequence[Tensor] | None = None
    token_advantages: Sequence[Tensor | None] | None = None


def response_advantages(responses: Responses, config: AlgorithmConfig) -> list[Tensor]:
    """A_it of every response, [tokens] float64 each.

    With KL in the reward, the penalties coefficient x KL_it are taken at the old policy and summed over the
    response, before baseline and scale; `reinforce_pp` keeps them where they arise, as returns to go.
    """
    lengths = [len(values) for values in responses.old_logprobs]
    rewards = list(responses.rewards)
    if config.kl.coefficient > 0 and config.kl.where == "reward":
        penalties = _penalties(responses, config)
        if config.name == "reinforce_pp":
            returns = [returns_to_go(r, p) for r, p in zip(rewards, penalties, strict=True)]
            computed = token_advantages(returns, responses.groups, config.advantage)
            return _given_or(responses, [torch.tensor(row, dtype=torch.float64) for row in computed])
        rewards = [reward - sum(penalty) for reward, penalty in zip(rewards, penalties, strict=True)]
    values = advantages(rewards, responses.groups, config.advantage)
    spread = [
        torch.full((length,), value, dtype=torch.float64)
        for value, length in zip(values, lengths, strict=True)
    ]
    return _given_or(responses, spread)


def response_corrections(responses: Responses, config: AlgorithmConfig) -> list[Tensor] | None:
    """The correction weights of every response, [tokens] each; None where there is no correction."""
    if config.correction.mode == "none":
        return None
    assert responses.trainer_logprobs is not None
    assert responses.rollout_logprobs is not None
    return [
        correction_weights(trainer, rollout, config.correction, log_ratio_max=config.log_ratio_max)
        for trainer, rollout in zip(responses.trainer_logprobs, responses.rollout_logprobs, strict=True)
    ]


def _penalties(responses: Responses, config: AlgorithmConfig) -> list[list[float]]:
    assert responses.ref_logprobs is not None
    return [
        (
            config.kl.coefficient
            * kl_estimate(
                old.double(),
                reference.double(),
                estimator=config.kl.estimator,
                log_ratio_max=config.log_ratio_max,
            )
        ).tolist()
        for old, reference in zip(responses.old_logprobs, responses.ref_logprobs, strict=True)
    ]


def _given_or(responses: Responses, computed: list[Tensor]) -> list[Tensor]:
    if responses.token_advantages is None:
        return computed
    return [
        own if given is None else given
        for given, own in zip(responses.token_advantages, computed, strict=True)
    ]
