"""What every rollout engine has to do. The C and D cases are public reports of engines that did not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megagspo.errors import EngineError
from megagspo.platform.checksum import tensors_checksum
from megagspo.types import Completion, Engine, Request, SamplingParams
from tests.contract.engines import ENGINES, checkpoint_tensors, push

PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14), (300, 301, 302, 303, 304)]
LONG = 600  # tokens that take seconds: enough to meet a request while it runs

StartEngine = Callable[..., Engine]


@pytest.fixture(params=list(ENGINES))
def start(request: pytest.FixtureRequest, tiny_moe_dir: Path) -> StartEngine:
    """Starts an engine on the tiny model, without weights."""

    def started(*, one_at_a_time: bool = False) -> Engine:
        return ENGINES[request.param](tiny_moe_dir, one_at_a_time=one_at_a_time)

    return started


@pytest.fixture(scope="module")
def tensors(tiny_moe_dir: Path) -> dict[str, Tensor]:
    return checkpoint_tensors(tiny_moe_dir)


@pytest.fixture
def engine(start: StartEngine, tensors: dict[str, Tensor]) -> Engine:
    """An engine that serves version 3."""
    engine = start()
    push(engine, tensors, version=3)
    return engine


@pytest.fixture(scope="module")
def reference(tiny_moe_dir: Path) -> Any:
    """The same weights in transformers."""
    return AutoModelForCausalLM.from_pretrained(tiny_moe_dir, dtype=torch.float32).eval()


def reference_logprobs(reference: Any, token_ids: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logits = reference(torch.tensor([token_ids])).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids)[1:, None]).squeeze(1).tolist()


def requests(responses: int = 4, **sampling: Any) -> list[Request]:
    """`responses` requests for each of PROMPTS."""
    settings = SamplingParams(**{"max_new_tokens": 8, **sampling})
    return [
        Request(id=f"{p}#{i}", token_ids=prompt, sampling=settings, seed=1000 * p + i)
        for p, prompt in enumerate(PROMPTS)
        for i in range(responses)
    ]


class Running:
    """A call of `generate` on another thread."""

    def __init__(self, engine: Engine, asked: list[Request]) -> None:
        self._result: list[Completion] = []
        self._thread = threading.Thread(target=lambda: self._result.extend(engine.generate(asked)))
        self._thread.start()

    def result(self) -> list[Completion]:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive(), "generate did not return"
        return self._result


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "the condition never came true"
        time.sleep(0.005)


@pytest.fixture
def running(engine: Engine) -> Iterator[Running]:
    """A long call of `generate` on `engine` that has started."""
    call = Running(engine, requests(responses=1, max_new_tokens=LONG))
    wait_until(lambda: engine.health()["running_requests"] == len(PROMPTS))
    time.sleep(0.2)  # so that the first has tokens
    yield call
    engine.resume()
    engine.abort()
    call.result()


# Generation


def test_there_is_one_completion_a_request_in_their_order(engine: Engine) -> None:
    asked = requests()[::-1]
    completions = engine.generate(asked)
    assert [c.request_id for c in completions] == [r.id for r in asked]
    assert {(c.version_min, c.version_max) for c in completions} == {(3, 3)}
    assert all(len(c.token_ids) == len(c.logprobs) == 8 for c in completions)
    assert all(0 <= token < 512 for c in completions for token in c.token_ids)
    assert engine.generate([]) == []


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_reported_logprobs_are_those_of_transformers_forward(
    engine: Engine, reference: Any, temperature: float
) -> None:
    asked = requests(temperature=temperature, top_p=0.9, top_k=50)
    for request, completion in zip(asked, engine.generate(asked), strict=True):
        whole = request.token_ids + completion.token_ids
        expected = reference_logprobs(reference, whole, temperature)[len(request.token_ids) - 1 :]
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def test_top_k_1_is_the_greedy_search_of_transformers(engine: Engine, reference: Any) -> None:
    asked = requests(responses=1, top_k=1, max_new_tokens=12)
    for request, completion in zip(asked, engine.generate(asked), strict=True):
        greedy = reference.generate(
            torch.tensor([request.token_ids]), do_sample=False, max_new_tokens=12, eos_token_id=None
        )
        assert list(completion.token_ids) == greedy[0, len(request.token_ids) :].tolist()


def test_a_stop_token_ends_the_response_and_stays_in_it(engine: Engine) -> None:
    free = engine.generate(requests(max_new_tokens=20))
    stop = free[0].token_ids[4]
    ended = engine.generate(requests(max_new_tokens=20, stop_token_ids=(stop, 511)))
    assert {c.finish_reason for c in free} == {"length"}
    for before, after in zip(free, ended, strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        if after.finish_reason == "stop":
            assert after.token_ids[-1] in (stop, 511)
            assert not {stop, 511} & set(after.token_ids[:-1])
        else:
            assert len(after.token_ids) == 20
            assert not {stop, 511} & set(after.token_ids)
    assert ended[0].finish_reason == "stop"
    assert ended[0].logprobs == pytest.approx(free[0].logprobs[: len(ended[0].token_ids)], abs=1e-5)


def test_equal_requests_give_equal_samples_whatever_the_batch(engine: Engine) -> None:
    asked = requests(responses=6, max_new_tokens=10)
    together = engine.generate(asked)
    mixed = [2, 17, 5, 9, 11, 0, 14]
    assert [c.token_ids for c in engine.generate([asked[i] for i in mixed])] == [
        together[i].token_ids for i in mixed
    ]
    assert [engine.generate([asked[i]])[0].token_ids for i in mixed] == [together[i].token_ids for i in mixed]
    assert len({c.token_ids for c in together}) == len(asked)  # and unequal seeds give unequal ones


def test_every_request_has_its_own_sampling(engine: Engine) -> None:
    settings = [
        SamplingParams(max_new_tokens=3),
        SamplingParams(max_new_tokens=9, temperature=0.5),
        SamplingParams(max_new_tokens=1, top_k=1),
        SamplingParams(max_new_tokens=6, top_p=0.3),
    ]
    asked = [Request(id=str(i), token_ids=PROMPTS[i % 3], sampling=s, seed=i) for i, s in enumerate(settings)]
    together = engine.generate(asked)
    assert [len(c.token_ids) for c in together] == [3, 9, 1, 6]
    for request, completion in zip(asked, together, strict=True):
        assert engine.generate([request])[0].token_ids == completion.token_ids


def test_d16_ids_come_from_the_engine_not_from_a_text(engine: Engine, tiny_tokenizer: Any) -> None:
    """D16: sampled ids that decode to a text which encodes to other ids stay what was sampled."""
    completions = engine.generate(requests(responses=8))
    rewritten = [
        c
        for c in completions
        if tuple(tiny_tokenizer.encode(tiny_tokenizer.decode(c.token_ids))) != c.token_ids
    ]
    assert rewritten, "no sample here would be changed by the round trip: the test shows nothing"
    again = engine.score(
        [r.token_ids + c.token_ids for r, c in zip(requests(responses=8), completions, strict=True)]
    )
    for request, completion, scores in zip(requests(responses=8), completions, again, strict=True):
        assert completion.logprobs == pytest.approx(scores[len(request.token_ids) - 1 :], abs=1e-5)


@pytest.mark.parametrize(
    ("prompt", "sampling", "complaint"),
    [
        ((), {}, "no tokens"),
        ((1, 512), {}, "512 is outside the vocabulary"),
        ((1, -1), {}, "-1 is outside the vocabulary"),
        ((1, 2), {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ((1, 2), {"max_new_tokens": 1023}, "1024"),
        ((1, 2), {"temperature": -1.0}, "temperature"),
        ((1, 2), {"top_p": 0.0}, "top_p"),
        ((1, 2), {"top_k": 0}, "top_k"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(
    engine: Engine, prompt: tuple[int, ...], sampling: dict[str, Any], complaint: str
) -> None:
    settings = SamplingParams(**{"max_new_tokens": 4, **sampling})
    bad = Request(id="the bad one", token_ids=prompt, sampling=settings, seed=0)
    with pytest.raises(EngineError, match=f"the bad one.*{complaint}"):
        engine.generate([*requests(), bad])
    assert len(engine.generate(requests())) == len(requests())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_transformers_forward(engine: Engine, reference: Any, temperature: float) -> None:
    sequences = [(7, 8, 9, 10), (3,), (500, 1, 2), tuple(range(40))]
    for sequence, scores in zip(sequences, engine.score(sequences, temperature), strict=True):
        assert scores == pytest.approx(reference_logprobs(reference, sequence, temperature), abs=1e-5)


# Push


def test_without_a_push_nothing_is_served(start: StartEngine) -> None:
    engine = start()
    assert engine.version is None
    with pytest.raises(EngineError, match="push"):
        engine.generate(requests())
    with pytest.raises(EngineError, match="push"):
        engine.score([(1, 2)])


def test_the_receipt_proves_what_the_engine_holds(start: StartEngine, tensors: dict[str, Tensor]) -> None:
    engine = start()
    receipts = []
    for names in (list(tensors), sorted(tensors, reverse=True)):
        engine.begin_push()
        receipts.append(engine.load_weights((name, tensors[name]) for name in names))
    assert receipts[0] == receipts[1]
    assert receipts[0].tensors == len(tensors)
    assert receipts[0].bytes == sum(t.nbytes for t in tensors.values())
    assert receipts[0].checksum == tensors_checksum(tensors.items())
    changed = {**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}
    engine.begin_push()
    assert engine.load_weights(changed.items()).checksum == tensors_checksum(changed.items())


def test_a_push_can_be_scored_but_not_used_before_its_commit(
    engine: Engine, tensors: dict[str, Tensor], reference: Any
) -> None:
    engine.begin_push()
    assert engine.version is None
    with pytest.raises(EngineError):
        engine.score([(1, 2, 3)])
    with pytest.raises(EngineError):
        engine.commit(4)
    engine.load_weights(tensors.items())
    assert engine.score([(1, 2, 3)])[0] == pytest.approx(reference_logprobs(reference, (1, 2, 3)), abs=1e-5)
    with pytest.raises(EngineError):
        engine.generate(requests())
    engine.commit(4)
    assert engine.version == 4
    assert {c.version_min for c in engine.generate(requests())} == {4}


def test_weights_need_a_push_that_was_begun(engine: Engine, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(EngineError, match="begin_push"):
        engine.load_weights(tensors.items())
    assert engine.version == 3


def test_generation_follows_the_pushed_weights(engine: Engine, tensors: dict[str, Tensor]) -> None:
    before = engine.generate(requests())
    flipped = {**tensors, "lm_head.weight": tensors["lm_head.weight"].flip(0)}
    push(engine, flipped, version=4)
    after = engine.generate(requests())
    assert [c.token_ids for c in before] != [c.token_ids for c in after]
    push(engine, tensors, version=5)
    assert [c.token_ids for c in engine.generate(requests())] == [c.token_ids for c in before]


NAME = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda t: [(n, v) for n, v in t.items() if n != NAME], f"{NAME} missing"),
        (lambda t: [*t.items(), ("model.extra.weight", t[NAME])], "model.extra.weight unknown"),
        (lambda t: [*t.items(), (NAME, t[NAME])], f"{NAME} sent twice"),
        (lambda t: [*list(t.items())[:-1], (NAME, t[NAME])], "missing"),
        (lambda t: list({**t, NAME: t[NAME][:64]}.items()), r"wrong shape"),
    ],
    ids=["missing", "unknown", "twice", "twice and missing", "half a shard"],
)
def test_an_engine_is_unusable_from_a_failed_push_to_the_next_whole_one(
    engine: Engine, tensors: dict[str, Tensor], broken: Callable[[Any], Any], complaint: str
) -> None:
    engine.begin_push()
    with pytest.raises(EngineError, match=complaint):
        engine.load_weights(broken(tensors))
    assert engine.version is None
    with pytest.raises(EngineError):
        engine.commit(4)
    for use in (lambda: engine.generate(requests()), lambda: engine.score([(1, 2)])):
        with pytest.raises(EngineError):
            use()
    push(engine, tensors, version=4)
    assert len(engine.generate(requests())) == len(requests())


def test_a_stream_that_breaks_leaves_the_engine_unusable(engine: Engine, tensors: dict[str, Tensor]) -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from list(tensors.items())[:20]
        raise ConnectionError("the sender died")

    engine.begin_push()
    with pytest.raises(ConnectionError):
        engine.load_weights(stream())
    assert engine.version is None
    with pytest.raises(EngineError):
        engine.generate(requests())


# Control


def test_c1_flush_and_push_are_refused_while_requests_run_and_work_afterwards(
    engine: Engine, running: Running, tensors: dict[str, Tensor]
) -> None:
    """C1: a flush during requests is refused, the engine lives on, and a retry after the abort works."""
    for refused in (engine.flush, engine.begin_push):
        with pytest.raises(EngineError, match="running"):
            refused()
    assert engine.version == 3
    engine.abort()
    assert len(running.result()) == len(PROMPTS)
    engine.flush()
    push(engine, tensors, version=4)
    assert {c.finish_reason for c in engine.generate(requests())} == {"length"}


def test_c4_an_abort_returns_the_tokens_so_far_with_their_logprobs(engine: Engine, running: Running) -> None:
    engine.abort()
    aborted = running.result()
    whole = engine.generate(requests(responses=1, max_new_tokens=60))
    for part, full in zip(aborted, whole, strict=True):
        assert part.finish_reason == "abort"
        assert 0 < len(part.token_ids) < LONG
        assert len(part.logprobs) == len(part.token_ids)
        assert (part.version_min, part.version_max) == (3, 3)
        assert part.token_ids[:60] == full.token_ids[: len(part.token_ids)]


def test_c3_requests_that_never_started_are_aborted_with_a_version_too(
    start: StartEngine, tensors: dict[str, Tensor]
) -> None:
    """C3: one request runs, the others wait for their turn; all come back from an abort alike."""
    engine = start(one_at_a_time=True)
    push(engine, tensors, version=7)
    call = Running(engine, requests(responses=1, max_new_tokens=LONG))
    wait_until(lambda: engine.health()["running_requests"] == len(PROMPTS))
    time.sleep(0.2)  # so that the first has tokens
    engine.abort()
    completions = call.result()
    assert sorted(len(c.token_ids) > 0 for c in completions) == [False, False, True]
    for completion in completions:
        assert completion.finish_reason == "abort"
        assert len(completion.logprobs) == len(completion.token_ids)
        assert (completion.version_min, completion.version_max) == (7, 7)


def test_an_abort_does_not_touch_later_requests(engine: Engine) -> None:
    engine.abort()
    assert {c.finish_reason for c in engine.generate(requests())} == {"length"}


def test_a_pause_halts_and_a_resume_goes_on_with_the_same_samples(engine: Engine) -> None:
    expected = engine.generate(requests(max_new_tokens=100))
    call = Running(engine, requests(max_new_tokens=100))
    wait_until(lambda: engine.health()["running_requests"] > 0)
    engine.pause()
    time.sleep(0.3)
    assert engine.health()["running_requests"] == len(requests())
    assert len(engine.score([(1, 2, 3)])[0]) == 2  # the model is free meanwhile
    engine.resume()
    assert [c.token_ids for c in call.result()] == [c.token_ids for c in expected]


def test_a_paused_engine_can_be_aborted(engine: Engine, running: Running) -> None:
    engine.pause()
    engine.abort()
    assert {c.finish_reason for c in running.result()} == {"abort"}
    engine.resume()


def test_a_call_that_came_during_the_pause_is_served_by_the_weights_pushed_meanwhile(
    engine: Engine, tensors: dict[str, Tensor]
) -> None:
    engine.pause()
    call = Running(engine, requests())
    time.sleep(0.1)
    push(engine, tensors, version=4)
    engine.resume()
    assert {(c.version_min, c.version_max) for c in call.result()} == {(4, 4)}


def test_health_tells_state_and_version(engine: Engine) -> None:
    health = engine.health()
    assert health["version"] == 3
    assert health["running_requests"] == 0
    assert engine.capabilities.name in ENGINES
