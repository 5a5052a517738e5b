"""Stages that need no policy: what is learned from, how it is divided, what is measured."""

from __future__ import annotations

import math

import pytest
import torch

from megagspo.config.algorithm import AlgorithmConfig
from megagspo.config.schema import RewardConfig
from megagspo.errors import DataError
from megagspo.evaluate import pass_at
from megagspo.measure import mismatch_metrics, reward_metrics
from megagspo.stages import Experience, divide, experience
from megagspo.types import Completion, FinishReason, Prompt, Sample


def sample(
    number: int, group: str, reward: float, *, tokens: tuple[int, ...] = (7, 8), finish: FinishReason = "stop"
) -> Sample:
    prompt = Prompt(id=f"p/{group}", source="p", text="q", token_ids=(1, 2, 3))
    completion = Completion(
        request_id=f"r{number}",
        token_ids=tokens,
        logprobs=tuple(-0.5 for _ in tokens),
        finish_reason=finish,
        version_min=0,
        version_max=0,
    )
    return Sample(
        id=f"r{number}", group=group, prompt=prompt, completion=completion, text="", reward=reward, rewards={}
    )


def test_aborted_and_empty_samples_count_nowhere() -> None:
    """Rewards 1, 1, 0, 0 with the second one aborted: the remaining three have mean 1/3, whatever it got."""
    samples = [
        sample(0, "g", 1.0),
        sample(1, "g", 1.0, finish="abort"),
        sample(2, "g", 0.0),
        sample(3, "g", 0.0),
        sample(4, "g", 100.0, tokens=()),
    ]
    data = experience(AlgorithmConfig(), samples)
    assert [s.id for s in data.samples] == ["r0", "r2", "r3"]
    assert data.advantages == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-4)
    assert reward_metrics(samples, [RewardConfig(name="exact")])["reward/mean"] == pytest.approx(1 / 3)


def test_a_survivor_alone_in_its_group_gets_exactly_zero() -> None:
    data = experience(AlgorithmConfig(), [sample(0, "g", 100.0, finish="abort"), sample(1, "g", 1.0)])
    assert data.advantages == [0.0]


def test_a_step_without_anything_to_learn_from_says_so() -> None:
    with pytest.raises(DataError, match="every one was aborted"):
        experience(AlgorithmConfig(), [sample(0, "g", 1.0, finish="abort")])


def test_training_tokens_are_the_engines_own() -> None:
    data = experience(
        AlgorithmConfig(), [sample(0, "g", 1.0, tokens=(1, 2)), sample(1, "g", 0.0, tokens=(3,))]
    )
    assert [s.token_ids for s in data.sequences] == [(1, 2, 3, 1, 2), (1, 2, 3, 3)]
    assert [len(values) for values in data.rollout_logprobs] == [2, 1]


@pytest.mark.parametrize(("count", "parts"), [(10, 4), (3, 4), (8, 1), (512, 4)])
def test_mini_batches_hold_every_sample_once_in_like_sizes(count: int, parts: int) -> None:
    batches = divide(count, parts, seed=1, step=2)
    assert sorted(i for batch in batches for i in batch) == list(range(count))
    sizes = [len(batch) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


def test_the_division_depends_on_seed_and_step_alone() -> None:
    assert divide(64, 4, seed=1, step=2) == divide(64, 4, seed=1, step=2)
    assert divide(64, 4, seed=1, step=2) != divide(64, 4, seed=1, step=3)
    assert divide(64, 4, seed=1, step=2) != divide(64, 4, seed=2, step=2)


def test_solved_groups_are_those_with_the_full_reward() -> None:
    samples = [sample(0, "a", 1.0), sample(1, "a", 1.0), sample(2, "b", 0.0), sample(3, "b", 0.5)]
    metrics = reward_metrics(
        [*samples, sample(4, "c", 1.0), sample(5, "c", 0.0)], [RewardConfig(name="exact")]
    )
    assert metrics["reward/solve_all"] == pytest.approx(1 / 3)
    assert metrics["reward/solve_none"] == pytest.approx(1 / 3)


def mismatch(gap: float, config: AlgorithmConfig) -> dict[str, float]:
    data = experience(config, [sample(0, "g", 1.0), sample(1, "g", 0.0, tokens=(1, 2, 3))])
    trainer = [values + gap for values in data.rollout_logprobs]
    return mismatch_metrics(
        Experience(**{**vars(data), "trainer_logprobs": trainer, "old_logprobs": trainer}), config
    )


def test_mismatch_is_measured_in_units_of_the_clip_range() -> None:
    config = AlgorithmConfig()
    at_the_upper_edge = mismatch(math.log1p(4e-4), config)
    at_the_lower_edge = mismatch(math.log1p(-3e-4), config)
    # the log-probabilities are float32 numbers near 0.5, whose spacing is 6e-8: 2e-4 of the range
    assert at_the_upper_edge["mismatch/ratio_in_eps"] == pytest.approx(1.0, abs=1e-3)
    assert at_the_lower_edge["mismatch/ratio_in_eps"] == pytest.approx(-1.0, abs=1e-3)
    large = mismatch(0.5, config)
    assert large["mismatch/logprob_abs_mean"] == pytest.approx(0.5)
    assert large["mismatch/k3"] == pytest.approx(math.exp(0.5) - 1.5, rel=1e-6)


def test_mismatch_is_absent_when_the_trainer_did_not_compute() -> None:
    data = experience(AlgorithmConfig(), [sample(0, "g", 1.0), sample(1, "g", 0.0)])
    assert mismatch_metrics(data, AlgorithmConfig()) == {}


def test_pass_at_k_is_the_chance_that_k_of_n_contain_a_right_one() -> None:
    """n = 4, c = 1: by hand 1/4, 1/2, 1 for k = 1, 2, 4; the group without any right one halves them."""
    samples = [sample(i, "a", float(i == 0)) for i in range(4)] + [sample(i, "b", 0.0) for i in range(4, 8)]
    for k, expected in ((1, 0.125), (2, 0.25), (4, 0.5)):
        assert pass_at(k, samples, solved=1.0) == pytest.approx(expected)


def test_group_rewards_of_two_samples_are_symmetric() -> None:
    data = experience(AlgorithmConfig(), [sample(0, "g", 1.0), sample(1, "g", 0.0)])
    assert torch.tensor(data.advantages).sum().item() == pytest.approx(0.0, abs=1e-9)
