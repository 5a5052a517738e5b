"""Twelve faults that public implementations of these objectives had, each shown to be impossible here."""

from __future__ import annotations

import copy
import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megagspo.algo.aggregation import token_weights
from megagspo.algo.losses import objective_of
from megagspo.algo.objective import TokenBatch, token_batch
from megagspo.config.algorithm import AlgorithmName
from megagspo.config.guard import check_token_advantages, guard
from megagspo.conformance.evaluation import Outcome, evaluate
from megagspo.conformance.vectors import Vector
from megagspo.errors import ConfigError
from megagspo.policy.packing import Packing, plan_microbatches
from megagspo.stages import experience, score_before_updates, update
from megagspo.types import Completion, LogProbs, MiniBatch, Prompt, Sample, TrainSequence
from tests.conformance.generate import draw
from tests.unit.algo.batches import (
    ADVANTAGES,
    LENGTHS,
    NAMES,
    SEQUENCE_RATIOS,
    loss_and_gradient,
    make_batch,
    random_rows,
    settings,
)


def outcome(samples: list[dict[str, Any]], name: AlgorithmName = "gspo", **keys: Any) -> Outcome:
    algorithm = {"name": name, **({"length_constant": 8} if name == "dr_grpo" else {}), **keys}
    return evaluate(Vector.model_validate({"name": "case", "algorithm": algorithm, "samples": samples}))


def off(name: str) -> float:
    """How far apart two policies are for some tokens to be clipped and others not."""
    return 1e-3 if name in SEQUENCE_RATIOS else 0.3


@pytest.mark.parametrize("name", SEQUENCE_RATIOS)
def test_fault_1_a_sequence_ratio_is_not_broadcast_over_tokens(name: AlgorithmName) -> None:
    """A response contributes s_i A_i / N to the loss whatever its length. A6: two answers of 2 and 8 tokens,
    ratio 1, advantages +1 and -1 give 0, not 0.6."""
    for ratio in (1.0, math.exp(2e-4)):
        train = [torch.full((length,), -1.0, dtype=torch.float64) for length in (2, 8)]
        old = [row - math.log(ratio) for row in train]
        loss, _, _ = loss_and_gradient(
            make_batch(train, old, [1.0, -1.0], dtype=torch.float64), settings(name)
        )
        assert loss == pytest.approx(0, abs=1e-15)


def test_fault_2_gspo_is_a_mean_over_responses_of_a_mean_over_tokens() -> None:
    """Repeating the tokens of a response changes nothing: no sum, no weight by length. The other
    aggregations are refused."""
    train, old = random_rows(1e-3)
    once, _, _ = loss_and_gradient(make_batch(train, old, ADVANTAGES, dtype=torch.float64), settings("gspo"))
    new, before = ([row.repeat(3) if i == 2 else row for i, row in enumerate(rows)] for rows in (train, old))
    twice, _, _ = loss_and_gradient(
        make_batch(new, before, ADVANTAGES, dtype=torch.float64), settings("gspo")
    )
    assert twice == pytest.approx(once, rel=1e-12)
    for aggregation in ("token_mean", "constant_length"):
        with pytest.raises(ConfigError, match="sequence_mean"):
            guard(settings("gspo", aggregation=aggregation))


@pytest.mark.parametrize("name", NAMES)
def test_fault_3_only_a_responses_own_tokens_are_in_its_mean(name: AlgorithmName) -> None:
    """Tokens that are masked, whatever their values and wherever they stand, change no loss and no gradient
    of another token; their own gradient is 0."""
    samples = draw(1, off(name))
    padded = copy.deepcopy(samples)
    for sample in padded:
        for key, filling in (("mask", 0), ("train_logprobs", -7.5), ("old_logprobs", 40.0)):
            sample[key] = [filling] + [v for value in sample[key] for v in (value, filling)]
    plain, filled = outcome(samples, name), outcome(padded, name)
    assert filled.loss == pytest.approx(plain.loss, rel=1e-14)
    for row, wide in zip(plain.gradients, filled.gradients, strict=True):
        assert wide[1::2] == pytest.approx(row, rel=1e-14)
        assert not any(wide[::2])


