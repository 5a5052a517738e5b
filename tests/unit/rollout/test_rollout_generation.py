"""The embedded engine's own parts: batches, dropped rows, progress, experts, weights it loads itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megagspo.errors import EngineError, NumericsError
from megagspo.rollout.embedded import generation
from megagspo.rollout.embedded.engine import EmbeddedEngine
from megagspo.rollout.embedded.generation import waves
from megagspo.types import Completion, Request, SamplingParams

PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14), (300, 301, 302, 303, 304), (5, 6, 8)]


@pytest.fixture(scope="module")
def engine(tiny_moe_dir: Path) -> EmbeddedEngine:
    return EmbeddedEngine.from_pretrained(tiny_moe_dir, dtype=torch.float32)


def requests(responses: int = 5, **sampling: Any) -> list[Request]:
    return [
        Request(
            id=f"{p}#{i}",
            token_ids=prompt,
            sampling=SamplingParams(**{"max_new_tokens": 4 + 7 * i, **sampling}),
            seed=1000 * p + i,
        )
        for p, prompt in enumerate(PROMPTS)
        for i in range(responses)
    ]


def assert_alike(ours: list[Completion], theirs: list[Completion]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.request_id, a.token_ids, a.finish_reason) == (b.request_id, b.token_ids, b.finish_reason)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_pretrained_weights_are_served_as_version_0(engine: EmbeddedEngine) -> None:
    assert engine.version == 0
    assert engine.generate(requests())[0].version_max == 0


@pytest.mark.parametrize("share", [0.01, 2.0])
def test_dropping_finished_rows_changes_nothing(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    asked = requests(stop_token_ids=tuple(range(0, 512, 25)))
    expected = engine.generate(asked)
    assert {c.finish_reason for c in expected} == {"stop", "length"}
    monkeypatch.setattr(generation, "_DROP_FROM", share)
    assert_alike(engine.generate(asked), expected)


@pytest.mark.parametrize("bound", [1, 60, 150])
def test_the_bound_on_the_batch_changes_nothing(
    engine: EmbeddedEngine, tiny_moe_dir: Path, bound: int
) -> None:
    bounded = EmbeddedEngine.from_pretrained(tiny_moe_dir, dtype=torch.float32, max_batch_tokens=bound)
    assert_alike(bounded.generate(requests()), engine.generate(requests()))
    sequences = [r.token_ids for r in requests()]
    for ours, theirs in zip(bounded.score(sequences), engine.score(sequences), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_batches_keep_to_the_bound_and_take_every_request_once(tiny_moe_dir: Path) -> None:
    asked = requests()
    batches = list(waves(asked, 100))
    assert sorted(i for batch in batches for i in batch) == list(range(len(asked)))
    for batch in batches:
        width = max(len(asked[i].token_ids) for i in batch) + max(
            asked[i].sampling.max_new_tokens for i in batch
        )
        assert len(batch) == 1 or len(batch) * width <= 100
    assert [len(batch) for batch in waves(asked, 1)] == [1] * len(asked)
    with pytest.raises(EngineError, match="max_batch_tokens"):
        EmbeddedEngine(tiny_moe_dir, dtype=torch.float32, max_batch_tokens=0)


def test_a_prompt_is_computed_once_for_all_its_responses(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []
    hidden = engine._model.hidden

    def watched(token_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(token_ids.shape))
        return hidden(token_ids, **kwargs)

    monkeypatch.setattr(engine._model, "hidden", watched)
    engine.generate(requests(max_new_tokens=3))
    assert shapes == [(4, 7), (20, 1), (20, 1)]


def test_progress_counts_every_request_once(engine: EmbeddedEngine) -> None:
    told: list[int] = []
    engine.generate(requests(), progress=told.append)
    assert sum(told) == len(requests())
    assert len(told) == 5  # five lengths
    assert min(told) > 0


def test_a_model_that_gives_nan_is_reported_by_request(tiny_moe_dir: Path) -> None:
    engine = EmbeddedEngine.from_pretrained(tiny_moe_dir, dtype=torch.float32)
    engine._model.module.get_output_embeddings().weight[3] = float("nan")  # type: ignore[operator]
    with pytest.raises(NumericsError, match=r"request 0#0.*NaN"):
        engine.generate(requests())
    assert engine.health()["running_requests"] == 0


def test_bfloat16_logprobs_are_computed_in_float32(tiny_moe_dir: Path) -> None:
    engine = EmbeddedEngine.from_pretrained(tiny_moe_dir, dtype=torch.bfloat16)
    asked = requests(max_new_tokens=6)
    for request, completion in zip(asked, engine.generate(asked), strict=True):
        scores = engine.score([request.token_ids + completion.token_ids])[0][len(request.token_ids) - 1 :]
        assert completion.logprobs == pytest.approx(scores, abs=0.03)
        assert any(torch.tensor(x).bfloat16().item() != x for x in completion.logprobs)


def test_experts_hit_are_those_with_the_largest_router_logits(engine: EmbeddedEngine) -> None:
    sequences = [(5, 6, 7, 8), (400,), (9, 10)]
    expected = torch.zeros(4, 8, dtype=torch.bool)
    with torch.inference_mode():
        for sequence in sequences:
            outputs = engine._model.module(torch.tensor([sequence]), output_router_logits=True)
            for layer, logits in enumerate(outputs.router_logits):
                expected[layer, logits.topk(2).indices.flatten()] = True
    hit = engine.experts_hit(sequences)
    assert torch.equal(hit, expected)
    assert not hit.all()  # padding does not count, or all would be hit
    assert engine.experts_hit([tuple(range(512))]).all()


def test_a_dense_model_generates_and_has_no_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    engine = EmbeddedEngine.from_pretrained(tmp_path, dtype=torch.float32)
    asked = [Request(id="a", token_ids=(1, 2, 3), sampling=SamplingParams(max_new_tokens=50), seed=1)]
    completion = engine.generate(asked)[0]
    assert completion.logprobs == pytest.approx(
        engine.score([(1, 2, 3, *completion.token_ids)])[0][2:], abs=1e-5
    )
    assert engine.experts_hit([(1, 2, 3)]).numel() == 0
