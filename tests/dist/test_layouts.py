"""One batch, every way of cutting it: loss, gradient and updates are those of one rank.

References: transformers' own forward and torch's autograd for the gradient on one rank; one rank for
every other layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megagspo.algo.objective import token_batch
from megagspo.types import LogProbs
from tests.dist.harness import RankPool
from tests.dist.learner import gradients_of, make_batch, make_objective, make_policy, weights_of
from tests.dist.models import VOCABULARY, as_on_disk, make_sequences

LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"data": 2},
    "ep2": {"expert": 2},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "tp2_ep2_pp2": {"tensor": 2, "expert": 2, "pipeline": 2},
    "tp2_ep2_dp2": {"tensor": 2, "expert": 2, "data": 2},
    "tp2_ep2_etp2": {"tensor": 2, "expert": 2, "expert_tensor": 2},
    "ep4": {"expert": 4},
    "pp2_vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "pp4": {"pipeline": 4},
    "pp2_vpp2_ep2": {"pipeline": 2, "virtual_pipeline": 2, "expert": 2},
    "pp2_vpp2_tp2": {"pipeline": 2, "virtual_pipeline": 2, "tensor": 2},
    "pp2_vpp2_cp2": {"pipeline": 2, "virtual_pipeline": 2, "context": 2},
    "cp2": {"context": 2},
    "cp4": {"context": 4},
    "cp2_dp2": {"context": 2, "data": 2},
    "cp2_tp2": {"context": 2, "tensor": 2},
    "cp2_pp2": {"context": 2, "pipeline": 2},
    "cp2_ep2": {"context": 2, "expert": 2},
    "cp2_tp2_ep2_etp2": {"context": 2, "tensor": 2, "expert": 2, "expert_tensor": 2},
}
ONE_ROW, SEVERAL_ROWS = 4096, 48  # tokens a micro-batch; the longest sequence has 40

# Learning rate and Adam's epsilon of the two-update comparison; see `test_weights_after_two_updates_...`.
LR, EPS = 1e-2, 1e-2


@dataclass
class Outcome:
    """What one layout made of the batch."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    logprobs: LogProbs


def first_step(
    layout: Any, platform: Any, model: Path, count: int, tokens: int, distributed: bool
) -> Outcome:
    policy = make_policy(
        layout,
        platform,
        model,
        trainer={"tokens_per_microbatch": tokens, "distributed_optimizer": distributed},
    )
    gradient = policy.forward_backward(make_batch(make_sequences(count)), make_objective(), temperature=1.0)
    gradients = gradients_of(policy)
    norm, _ = policy.optimizer_step()
    return Outcome(loss=gradient.loss, norm=norm, gradients=gradients, logprobs=gradient.logprobs)


def two_updates(layout: Any, platform: Any, model: Path, count: int, tokens: int) -> dict[str, Tensor]:
    policy = make_policy(
        layout,
        platform,
        model,
        trainer={"tokens_per_microbatch": tokens},
        optimizer={"lr": LR, "eps": EPS, "clip_grad": 1.0},
    )
    for seed in (0, 1):
        policy.forward_backward(
            make_batch(make_sequences(count, seed=seed), seed), make_objective(), temperature=1.0
        )
        policy.optimizer_step()
    return weights_of(policy)