@pytest.mark.parametrize("name", NAMES)
def test_fault_4_no_log_ratio_makes_the_loss_infinite(name: AlgorithmName) -> None:
    """Clamped before exp, in ratios and in k3: value and gradient are finite. All options together in
    tests/unit/algo/test_extremes.py."""
    for x in (200.0, -200.0):
        train = [torch.tensor([-1.0, -2.0])]
        batch = make_batch(train, [train[0] - x], [-1.0], ref_logprobs=[train[0] + x])
        loss, gradient, _ = loss_and_gradient(batch, settings(name, kl={"coefficient": 0.1}))
        assert math.isfinite(loss)
        assert bool(gradient.isfinite().all())


def test_fault_5_a_response_is_never_divided_over_micro_batches_or_data_parallel_ranks() -> None:
    """So that its mean log-ratio is one mean, not each part's own: a plan gives a sequence to one micro-batch
    in one piece, and what an objective is given of it is all its tokens."""
    draws = random.Random(0)
    sequences = [
        TrainSequence(id=f"s{i}", token_ids=(1,) * draws.randint(2, 30), prompt_length=1) for i in range(40)
    ]
    plan = plan_microbatches(sequences, Packing(data_parallel=4, token_budget=40))
    pieces = [members for share in plan for members in share]
    assert sorted(i for members in pieces for i in members) == list(range(40))
    values = [torch.arange(s.loss_tokens) + 100.0 * i for i, s in enumerate(sequences)]
    whole = MiniBatch(sequences=sequences, token_weights=[1.0] * 40, advantages=values, old_logprobs=values)
    for members in pieces:
        count = sum(sequences[i].loss_tokens for i in members)
        part = token_batch(whole, members, torch.zeros(count), torch.zeros(count))
        means = part.segments.mean(part.old_logprobs).tolist()
        assert means == pytest.approx([values[i].mean().item() for i in members], rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_fault_5_a_response_whose_tokens_two_hold_has_one_mean(name: AlgorithmName) -> None:
    """Context parallelism in one process: each of two holders has every other token, and their partial sums
    are added. Loss and gradient are those of the undivided batch: no holder takes a mean of its own, and
    nothing is counted twice."""
    train, old = random_rows(off(name))
    config = settings(name, off_policy_mask={"threshold": 0.0})
    whole = make_batch(train, old, ADVANTAGES, dtype=torch.float64, rollout_logprobs=old)
    expected, gradient, _ = loss_and_gradient(whole, config)
    logprobs = whole.train_logprobs
    lengths = [int(length) for length in whole.segments.lengths]
    weights = token_weights(lengths, config.aggregation, length_constant=config.length_constant)
    spread = whole.segments.spread(torch.tensor(weights, dtype=torch.float64))

    def held(holder: int, total: Any) -> torch.Tensor:
        tokens = torch.arange(holder, len(logprobs), 2)
        part = TokenBatch(
            train_logprobs=logprobs[tokens],
            old_logprobs=whole.old_logprobs[tokens],
            advantages=whole.advantages[tokens],
            rollout_logprobs=whole.old_logprobs[tokens],
            segments=whole.segments.part(tokens, total),
        )
        return (spread[tokens] * objective_of(config)(part).loss).sum()

    partial: list[list[torch.Tensor]] = [[], []]
    for holder in (0, 1):  # what each has to contribute, in the order in which sums are asked for
        held(holder, lambda sums, own=partial[holder]: own.append(sums) or sums)
    losses = []
    for holder in (0, 1):
        others = iter(partial[1 - holder])
        losses.append(held(holder, lambda sums, others=others: sums + next(others)))
    loss = losses[0] + losses[1]
    (slopes,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert slopes.tolist() == pytest.approx(gradient.tolist(), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_fault_6_loss_and_gradient_do_not_depend_on_the_cut(name: AlgorithmName) -> None:
    """Into micro-batches or over ranks: the weights of a mini-batch are made before it is cut, so every
    partition adds up to the same. A11: 2 tokens at loss 1 and 8 at loss 0 give 0.2, not 0.5."""
    train, old = random_rows(off(name))
    config = settings(name)
    whole = make_batch(train, old, ADVANTAGES, dtype=torch.float64)
    expected, gradient, _ = loss_and_gradient(whole, config)
    batch = MiniBatch(
        sequences=[TrainSequence(id="s", token_ids=(1,) * (1 + n), prompt_length=1) for n in LENGTHS],
        token_weights=token_weights(LENGTHS, config.aggregation, length_constant=config.length_constant),
        advantages=[
            torch.full((n,), a, dtype=torch.float64) for n, a in zip(LENGTHS, ADVANTAGES, strict=True)
        ],
        old_logprobs=[row.double() for row in old],
    )
    for cut in ([[0], [1], [2], [3], [4], [5]], [[5, 0], [2, 3, 1, 4]], [[], [4, 3, 2, 1, 0, 5]]):
        total, slopes = 0.0, [torch.empty(0)] * len(LENGTHS)
        for members in cut:
            rows = [train[i].double().requires_grad_() for i in members]
            values = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64)
            part = token_batch(batch, members, values, values)
            weights = torch.tensor([batch.token_weights[i] for i in members], dtype=torch.float64)
            loss = (part.segments.spread(weights) * objective_of(config)(part).loss).sum()
            total += loss.item()
            for i, slope in zip(members, torch.autograd.grad(loss, rows) if rows else (), strict=True):
                slopes[i] = slope
        assert total == pytest.approx(expected, rel=1e-12)
        assert torch.cat(slopes).tolist() == pytest.approx(gradient.tolist(), rel=1e-12, abs=1e-15)
    short, long = token_weights([2, 8], "token_mean")
    assert 2 * 1.0 * short + 8 * 0.0 * long == pytest.approx(0.2)


@pytest.mark.parametrize("name", NAMES)
def test_fault_7_kl_is_neither_ignored_nor_multiplied_by_a_ratio(name: AlgorithmName) -> None:
    """With advantages 0 the loss is coefficient x KL at every ratio; without a reference a coefficient is
    refused."""
    samples = draw(3, 1.0, reference=0.5, rewards=[1.0] * 6)  # constant: advantages exactly 0
    kl = {"coefficient": 0.25, "estimator": "k2"}
    far = outcome(samples, name, kl=kl)
    for sample in samples:
        sample["old_logprobs"] = sample["train_logprobs"]
    near = outcome(samples, name, kl=kl)
    assert far.loss == near.loss > 0
    assert far.gradients == near.gradients
    assert outcome(samples, name, kl=kl | {"coefficient": 0.5}).loss == pytest.approx(2 * near.loss)
    for sample in samples:
        del sample["ref_logprobs"]
    with pytest.raises(ConfigError, match="without a reference"):
        outcome(samples, name, kl=kl)


@pytest.mark.parametrize("name", NAMES)
def test_fault_8_the_form_of_the_correction_does_not_touch_the_ratio(name: AlgorithmName) -> None:
    """A response of 1000 tokens that engine and trainer see 0.01 apart: its correction is exp(0.01), not
    exp(10) or 0, unless a product is asked for; clipping and ratio are the same in every form."""
    samples = draw(4, off(name), lengths=[1000, 3], groups=["a", "a"], rewards=[1.0, 0.0])
    for sample in samples:
        sample["rollout_logprobs"] = [value - 0.01 for value in sample["old_logprobs"]]
    plain = outcome(samples, name)
    how = {"mode": "truncate", "level": "sequence", "high": 1e6}
    mean = outcome(samples, name, correction=how | {"sequence_form": "geometric_mean"})
    product = outcome(samples, name, correction=how | {"sequence_form": "product"})
    assert mean.clipped == product.clipped == plain.clipped
    for corrected, factors in ((mean, (0.01, 0.01)), (product, (10.0, 0.03))):
        for row, wide, x in zip(plain.gradients, corrected.gradients, factors, strict=True):
            assert wide == pytest.approx([math.exp(x) * slope for slope in row], rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_fault_9_off_policy_masking_decides_for_a_whole_response(name: AlgorithmName) -> None:
    """Never for a token: in random batches every response with A < 0 is kept or dropped in one piece."""
    fates = set()
    for seed in range(8):
        samples = draw(seed, 0.0, rollout=0.3)
        found = outcome(samples, name, off_policy_mask={"threshold": 0.05})
        for row, sample in zip(found.gradients, samples, strict=True):
            fate = {slope != 0 for slope, masked in zip(row, sample["mask"], strict=True) if masked}
            assert len(fate) == 1
            fates |= fate
    assert fates == {True, False}


@pytest.mark.parametrize("name", SEQUENCE_RATIOS)
def test_fault_10_the_range_of_token_ratios_is_refused_for_sequence_ratios(name: AlgorithmName) -> None:
    """So are dual clip and an advantage a token for gspo; a range from 0.01 on is warned of."""
    for keys in ({"clip_low": 0.2, "clip_high": 0.27}, {"clip_high": 0.05}, {"clip_low": 0.05}):
        with pytest.raises(ConfigError, match=r"3e-4 and 4e-4 \(arXiv 2507\.18071"):
            guard(settings(name, **keys))
    (warning,) = guard(settings(name, clip_high=0.02))
    assert "3e-4 and 4e-4" in warning
    with pytest.raises(ConfigError, match="dual_clip"):
        guard(settings("gspo", dual_clip=3.0))
    with pytest.raises(ConfigError, match="gspo_token"):
        check_token_advantages(settings("gspo"))
    check_token_advantages(settings("gspo_token"))


def test_fault_11_every_side_is_asked_with_the_temperature_of_the_rollout() -> None:
    """The trainer before the updates, the reference, and the policy in the updates. That log-probabilities
    are those of softmax(logits / temperature) is held by tests/dist/test_token_logprobs.py (A15) and, for
    engines, by tests/contract."""
    asked: dict[str, float] = {}
    values = LogProbs(logprobs=[torch.tensor([-1.0])], entropies=[torch.tensor([0.5])])

    class Recorder:
        updates = 0

        def logprobs(self, _: Any, *, temperature: float) -> LogProbs:
            asked["trainer"] = temperature
            return values

        def ref_logprobs(self, _: Any, *, temperature: float) -> list[torch.Tensor]:
            asked["reference"] = temperature
            return values.logprobs

        def forward_backward(self, _batch: Any, _objective: Any, *, temperature: float) -> Any:
            asked["policy"] = temperature
            return SimpleNamespace(loss=0.0, logprobs=values, fill={})

        def optimizer_step(self) -> tuple[float, float]:
            return 0.0, 0.0

    completion = Completion(
        request_id="r", token_ids=(5,), logprobs=(-1.0,), finish_reason="stop", version_min=0, version_max=0
    )
    prompt = Prompt(id="p", source="p", text="", token_ids=(1,))
    sample = Sample(id="r", group="g", prompt=prompt, completion=completion, text="", reward=0.0, rewards={})
    policy: Any = Recorder()
    config = settings("gspo", kl={"coefficient": 0.1})
    data = score_before_updates(policy, experience([sample]), config, temperature=0.5)
    assert data.trainer_logprobs == data.ref_logprobs == values.logprobs
    batch = MiniBatch(
        sequences=data.sequences,
        token_weights=[1.0],
        advantages=[torch.zeros(1)],
        old_logprobs=values.logprobs,
    )
    update(policy, batch, objective_of(config), temperature=0.5)
    assert asked == {"trainer": 0.5, "reference": 0.5, "policy": 0.5}


@pytest.mark.parametrize("name", NAMES)
def test_fault_12_groups_are_found_by_id_and_masked_samples_are_in_none(name: AlgorithmName) -> None:
    """In any order, of any size: results travel with their samples. A constant group gives exactly 0 (but
    for a baseline over the batch), and a sample whose mask is all 0 changes nothing."""
    samples = draw(
        5, off(name), lengths=[2, 3, 1, 4, 2, 3], groups=list("aabacc"), rewards=[1, 0, 1, 1, 1, 1]
    )
    plain = outcome(samples, name)
    for order in itertools.islice(itertools.permutations(range(6)), 1, 720, 97):
        moved = outcome([samples[i] for i in order], name)
        assert moved.loss == pytest.approx(plain.loss, rel=1e-13)
        assert moved.advantages == pytest.approx([plain.advantages[i] for i in order], rel=1e-13)
        assert moved.clipped == [plain.clipped[i] for i in order]
    if name != "reinforce_pp":
        assert plain.advantages[2] == plain.advantages[4] == plain.advantages[5] == 0
    stranger = copy.deepcopy(samples[1]) | {"reward": 100.0, "mask": [0, 0, 0]}
    with_stranger = outcome([*samples, stranger], name)
    assert replace(with_stranger, advantages=[], gradients=[], clipped=[]) == replace(
        plain, advantages=[], gradients=[], clipped=[]
    )
    assert with_stranger.advantages == [*plain.advantages, 0.0]
    assert with_stranger.gradients == [*plain.gradients, [0.0] * 3]
