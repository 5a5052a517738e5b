"""Megatron's log-probabilities are transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.harness import RankPool
from tests.dist.learner import make_policy
from tests.dist.models import make_sequences

LAYOUTS: list[dict[str, Any]] = [{}, {"tensor": 2}, {"pipeline": 2}]
MOE_LAYOUTS = [
    *LAYOUTS,
    {"expert": 2},
    {"tensor": 2, "expert": 2, "pipeline": 2},
    {"tensor": 2, "expert": 2, "expert_tensor": 2},
    {"context": 2, "tensor": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
]
# Logits are sums of 32 products behind 4 layers of like sums: a hundred or so float32 roundings of
# numbers of the order of 10, each 5e-7 and of random sign, hence about 5e-6. A norm, head or expert in
# the wrong place costs 1e-2 and more.
TOLERANCE = 1e-5


def policy_logprobs(
    layout: Any, platform: Any, model: Path, temperature: float, tokens: int
) -> tuple[list[Tensor], list[Tensor]]:
    policy = make_policy(layout, platform, model, trainer={"tokens_per_microbatch": tokens})
    result = policy.logprobs(make_sequences(9), temperature=temperature)
    return result.logprobs, result.entropies


def reference(model: Path, temperature: float) -> tuple[list[Tensor], list[Tensor]]:
    """transformers' forward, one sequence at a time; the log-softmax in float64."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logprobs, entropies = [], []
    for sequence in make_sequences(9):
        ids = torch.tensor(sequence.token_ids)
        with torch.no_grad():
            logits = network(ids[None]).logits[0].double() / temperature
        log_softmax = logits.log_softmax(-1)[sequence.prompt_length - 1 : -1]
        logprobs.append(log_softmax.gather(1, ids[sequence.prompt_length :, None])[:, 0])
        entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
    return logprobs, entropies


def check(
    ranks: RankPool, model: Path, layout: dict[str, Any], *, temperature: float = 1.0, tokens: int = 4096
) -> None:
    expected = reference(model, temperature)
    for result in ranks.run(policy_logprobs, model, temperature, tokens, **layout):
        for actual_list, expected_list in zip(result, expected, strict=True):
            for actual, right in zip(actual_list, expected_list, strict=True):
                assert actual.shape == right.shape
                assert float((actual.double() - right).abs().max()) < TOLERANCE / temperature


@pytest.mark.parametrize("layout", MOE_LAYOUTS, ids=str)
def test_moe_logprobs_and_entropies_are_those_of_transformers(
    ranks: RankPool, moe_dir: Path, layout: dict[str, Any]
) -> None:
    check(ranks, moe_dir, layout, tokens=48)


@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "expert": 2}], ids=str)
def test_weights_of_chosen_experts_are_not_renormalised_when_the_model_says_so(
    ranks: RankPool, moe_not_renormalised_dir: Path, layout: dict[str, Any]
) -> None:
    check(ranks, moe_not_renormalised_dir, layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", ["dense_dir", "tied_dir"])
def test_dense_logprobs_are_those_of_transformers(
    ranks: RankPool, request: pytest.FixtureRequest, model: str, layout: dict[str, Any]
) -> None:
    check(ranks, request.getfixturevalue(model), layout)


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}], ids=str)
def test_temperature_divides_the_logits(ranks: RankPool, moe_dir: Path, layout: dict[str, Any]) -> None:
    check(ranks, moe_dir, layout, temperature=0.5)
