"""From rewards and log-probabilities to advantages and correction weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megagspo.algo.signal import Responses, response_advantages, response_corrections
from megagspo.config.algorithm import AlgorithmConfig
from tests.conformance import papers

OLD = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5]), torch.tensor([-3.0, -1.0, -2.5])]
REFERENCE = [row - 0.25 * (1 + torch.arange(len(row))) for row in OLD]
ROLLOUT = [row + 0.125 for row in OLD]
REWARDS = [1.0, 0.0, 0.25]


def responses(**more: Any) -> Responses:
    given: dict[str, Any] = {"rewards": REWARDS, "groups": ["g"] * 3, "old_logprobs": OLD}
    return Responses(**given | more)


def algorithm(**keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(keys)


@pytest.mark.parametrize("name", ["gspo", "grpo", "rloo", "reinforce_pp"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_kl_in_the_reward_is_subtracted_before_baseline_and_scale(
    name: Any, estimator: str, where: str
) -> None:
    """Summed over the response; for reinforce_pp as returns to go, so that advantages differ over tokens. KL
    in the loss leaves advantages alone."""
    kl = {"coefficient": 0.2, "estimator": estimator, "where": where}
    found = response_advantages(responses(ref_logprobs=REFERENCE), algorithm(name=name, kl=kl))
    rows = [
        {
            "group": "g",
            "reward": reward,
            "train_logprobs": old.tolist(),
            "old_logprobs": old.tolist(),
            "ref_logprobs": reference.tolist(),
        }
        for reward, old, reference in zip(REWARDS, OLD, REFERENCE, strict=True)
    ]
    expected = papers.all_advantages(papers.settings({"name": name, "kl": kl}), rows)
    assert [row.tolist() for row in found] == [pytest.approx(row, rel=1e-12, abs=1e-14) for row in expected]
    differ = any(len(set(row.tolist())) > 1 for row in found)
    assert differ == (name == "reinforce_pp" and where == "reward")
    plain = response_advantages(responses(), algorithm(name=name))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)) == (where == "loss")


def test_k1_in_the_reward_is_the_log_ratio_summed() -> None:
    """By hand: penalties .2 x (.25 + .5), .2 x .25, .2 x (.25 + .5 + .75)."""
    plain = {"baseline": "none", "scale": "none"}
    kl = {"coefficient": 0.2, "estimator": "k1", "where": "reward"}
    found = response_advantages(
        responses(ref_logprobs=REFERENCE), algorithm(name="grpo", kl=kl, advantage=plain)
    )
    assert [row[0].item() for row in found] == pytest.approx([0.85, -0.05, -0.05])
    returns = response_advantages(
        responses(ref_logprobs=REFERENCE), algorithm(name="reinforce_pp", kl=kl, advantage=plain)
    )
    assert returns[2].tolist() == pytest.approx([-0.05, 0.0, 0.1])


def test_given_token_advantages_take_the_place_of_what_is_computed() -> None:
    given = torch.tensor([0.5, -0.5])
    found = response_advantages(responses(token_advantages=[given, None, None]), algorithm(name="grpo"))
    plain = response_advantages(responses(), algorithm(name="grpo"))
    assert torch.equal(found[0], given)
    assert torch.equal(found[1], plain[1])


@pytest.mark.parametrize("old", [OLD, ROLLOUT])
def test_corrections_compare_the_trainer_with_the_engine_whatever_the_ratio_is_taken_against(
    old: list[torch.Tensor],
) -> None:
    correction = {"mode": "truncate", "high": 10.0}
    found = response_corrections(
        responses(old_logprobs=old, trainer_logprobs=OLD, rollout_logprobs=ROLLOUT),
        algorithm(name="gspo", correction=correction),
    )
    assert found is not None
    for row in found:
        assert row.tolist() == pytest.approx([torch.tensor(-0.125).exp().item()] * len(row))


def test_without_a_correction_there_are_no_weights() -> None:
    assert response_corrections(responses(), algorithm()) is None