def assert_same_logprobs(actual: LogProbs, expected: LogProbs) -> None:
    """Log-probabilities and entropies of every loss token, of the order of 10: 1e-5 is ten roundings."""
    for name in ("logprobs", "entropies"):
        for one, other in zip(getattr(actual, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def autograd_gradients(model: Path, count: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient by transformers, one sequence at a time, with the paper's formula written out."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    batch = make_batch(make_sequences(count))
    losses = []
    for sequence, old, advantage in zip(batch.sequences, batch.old_logprobs, batch.advantages, strict=True):
        ids = torch.tensor(sequence.token_ids)
        logits = network(ids[None]).logits[0]
        start = sequence.prompt_length
        logprobs = logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[start:, None])[:, 0]
        ratio = (logprobs - old).mean().exp()
        losses.append(-torch.minimum(ratio * advantage[0], ratio.clamp(0.2, 3.0) * advantage[0]))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), as_on_disk(
        {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    )


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Each tensor's difference is at most 1e-5 of its norm.

    Both sides add the same few hundred products in another order: each sum is wrong by about sqrt(300)
    float32 roundings (6e-8) of its terms, which may be ten times as large as what is left of them, hence
    1e-5. A tensor whose gradient is far smaller than the whole one is the remainder of larger terms: for
    those the scale is 1e-3 of the largest norm."""
    assert set(actual) == set(expected)
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        difference = float((actual[name] - gradient).norm())
        assert difference <= 1e-5 * max(float(gradient.norm()), 1e-3 * largest), name


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, moe_dir: Path) -> Outcome:
    return ranks.run(first_step, moe_dir, 13, ONE_ROW, True)[0]


@pytest.mark.parametrize("model", ["moe_dir", "moe_not_renormalised_dir", "dense_dir", "tied_dir"])
def test_gradient_on_one_rank_is_autograds_of_transformers(
    ranks: RankPool, request: pytest.FixtureRequest, model: str
) -> None:
    directory = request.getfixturevalue(model)
    loss, gradients = autograd_gradients(directory, 13)
    outcome = ranks.run(first_step, directory, 13, ONE_ROW, True)[0]
    assert abs(outcome.loss - loss) < 1e-6
    assert_same_gradients(outcome.gradients, gradients)
    # Both clipped and unclipped responses are there: the gradient of neither branch goes untested.
    batch, logprobs = make_batch(make_sequences(13)), outcome.logprobs
    terms = make_objective()(
        token_batch(batch, range(13), torch.cat(logprobs.logprobs), torch.cat(logprobs.entropies))
    )
    clipped = terms.clipped_low | terms.clipped_high
    assert clipped.any()
    assert not clipped.all()


@pytest.mark.parametrize("tokens", [ONE_ROW, SEVERAL_ROWS], ids=["one_row", "several_rows"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_is_the_same_for_every_layout_and_micro_batch_size(
    ranks: RankPool, moe_dir: Path, one_rank: Outcome, layout: str, tokens: int
) -> None:
    outcomes = ranks.run(first_step, moe_dir, 13, tokens, True, **LAYOUTS[layout])
    for outcome in outcomes:
        assert abs(outcome.loss - one_rank.loss) < 1e-6
        assert outcome.norm == pytest.approx(one_rank.norm, rel=1e-4)
        assert_same_gradients(outcome.gradients, one_rank.gradients)


@pytest.mark.parametrize("layout", ["dp2", "ep2", "tp2_ep2_pp2", "cp2_dp2"])
def test_gradient_is_the_same_without_the_distributed_optimizer(
    ranks: RankPool, moe_dir: Path, one_rank: Outcome, layout: str
) -> None:
    for outcome in ranks.run(first_step, moe_dir, 13, SEVERAL_ROWS, False, **LAYOUTS[layout]):
        assert abs(outcome.loss - one_rank.loss) < 1e-6
        assert outcome.norm == pytest.approx(one_rank.norm, rel=1e-4)
        assert_same_gradients(outcome.gradients, one_rank.gradients)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2},
        {"tensor": 2, "sequence": False},
        {"pipeline": 2},
        {"data": 2},
        {"context": 2},
        {"context": 2, "tensor": 2, "sequence": False},
        {"pipeline": 2, "virtual_pipeline": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["dense_dir", "tied_dir"])
def test_gradient_of_a_dense_model_is_the_same_for_every_layout(
    ranks: RankPool, request: pytest.FixtureRequest, model: str, layout: dict[str, Any]
) -> None:
    directory = request.getfixturevalue(model)
    reference = ranks.run(first_step, directory, 7, ONE_ROW, True)[0]
    for outcome in ranks.run(first_step, directory, 7, SEVERAL_ROWS, True, **layout):
        assert abs(outcome.loss - reference.loss) < 1e-6
        assert outcome.norm == pytest.approx(reference.norm, rel=1e-4)
        assert_same_gradients(outcome.gradients, reference.gradients)


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2},
        {"expert": 2},
        {"expert": 4},
        {"pipeline": 2, "data": 2},
        {"context": 2, "expert": 4},
        {"pipeline": 2, "virtual_pipeline": 2, "data": 2},
    ],
    ids=str,
)
def test_rank_without_samples_adds_nothing(ranks: RankPool, moe_dir: Path, layout: dict[str, int]) -> None:
    """A10: one sequence for several data-parallel ranks: those without one add 0 to every sum and count."""
    reference = ranks.run(first_step, moe_dir, 1, ONE_ROW, True)[0]
    for outcome in ranks.run(first_step, moe_dir, 1, ONE_ROW, True, **layout):
        assert abs(outcome.loss - reference.loss) < 1e-6
        assert_same_gradients(outcome.gradients, reference.gradients)
        assert_same_logprobs(outcome.logprobs, reference.logprobs)


def test_every_rank_is_told_every_loss_tokens_logprob(
    ranks: RankPool, moe_dir: Path, one_rank: Outcome
) -> None:
    assert [len(v) for v in one_rank.logprobs.logprobs] == [s.loss_tokens for s in make_sequences(13)]
    for sizes in (
        LAYOUTS["tp2_ep2_pp2"],
        LAYOUTS["tp2_ep2_etp2"],
        LAYOUTS["cp2_tp2"],
        LAYOUTS["cp4"],
        LAYOUTS["pp2_vpp2_cp2"],
    ):
        for outcome in ranks.run(first_step, moe_dir, 13, SEVERAL_ROWS, True, **sizes):
            assert_same_logprobs(outcome.logprobs, one_rank.logprobs)


def loss_with_nan(layout: Any, platform: Any, model: Path) -> float:
    policy = make_policy(layout, platform, model)
    batch = make_batch(make_sequences(9))
    batch.old_logprobs[3][0] = torch.nan
    return policy.forward_backward(batch, make_objective(), temperature=1.0).loss


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"data": 2},
        {"tensor": 2},
        {"expert": 4},
        {"pipeline": 2},
        {"context": 2},
        {"pipeline": 2, "virtual_pipeline": 2},
    ],
    ids=str,
)
def test_nan_in_one_sequence_is_visible_in_every_layout(
    ranks: RankPool, moe_dir: Path, layout: dict[str, int]
) -> None:
    assert all(math.isnan(loss) for loss in ranks.run(loss_with_nan, moe_dir, **layout))


@pytest.fixture(scope="module")
def two_updates_on_one_rank(ranks: RankPool, moe_dir: Path) -> dict[str, Tensor]:
    return ranks.run(two_updates, moe_dir, 13, ONE_ROW)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_after_two_updates_are_the_same_for_every_layout(
    ranks: RankPool, moe_dir: Path, two_updates_on_one_rank: dict[str, Tensor], layout: str
) -> None:
    """Adam's update lr * m / (sqrt(v) + eps) changes by at most lr / eps for each unit by which a
    gradient changes (the slope is steepest at 0). With lr = eps the weights differ by no more than the
    gradients do, after the first update and about twice that after the second. Gradients are clipped to a
    norm of 1, of which 1e-5 may differ (see `assert_same_gradients`), so 2e-5 at the most; the updates
    themselves are of the order of lr = 1e-2."""
    for weights in ranks.run(two_updates, moe_dir, 13, SEVERAL_ROWS, **LAYOUTS[layout]):
        assert set(weights) == set(two_updates_on_one_rank)
        for name, expected in two_updates_on_one_rank.items():
            assert float((weights[name] - expected).abs().max()) <= 2e-5, name


def test_padded_vocabulary_differs_between_layouts() -> None:
    """What the comparisons above rely on."""
    from megagspo.model.build import padded_vocabulary

    assert len({VOCABULARY, padded_vocabulary(VOCABULARY, 1), padded_vocabulary(VOCABULARY, 2)}) == 3
