"""Log-ratios without bound: every objective with every option stays finite, and harms no neighbour."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megagspo.algo.corrections import correction_weights
from megagspo.config.algorithm import AlgorithmName
from tests.unit.algo.batches import NAMES, loss_and_gradient, make_batch, settings

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "k1": {"kl": {"coefficient": 0.1, "estimator": "k1"}},
    "k2": {"kl": {"coefficient": 0.1, "estimator": "k2"}},
    "k3": {"kl": {"coefficient": 0.1, "estimator": "k3"}},
    "truncate token": {"correction": {"mode": "truncate"}},
    "mask token": {"correction": {"mode": "mask"}},
    "truncate product": {"correction": {"mode": "truncate", "level": "sequence", "sequence_form": "product"}},
    "mask mean": {"correction": {"mode": "mask", "level": "sequence"}},
    "off-policy mask": {"off_policy_mask": {"threshold": 0.1}},
    "dual clip": {"dual_clip": 3.0},
    "everything": {
        "kl": {"coefficient": 0.1},
        "correction": {"mode": "truncate"},
        "off_policy_mask": {"threshold": 0.1},
    },
}
CASES = [
    (name, option)
    for name in NAMES
    for option in OPTIONS
    if option != "dual clip" or name not in ("gspo", "cispo")  # which the guard refuses
]


def whole_loss(
    name: AlgorithmName, option: str, train: list[Tensor], others: list[Tensor], advantage: float
) -> tuple[float, Tensor]:
    """With `others` as the old policy, the reference and the engine at once."""
    config = settings(name, **OPTIONS[option])
    corrections = None
    if config.correction.mode != "none":
        corrections = [
            correction_weights(new.detach(), other, config.correction, log_ratio_max=config.log_ratio_max)
            for new, other in zip(train, others, strict=True)
        ]
    batch = make_batch(
        train,
        others,
        [advantage] * len(train),
        ref_logprobs=others,
        rollout_logprobs=others,
        corrections=corrections,
    )
    loss, gradient, terms = loss_and_gradient(batch, config)
    assert bool(terms.ratio.isfinite().all())
    return loss, gradient


@pytest.mark.parametrize(("name", "option"), CASES)
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_give_finite_loss_and_gradient(
    name: AlgorithmName, option: str, log_ratio: float, advantage: float
) -> None:
    train = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0])]
    others = [train[0] - log_ratio, train[1]]
    loss, gradient = whole_loss(name, option, train, others, advantage)
    assert math.isfinite(loss)
    assert bool(gradient.isfinite().all())
    # The other response has ratio 1 and is not touched by its neighbour.
    alone = whole_loss(name, option, [train[1]], [others[1]], advantage)[1].item()
    share = {"token_mean": 1 / 3}.get(settings(name).aggregation, 1 / 2)
    assert gradient[2].item() == pytest.approx(alone * share)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("log_ratio", [math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_that_the_old_policy_never_gives_is_no_nan(
    name: AlgorithmName, weight: float, log_ratio: float, advantage: float
) -> None:
    """Its log-ratio is infinite; at the ends of hybrid the part with weight 0 must not turn it into NaN."""
    train = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0])]
    others = [train[0] - log_ratio, train[1]]
    config = settings(name, hybrid_weight=weight)
    loss, gradient, terms = loss_and_gradient(make_batch(train, others, [advantage] * 2), config)
    assert math.isfinite(loss)
    assert bool(gradient.isfinite().all())
    assert bool(terms.ratio.isfinite().all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("most", [1.0, 5.0])
def test_log_ratio_max_is_where_ratios_end(name: AlgorithmName, most: float) -> None:
    train = [torch.tensor([-1.0, -1.0])]
    for sign in (1, -1):
        config = settings(name, log_ratio_max=most)
        _, _, terms = loss_and_gradient(make_batch(train, [train[0] - sign * 100], [1.0]), config)
        assert terms.ratio.tolist() == pytest.approx([math.exp(sign * most)] * 2)
