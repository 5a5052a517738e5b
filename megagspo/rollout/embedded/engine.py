"""The embedded engine: state, locks and the Engine protocol around the decode loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megagspo.errors import EngineError
from megagspo.rollout.embedded.checks import check_request, check_sequences
from megagspo.rollout.embedded.generation import NEVER_STARTED, Generated, generate_wave, waves
from megagspo.rollout.embedded.model import LanguageModel, empty_model, pretrained_model
from megagspo.rollout.embedded.scoring import experts_hit, score_sequences
from megagspo.rollout.embedded.weights import CheckpointViews
from megagspo.types import Completion, EngineCapabilities, PushReceipt, Request

# empty: no weights yet; pushing: between begin_push and the end of load_weights, also when that failed;
# loaded: whole weights that wait for their proof and `commit`; serving: generates.
State = Literal["empty", "pushing", "loaded", "serving"]


@dataclass(eq=False)
class _Run:
    """One call of `generate`: `abort` sets the flag, the decode loop reads it before each token.

    Not started: it came while the engine was paused, and does not stand in the way of a push.
    """

    requests: int
    started: bool = False
    aborted: bool = False


class EmbeddedEngine:
    """Generates in process with transformers; implements `megagspo.types.Engine`.

    The constructor reads only config.json: the weights come with the first push, until then `version` is
    None. `abort`, `pause`, `resume` and `health` may be called from other threads while `generate` runs;
    calls of `generate` take turns. max_batch_tokens bounds the cached tokens (prompts and responses) of a
    batch, and with them its memory.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_batch_tokens: int = 32768,
    ) -> None:
        self._start(empty_model(model_path, dtype=dtype, device=device), max_batch_tokens)

    @classmethod
    def from_pretrained(
        cls,
        model_path: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_batch_tokens: int = 32768,
    ) -> EmbeddedEngine:
        """An engine that loads the weights of the directory itself and serves them as version 0."""
        engine = cls.__new__(cls)
        engine._start(pretrained_model(model_path, dtype=dtype, device=device), max_batch_tokens)
        engine._state, engine._version = "serving", 0
        return engine

    def _start(self, model: LanguageModel, max_batch_tokens: int) -> None:
        if max_batch_tokens < 1:
            raise EngineError(
                f"max_batch_tokens is {max_batch_tokens}: give the engine room for at least one token"
            )
        self._model = model
        self._weights = CheckpointViews(model.module)
        self._max_batch_tokens = max_batch_tokens
        self._state: State = "empty"
        self._version: int | None = None
        self._runs: list[_Run] = []
        self._paused = False
        self._changed = threading.Condition()  # guards the fields above; held for moments only
        self._compute = (
            threading.Lock()
        )  # held by whoever uses the model; never taken while `_changed` is held

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(name="embedded", routed_experts=False, partial=True)

    @property
    def version(self) -> int | None:
        with self._changed:
            return self._version

    def health(self) -> dict[str, Any]:
        """state, version, paused, and how many requests are running or wait for their turn."""
        with self._changed:
            return {
                "state": self._state,
                "version": self._version,
                "paused": self._paused,
                "running_requests": self._running_requests(),
            }

    # Generation

    def generate(
        self, requests: Sequence[Request], progress: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """One completion a request, in the order of the requests. Waits while the engine is paused.

        progress is called with the number of requests that finished since it was last called. Temperature 0
        is greedy, with log-probabilities at temperature 1. Raises EngineError naming the request that cannot
        be served, before any is started.
        """
        for request in requests:
            check_request(request, vocab_size=self._model.vocab_size, max_length=self._model.max_length)
        with self._running(len(requests)) as (run, version), self._computing():
            generated: list[Generated] = [NEVER_STARTED] * len(requests)
            for wave in waves(requests, self._max_batch_tokens):
                if not self._may_continue(run):
                    break
                results = generate_wave(
                    self._model,
                    [requests[i] for i in wave],
                    may_continue=lambda: self._may_continue(run),
                    progress=progress,
                )
                for i, result in zip(wave, results, strict=True):
                    generated[i] = result
        return [
            Completion(
                request_id=request.id,
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                finish_reason=result.finish_reason,
                version_min=version,
                version_max=version,
            )
            for request, result in zip(requests, generated, strict=True)
        ]

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-probabilities of tokens 1.. of each sequence given those before, [len - 1] each, in nats."""
        if temperature <= 0:
            raise EngineError(f"cannot score at temperature {temperature}: it has to be positive")
        check_sequences(sequences, vocab_size=self._model.vocab_size, max_length=self._model.max_length)
        with self._computing():
            return score_sequences(
                self._model, sequences, temperature, max_batch_tokens=self._max_batch_tokens
            )

    def experts_hit(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Which experts of each MoE layer these tokens reach, [L, E] bool; [0, 0] for a dense model."""
        check_sequences(sequences, vocab_size=self._model.vocab_size, max_length=self._model.max_length)
        with self._computing():
            return experts_hit(self._model, sequences, max_batch_tokens=self._max_batch_tokens)

    # Weights

    def begin_push(self) -> None:
        """From here the engine is unusable until `commit`. After a push that failed, begins anew."""
        with self._changed:
            self._refuse_while_running("begin a push")
            self._state, self._version = "pushing", None

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> PushReceipt:
        """Copies a whole stream of checkpoint tensors; see `CheckpointViews.load` for what it refuses."""
        with self._changed:
            if self._state != "pushing":
                raise EngineError(
                    f"weights were sent to an engine that is {self._state}: call begin_push first"
                )
        with self._compute:
            receipt = self._weights.load(tensors)
        with self._changed:
            self._state = "loaded"
        return receipt

    def commit(self, version: int) -> None:
        """Serves `version` from here on. Refused unless whole weights were loaded since `begin_push`."""
        with self._changed:
            if self._state != "loaded":
                raise EngineError(
                    f"cannot commit version {version}: no whole push waits for it (state {self._state!r})"
                )
            self._state, self._version = "serving", version

    # Control

    def pause(self) -> None:
        """Halts generation before its next token, until `resume` or `abort`. What is halted still runs."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def abort(self) -> None:
        """Ends the calls of `generate` made so far before their next token; does not wait for them."""
        with self._changed:
            for run in self._runs:
                run.aborted = True
            self._changed.notify_all()

    def flush(self) -> None:
        """Nothing to forget, as no prefix outlives its batch; refused like any flush while requests run."""
        with self._changed:
            self._refuse_while_running("flush")

    # Inside

    def _refuse_while_running(self, action: str) -> None:
        """Called with `_changed` held."""
        if running := self._running_requests():
            raise EngineError(
                f"cannot {action} while {running} requests are running: wait for them or call abort first"
            )

    def _unusable(self) -> EngineError:
        return EngineError(
            f"the engine has no usable weights (its state is {self._state!r}): push them first"
        )

    def _running_requests(self) -> int:
        """Called with `_changed` held."""
        return sum(run.requests for run in self._runs if run.started)

    @contextmanager
    def _running(self, requests: int) -> Iterator[tuple[_Run, int]]:
        """Registers a run of `generate` and gives the version that it will be served by."""
        run = _Run(requests)
        with self._changed:
            self._runs.append(run)
        try:
            with self._changed:
                self._changed.wait_for(lambda: run.aborted or not self._paused)
                if self._version is None:
                    raise self._unusable()
                run.started, version = True, self._version
            yield run, version
        finally:
            with self._changed:
                self._runs.remove(run)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Exclusive use of a model that has whole weights."""
        with self._compute:
            with self._changed:
                if self._state not in ("loaded", "serving"):
                    raise self._unusable()
            yield

    def _may_continue(self, run: _Run) -> bool:
        """False when the run was aborted. While paused it waits, and lends the model to `score` meanwhile."""
        if self._paused and not run.aborted:
            self._compute.release()
            try:
                with self._changed:
                    self._changed.wait_for(lambda: run.aborted or not self._paused)
            finally:
                self._compute.acquire()
        return not run.aborted
