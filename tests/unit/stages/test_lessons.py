"""From samples to what the updates of a step learn from."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from megagspo.algo.aggregation import token_weights
from megagspo.config import Config
from megagspo.errors import DataError, NumericsError
from megagspo.stages import (
    Experience,
    divisions,
    experience,
    lesson,
    mini_batch,
    score_before_updates,
    supervised_batch,
)
from megagspo.stages.lessons import divide
from megagspo.types import LogProbs, Prompt, Sample, TrainSequence
from tests.unit.stages.samples import sample


def config_of(**sections: Any) -> Config:
    minimal = {"model": {"path": "m"}, "data": {"train": [{"jsonl": "t"}]}}
    return Config.model_validate({**minimal, **sections})


def scored(samples: list[Sample], gap: float = 0.0) -> Experience:
    """As if the trainer saw every token `gap` more likely than the engine, the reference 1 less."""
    data = experience(samples)
    return replace(
        data,
        trainer_logprobs=[values + gap for values in data.rollout_logprobs],
        ref_logprobs=[values - 1 for values in data.rollout_logprobs],
    )


def test_aborted_and_empty_samples_count_nowhere() -> None:
    """A3: rewards 1, 1, 0, 0 with the second one aborted: the remaining three have mean 1/3, whatever it
    got."""
    samples = [
        sample(0, "g", 1.0),
        sample(1, "g", 1.0, finish="abort"),
        sample(2, "g", 0.0),
        sample(3, "g", 0.0),
        sample(4, "g", 100.0, tokens=()),
    ]
    data = scored(samples)
    assert [s.id for s in data.samples] == ["r0", "r2", "r3"]
    advantages = [values[0].item() for values in lesson(config_of(), data).advantages]
    assert advantages == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-4)


def test_a_survivor_alone_in_its_group_gets_exactly_zero() -> None:
    data = scored([sample(0, "g", 100.0, finish="abort"), sample(1, "g", 1.0)])
    assert lesson(config_of(), data).advantages[0].tolist() == [0.0, 0.0]


def test_a_step_without_anything_to_learn_from_says_so() -> None:
    with pytest.raises(DataError, match="every one was aborted"):
        experience([sample(0, "g", 1.0, finish="abort")])


def test_training_tokens_are_the_engines_own() -> None:
    data = experience([sample(0, "g", 1.0, tokens=(1, 2)), sample(1, "g", 0.0, tokens=(3,))])
    assert [s.token_ids for s in data.sequences] == [(1, 2, 3, 1, 2), (1, 2, 3, 3)]
    assert [len(values) for values in data.rollout_logprobs] == [2, 1]


def test_rewards_of_two_samples_give_symmetric_advantages() -> None:
    found = lesson(config_of(), scored([sample(0, "g", 1.0), sample(1, "g", 0.0)])).advantages
    assert torch.cat(list(found)).sum().item() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_stops_the_step_with_the_samples_name(reward: float) -> None:
    with pytest.raises(NumericsError, match="sample r1: its reward is"):
        lesson(config_of(), scored([sample(0, "g", 1.0), sample(1, "g", reward)]))


@pytest.mark.parametrize(("old", "whose"), [("trainer", "trainer_logprobs"), ("rollout", "rollout_logprobs")])
def test_ratios_are_taken_against_whom_the_configuration_says(old: str, whose: str) -> None:
    data = scored([sample(0, "g", 1.0), sample(1, "g", 0.0)], gap=0.25)
    found = lesson(config_of(algorithm={"old_logprobs": old}), data)
    assert found.old_logprobs is getattr(data, whose)


def test_corrections_compare_trainer_and_engine() -> None:
    data = scored([sample(0, "g", 1.0), sample(1, "g", 0.0)], gap=0.25)
    assert lesson(config_of(), data).corrections is None
    found = lesson(config_of(algorithm={"correction": {"mode": "truncate"}}), data).corrections
    assert found is not None
    assert found[0].tolist() == pytest.approx([math.exp(0.25)] * 2)


def test_long_responses_are_punished_before_advantages() -> None:
    """Limit 4, buffer 2, penalty 1: lengths 2, 3, 4 lose 0, 1/2, 1 of equal rewards."""
    samples = [sample(n, "g", 1.0, tokens=(7,) * (n + 2)) for n in range(3)]
    config = config_of(
        rollout={"response_length_max": 4},
        algorithm={"overlong": {"buffer": 2, "penalty": 1.0}, "advantage": {"scale": "none"}},
    )
    found = [values[0].item() for values in lesson(config, scored(samples)).advantages]
    assert found == [0.5, 0.0, -0.5]


def test_kl_in_the_reward_of_reinforce_pp_gives_advantages_along_a_response() -> None:
    kl = {"coefficient": 0.1, "estimator": "k1", "where": "reward"}
    config = config_of(
        algorithm={"name": "reinforce_pp", "kl": kl, "advantage": {"baseline": "none", "scale": "none"}}
    )
    found = lesson(config, scored([sample(0, "g", 1.0), sample(1, "h", 0.0)])).advantages
    assert [row.tolist() for row in found] == [pytest.approx([0.8, 0.9]), pytest.approx([-0.2, -0.1])]


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        ({}, {"trainer"}),
        ({"old_logprobs": "rollout"}, set()),
        ({"old_logprobs": "rollout", "kl": {"coefficient": 0.1}}, {"reference"}),
        ({"kl": {"coefficient": 0.1, "where": "reward"}}, {"trainer", "reference"}),
        ({"old_logprobs": "rollout", "correction": {"mode": "mask"}}, {"trainer"}),
    ],
)
def test_only_what_the_configuration_needs_is_computed(algorithm: dict[str, Any], wanted: set[str]) -> None:
    asked = set()

    class Policy:
        def logprobs(self, sequences: list[TrainSequence], *, temperature: float) -> LogProbs:
            asked.add("trainer")
            values = [torch.zeros(s.loss_tokens) for s in sequences]
            return LogProbs(logprobs=values, entropies=values)

        def ref_logprobs(self, sequences: list[TrainSequence], *, temperature: float) -> list[torch.Tensor]:
            asked.add("reference")
            return [torch.zeros(s.loss_tokens) for s in sequences]

    policy: Any = Policy()
    settings = config_of(algorithm=algorithm).algorithm
    data = score_before_updates(policy, experience([sample(0, "g", 1.0)]), settings, temperature=1.0)
    assert asked == wanted
    assert (data.trainer_logprobs is not None) == ("trainer" in wanted)
    assert (data.ref_logprobs is not None) == ("reference" in wanted)


@pytest.mark.parametrize("whose", ["trainer", "reference"])
def test_log_probabilities_that_are_no_numbers_stop_the_step(whose: str) -> None:
    bad, good = torch.tensor([-1.0, math.nan]), torch.tensor([-1.0, -1.0])

    class Policy:
        def logprobs(self, sequences: Any, *, temperature: float) -> LogProbs:
            return LogProbs(logprobs=[bad if whose == "trainer" else good], entropies=[good])

        def ref_logprobs(self, sequences: Any, *, temperature: float) -> list[torch.Tensor]:
            return [bad if whose == "reference" else good]

    policy: Any = Policy()
    settings = config_of(algorithm={"kl": {"coefficient": 0.1}}).algorithm
    with pytest.raises(NumericsError, match=f"sample r0: the {whose}'s log-probabilities are not finite"):
        score_before_updates(policy, experience([sample(0, "g", 1.0)]), settings, temperature=1.0)


@pytest.mark.parametrize(("count", "parts"), [(10, 4), (3, 4), (8, 1), (512, 4)])
def test_mini_batches_hold_every_sample_once_in_like_sizes(count: int, parts: int) -> None:
    batches = divide(count, parts, seed=1, step=2)
    assert sorted(i for batch in batches for i in batch) == list(range(count))
    sizes = [len(batch) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


def test_the_division_depends_on_seed_step_and_epoch_alone() -> None:
    assert divide(64, 4, seed=1, step=2) == divide(64, 4, seed=1, step=2)
    assert divide(64, 4, seed=1, step=2) != divide(64, 4, seed=1, step=3)
    assert divide(64, 4, seed=1, step=2) != divide(64, 4, seed=2, step=2)
    assert divide(64, 4, seed=1, step=2) != divide(64, 4, seed=1, step=2, epoch=1)


def test_every_epoch_goes_over_all_samples_in_another_division() -> None:
    config = config_of(trainer={"epochs": 3, "minibatches": 4})
    parts = list(divisions(config, 20, step=1))
    assert len(parts) == 12
    assert set(Counter(i for part in parts for i in part).values()) == {3}
    assert parts[:4] != parts[4:8] != parts[8:]
    assert list(divisions(config_of(), 20, step=1)) == parts[:4]


@pytest.mark.parametrize("name", ["gspo", "dapo", "dr_grpo"])
def test_a_mini_batch_has_the_rows_of_its_members_and_weights_of_its_own(name: str) -> None:
    samples = [sample(n, "g", float(n), tokens=(7,) * (n + 1)) for n in range(5)]
    config = config_of(
        algorithm={"name": name, "correction": {"mode": "truncate"}}, rollout={"response_length_max": 8}
    )
    whole = lesson(config, scored(samples, gap=0.1))
    members = [4, 0, 2]
    part = mini_batch(config, whole, members)
    for field in (
        "sequences",
        "advantages",
        "old_logprobs",
        "rollout_logprobs",
        "ref_logprobs",
        "corrections",
    ):
        assert getattr(part, field) == [getattr(whole, field)[i] for i in members]
    aggregation = config.algorithm.aggregation
    assert part.token_weights == token_weights([5, 1, 3], aggregation, length_constant=8)
    assert whole.token_weights == token_weights([1, 2, 3, 4, 5], aggregation, length_constant=8)


def test_a_length_constant_that_is_given_goes_before_the_longest_response() -> None:
    data = scored([sample(0, "g", 1.0), sample(1, "g", 0.0)])
    found = lesson(config_of(algorithm={"name": "dr_grpo", "length_constant": 5}), data)
    assert found.token_weights == [1 / 10, 1 / 10]


def test_the_warm_up_weighs_all_tokens_of_the_answers_alike() -> None:
    prompts = [Prompt(id=f"p{i}", source="p", text="", token_ids=(1, 2)) for i in range(2)]
    batch = supervised_batch(prompts, [(3,), (4, 5, 6)])
    assert batch.token_weights == [0.25, 0.25]
    assert [s.token_ids for s in batch.sequences] == [(1, 2, 3), (1, 2, 4, 5, 6)]
