"""One fixed batch, nine objectives on it, and what transformers and torch's autograd make of them in float64:
the formulas are written out here and share no code with the package.

Shapes: per response [n], n its loss tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagspo.algo.aggregation import token_weights
from megagspo.config.algorithm import AlgorithmConfig
from megagspo.types import MiniBatch, TrainSequence
from tests.dist.learner import gradients_of, make_policy
from tests.dist.models import VOCABULARY, as_on_disk

SEED = 11
"""Chosen so that no routing and no clipping is decided by rounding; test_invariance.py asserts it."""
RESPONSES = [300, 1, 2, 5, 9, 17, 30, 45, 60, 80, 110, 150, 200, 260]
GROUPS = [2, 3, 4, 5]
ROWS = {1: 4096, 2: 800, 4: 400, 5: 312}
"""Micro-batches on one rank -> token budget. The longest sequence has 312 tokens."""

OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo": {},
    "dapo": {
        "kl": {"coefficient": 0.05, "estimator": "k3"},
        "entropy_coefficient": 0.02,
        "correction": {"mode": "truncate"},
    },
    "gspo_token": {"kl": {"coefficient": 0.01, "estimator": "k2"}},
    "grpo": {"dual_clip": 1.3},
    "dr_grpo": {"length_constant": 300},
    "cispo": {"clip_high": 0.25},
    "rloo": {"kl": {"coefficient": 0.05, "estimator": "k2"}},
    "reinforce_pp": {"entropy_coefficient": 0.05},
    "hybrid": {"hybrid_weight": 0.5, "off_policy_mask": {"threshold": 2e-4}},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """An objective on its batch, and what float64 says: loss, and gradients by Hugging Face name.

    closest: how near a ratio comes to an edge of its range, or a response to the masking threshold; clipped:
    share of tokens without a gradient through the ratio.
    """

    settings: dict[str, Any]
    batch: MiniBatch
    loss: float
    gradients: dict[str, Tensor]
    closest: float
    clipped: float


def make_samples() -> list[TrainSequence]:
    """Responses of 1 to 300 tokens, every third of several turns: runs of its tokens are context; and one
    whose tokens all are."""
    generator = torch.Generator().manual_seed(SEED)
    samples = []
    for number, length in enumerate([*RESPONSES, 20]):
        prompt = 12 if length == 300 else int(torch.randint(1, 15, (1,), generator=generator))
        tokens = torch.randint(0, VOCABULARY, (prompt + length,), generator=generator).tolist()
        mask = None
        if number == len(RESPONSES):
            mask = (False,) * length
        elif number % 3 == 0 and length > 1:
            mask = tuple(position % 17 < 11 for position in range(length))
        samples.append(
            TrainSequence(id=f"s{number}", token_ids=tuple(tokens), prompt_length=prompt, loss_mask=mask)
        )
    return samples


def trainable(samples: Sequence[TrainSequence]) -> list[TrainSequence]:
    """A fully masked sample counts nowhere: it is left out before the learner is asked."""
    return [sample for sample in samples if sample.loss_tokens]


# --- transformers in float64 -------------------------------------------------------------------------------


class ExactModel:
    """transformers' model with what it computes in float32 on purpose, norms and the router's softmax,
    computed in float64. `margin`: the smallest difference between the logits of the last expert chosen and
    the first not chosen, over all tokens and layers so far."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.network = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, experts_implementation="eager"
        ).double()
        self.margin = float("inf")
        for module in self.network.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_norm, module)
            elif type(module).__name__.endswith("TopKRouter"):
                module.forward = partial(self._route, module)

    def _route(self, router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        ordered = logits.detach().sort(dim=-1, descending=True).values
        gaps = ordered[:, router.top_k - 1] - ordered[:, router.top_k]
        self.margin = min(self.margin, float(gaps.min()))
        chosen, experts = logits.softmax(-1).topk(router.top_k, dim=-1)
        return logits, chosen / chosen.sum(-1, keepdim=True), experts

    def score(self, sequence: TrainSequence) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies at the loss tokens."""
        ids = torch.tensor(sequence.token_ids)
        log_softmax = self.network(ids[None]).logits[0].log_softmax(-1)
        positions = torch.tensor(sequence.loss_positions)
        rows = log_softmax[positions - 1]
        return rows.gather(1, ids[positions, None])[:, 0], -(rows.exp() * rows).sum(-1)


def _norm(norm: Any, x: Tensor) -> Tensor:
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


# --- objectives in float64 ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Response:
    """The policy's values at a response's tokens, float64 with gradient, and data about them, float32 as the
    learner gets it."""

    new: Tensor
    entropy: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor
    advantage: Tensor
    correction: Tensor


def _pessimistic(w: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    """PPO: min(w A, clip(w, 1 - low, 1 + high) A)."""
    return torch.minimum(w * a, torch.clamp(w, 1 - low, 1 + high) * a)


def _weight(name: str, r: Response) -> Tensor:
    """The importance ratio at each token, with the gradient that the paper gives it."""
    d = r.new - r.old
    if name == "gspo":
        return d.mean().exp().expand(len(d))
    if name == "gspo_token":
        return d.mean().exp().detach() * (r.new - r.new.detach()).exp()
    if name == "hybrid":  # half of each; the sequence's half lets a token's own gradient through alone
        return (0.5 * (d.mean().detach() + r.new - r.new.detach()) + 0.5 * d).exp()
    return d.exp()


RANGES = {
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "dapo": (0.2, 0.28),
    # Half way in the logarithm: sqrt((1 - 3e-4)(1 - 0.2)) and sqrt((1 + 4e-4)(1 + 0.2)).
    "hybrid": (1 - (0.9997 * 0.8) ** 0.5, (1.0004 * 1.2) ** 0.5 - 1),
    "cispo": (1.0, 0.25),
}


def loss_of(name: str, r: Response) -> tuple[Tensor, float, Tensor]:
    """The term at each token of a response; the distance of its ratios from edges; tokens clipped [n]."""
    a, w, (low, high) = r.advantage.double(), _weight(name, r), RANGES.get(name, (0.2, 0.2))
    value = w.detach()
    edges = [(value - (1 - low)).abs().min(), (value - (1 + high)).abs().min()]
    clipped = ((value > 1 + high) & (a > 0)) | ((value < 1 - low) & (a < 0))
    if name == "cispo":
        term = -value.clamp(max=1 + high) * a * r.new
        clipped = value > 1 + high
    else:
        term = -_pessimistic(w, a, low, high)
    if name == "grpo":  # dual clip
        term = torch.where(a < 0, torch.minimum(term, -1.3 * a), term)
        edges.append((value - 1.3).abs().min())
    if name == "dapo":
        x = r.reference.double() - r.new
        term = term * r.correction.double() + 0.05 * (x.exp() - 1 - x) - 0.02 * r.entropy
    if name == "gspo_token":
        term = term + 0.01 * (r.reference.double() - r.new).square() / 2
    if name == "rloo":
        term = term + 0.05 * (r.reference.double() - r.new).square() / 2
    if name == "reinforce_pp":
        term = term - 0.05 * r.entropy
    if name == "hybrid":
        gap = (r.rollout.double() - r.new.detach()).mean()
        edges.append((gap - 2e-4).abs())
        term = term * float(not (gap > 2e-4 and a.mean() < 0))
    return term, float(torch.stack(edges).min()), clipped


def aggregated(name: str, terms: list[Tensor]) -> Tensor:
    """Mean over each response and then over responses; over all tokens; or over responses of sums / 300."""
    if name in ("gspo", "gspo_token", "grpo", "hybrid"):
        return torch.stack([term.mean() for term in terms]).mean()
    if name == "dr_grpo":
        return torch.stack([term.sum() / 300 for term in terms]).mean()
    return torch.cat(terms).mean()


def make_responses(scored: list[tuple[Tensor, Tensor]]) -> list[Response]:
    """Data about the policy's own log-probabilities: mean log-ratios inside and outside of sequence ranges,
    each token's inside and outside of token ranges; advantages by group."""
    generator = torch.Generator().manual_seed(SEED)

    def noise(like: Tensor, scale: float) -> Tensor:
        drawn = scale * torch.randn(len(like), generator=generator, dtype=torch.float64)
        return drawn - drawn.mean()

    rewards = torch.rand(len(scored), generator=generator, dtype=torch.float64)
    advantages = torch.cat([(group - group.mean()) / (group.std() + 1e-6) for group in rewards.split(GROUPS)])
    responses = []
    for number, ((new, entropy), advantage) in enumerate(zip(scored, advantages, strict=True)):
        now = new.detach()
        shift = (0.0, 1.5e-4, -1e-3, -2e-4, 2e-3, -0.3, 0.3)[number % 7]
        rollout_shift = (1e-4, 1e-3, -1e-3)[number % 3]
        old = now - shift - noise(now, 0.25)
        rollout = now + rollout_shift + noise(now, 0.3)
        responses.append(
            Response(
                new=new,
                entropy=entropy,
                old=old.float(),
                rollout=rollout.float(),
                reference=(now + noise(now, 0.5)).float(),
                advantage=advantage.expand(len(now)).float(),
                correction=(old - rollout).exp().clamp(max=2.0).float(),
            )
        )
    return responses


def per_token(name: str, responses: list[Response]) -> list[Response]:
    """Objectives that take them get advantages that differ over a response."""
    if name not in ("gspo_token", "reinforce_pp"):
        return responses
    generator = torch.Generator().manual_seed(SEED + 1)
    return [
        replace(r, advantage=r.advantage + 0.5 * torch.randn(len(r.advantage), generator=generator))
        for r in responses
    ]


def make_cases(model: Path) -> tuple[dict[str, Case], float]:
    """Every objective's case, and the smallest routing margin."""
    exact = ExactModel(model)
    sequences = trainable(make_samples())
    drawn = make_responses([exact.score(sequence) for sequence in sequences])
    parameters = dict(exact.network.named_parameters())
    cases = {}
    for name, options in OBJECTIVES.items():
        responses = per_token(name, drawn)
        terms, closest, clipped = zip(*(loss_of(name, response) for response in responses), strict=True)
        loss = aggregated(name, list(terms))
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
        settings = {"name": name, **options}
        cases[name] = Case(
            settings=settings,
            batch=_batch(AlgorithmConfig(**settings), sequences, responses),
            loss=loss.item(),
            gradients=as_on_disk(dict(zip(parameters, gradients, strict=True))),
            closest=min(closest),
            clipped=float(torch.cat(clipped).double().mean()),
        )
    return cases, exact.margin


def _batch(config: AlgorithmConfig, sequences: list[TrainSequence], responses: list[Response]) -> MiniBatch:
    return MiniBatch(
        sequences=sequences,
        token_weights=token_weights(
            [sequence.loss_tokens for sequence in sequences],
            config.aggregation,
            length_constant=config.length_constant,
        ),
        advantages=[r.advantage for r in responses],
        old_logprobs=[r.old for r in responses],
        rollout_logprobs=[r.rollout for r in responses],
        ref_logprobs=[r.reference for r in responses],
        corrections=None if config.correction.mode == "none" else [r.correction for r in responses],
    )


# --- on the ranks ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """What a layout's loss and gradient are away from float64: the loss absolutely; the worst tensor's
    gradient in units of its norm, or of a thousandth of the whole gradient's where that is larger; rows: the
    micro-batches that each data-parallel rank ran."""

    loss: float
    gradient: float
    worst: str
    rows: int


def deviations(
    layout: Any, platform: Any, model: Path, cases_file: Path, runs: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], Deviation]:
    """For each (objective, key of ROWS); one policy serves all of them."""
    from megagspo.algo.losses import objective_of
    from megagspo.policy.packing import plan_microbatches

    cases: dict[str, Case] = torch.load(cases_file, weights_only=False)
    policy = make_policy(layout, platform, model)
    found = {}
    for name, rows in runs:
        case = cases[name]
        policy._packing = replace(policy._packing, token_budget=ROWS[rows])
        objective = objective_of(AlgorithmConfig(**case.settings))
        gradient = policy.forward_backward(case.batch, objective, temperature=1.0)
        error, worst = _worst(gradients_of(policy), case.gradients)
        found[name, rows] = Deviation(
            loss=abs(gradient.loss - case.loss),
            gradient=error,
            worst=worst,
            rows=len(plan_microbatches(case.batch.sequences, policy._packing)[0]),
        )
    return found


def _worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    assert set(actual) == set(expected)
    whole = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    return max(
        (float((actual[name].double() - g).norm()) / max(float(g.norm()), 1e-3 * whole), name)
        for name, g in expected.items()
    )
