"""An update that cannot be made names the sample, and moves no weight."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megagspo.errors import NumericsError
from megagspo.stages import update
from megagspo.types import LogProbs, MiniBatch, TrainSequence

ROWS = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])]
BATCH = MiniBatch(
    sequences=[
        TrainSequence(id=f"r{i}", token_ids=(1,) * (1 + len(row)), prompt_length=1)
        for i, row in enumerate(ROWS)
    ],
    token_weights=[0.25, 0.5],
    advantages=ROWS,
    old_logprobs=ROWS,
    rollout_logprobs=ROWS,
    ref_logprobs=ROWS,
    corrections=ROWS,
)


class Policy:
    """Reports a loss and a gradient norm; counts optimizer steps."""

    def __init__(self, loss: float, norm: float = 1.0, logprobs: list[torch.Tensor] = ROWS) -> None:
        self.updates = 4
        self._loss, self._norm, self._logprobs = loss, norm, logprobs

    def forward_backward(self, batch: MiniBatch, objective: Any, *, temperature: float) -> Any:
        return SimpleNamespace(loss=self._loss, logprobs=LogProbs(logprobs=self._logprobs, entropies=ROWS))

    def optimizer_step(self) -> tuple[float, float]:
        self.updates += 1
        return self._norm, 1e-3


def made(policy: Any, batch: MiniBatch = BATCH) -> Any:
    objective: Any = None
    return update(policy, batch, objective, temperature=1.0)


def test_an_update_keeps_what_it_learned_from() -> None:
    policy = Policy(0.5, norm=2.0)
    found = made(policy)
    assert (found.grad_norm, found.learning_rate, policy.updates) == (2.0, 1e-3, 5)
    assert found.batch is BATCH


@pytest.mark.parametrize(
    "field", ["advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "corrections"]
)
def test_what_is_no_number_is_named_before_any_weight_moves(field: str) -> None:
    policy = Policy(math.nan)
    rows: Any = {field: [ROWS[0], torch.tensor([math.inf])]}
    bad = replace(BATCH, **rows)
    with pytest.raises(NumericsError, match=f"sample r1: {field} are not finite: update 5 was not made"):
        made(policy, bad)
    assert policy.updates == 4


def test_the_policys_own_log_probabilities_are_named_first() -> None:
    policy = Policy(math.inf, logprobs=[torch.tensor([math.nan, -1.0]), ROWS[1]])
    with pytest.raises(NumericsError, match="sample r0: the policy's log-probabilities are not finite"):
        made(policy)


def test_a_loss_without_a_culprit_is_reported_as_it_is() -> None:
    with pytest.raises(NumericsError, match="the loss of update 5 is inf"):
        made(Policy(math.inf))


def test_a_gradient_that_is_no_number_says_what_is_spoiled() -> None:
    with pytest.raises(NumericsError, match="the gradient norm of update 5 is nan: the weights in memory"):
        made(Policy(0.5, norm=math.nan))
