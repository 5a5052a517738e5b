"""The records that travel between stages, and the protocols by which packages of one tier know each other.

A step reads `Prompt -> Request -> Completion -> Sample -> (advantage, TrainSequence) -> policy`; each arrow
is one stage of `loop.py`. Records are frozen; a stage that adds something makes a new record. This module
imports neither torch nor megatron at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem, as a data source gives it.

    id: stable across runs and layouts (`<source>/<index>`); text: the rendered prompt, for people and for
    rewards; token_ids: what the engine is given, the truth from here on; answer: the reference answer, None
    where the source has none; metadata: JSON-able, whatever the verifier needs beyond the answer.
    """

    id: str
    source: str
    text: str
    token_ids: tuple[int, ...]
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample. top_k = -1 means no limit. Generation ends at any of stop_token_ids (kept in the
    completion)."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to be made. seed decides the sampling alone: equal requests give equal samples, whatever
    the batch."""

    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine made of one request.

    logprobs[t] is the log-probability of token_ids[t] under softmax(logits / temperature), before top-p and
    top-k, in nats. version_min and version_max are the lowest and highest policy version that wrote any of
    its tokens.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version_min: int
    version_max: int

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs), (
            f"completion {self.request_id}: {len(self.token_ids)} tokens "
            f"but {len(self.logprobs)} log-probabilities"
        )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response, scored: what a step learns from.

    group: id shared by the responses to one prompt in one step; text: the decoded response, for people and
    rewards only; reward: the weighted sum of the configured rewards; rewards: each of them by name.
    """

    id: str
    group: str
    prompt: Prompt
    completion: Completion
    text: str
    reward: float
    rewards: Mapping[str, float]

    @property
    def trainable(self) -> bool:
        """Aborted and empty responses count nowhere: not in group statistics, not in the loss, not in
        metrics."""
        return self.completion.finish_reason != "abort" and len(self.completion.token_ids) > 0


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """A row of tokens for the policy: context first, then the response, some or all of whose tokens carry
    loss.

    loss_mask: which tokens of the response the model wrote itself and learns from, None for all (in a
    multi-turn episode the turns between are context). Log-probabilities of a sequence are always those of its
    loss tokens alone, a tensor [loss_tokens].
    """

    id: str
    token_ids: tuple[int, ...]
    prompt_length: int
    loss_mask: tuple[bool, ...] | None = None

    @property
    def loss_positions(self) -> list[int]:
        """Where in token_ids the loss tokens are."""
        positions = range(self.prompt_length, len(self.token_ids))
        if self.loss_mask is None:
            return list(positions)
        return [position for position, kept in zip(positions, self.loss_mask, strict=True) if kept]

    @property
    def loss_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length if self.loss_mask is None else sum(self.loss_mask)

    def __post_init__(self) -> None:
        assert 0 < self.prompt_length < len(self.token_ids), (
            f"sequence {self.id}: {len(self.token_ids)} tokens, prompt of {self.prompt_length}: "
            "no prompt or no response"
        )
        assert self.loss_mask is None or len(self.loss_mask) == len(self.token_ids) - self.prompt_length, (
            f"sequence {self.id}: a mask of {len(self.loss_mask or ())} for "
            f"{len(self.token_ids) - self.prompt_length} response tokens"
        )


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """What one optimizer update learns from. The lists run parallel to sequences; a tensor is [loss_tokens].

    token_weights[i]: the weight of each loss token of sequence i in the loss, every normalisation over the
    whole mini-batch included; advantages: A_it; for the others, None where the objective has no use for
    them, see `algo.objective.TokenBatch`.
    """

    sequences: Sequence[TrainSequence]
    token_weights: Sequence[float]
    advantages: Sequence[Tensor]
    old_logprobs: Sequence[Tensor]
    rollout_logprobs: Sequence[Tensor] | None = None
    ref_logprobs: Sequence[Tensor] | None = None
    corrections: Sequence[Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class LogProbs:
    """For each sequence its loss tokens' log-probabilities and the entropies they were drawn at, float32, on
    the CPU."""

    logprobs: list[Tensor]
    entropies: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class PushReceipt:
    """What an engine holds after a push: how many tensors and bytes arrived, and a checksum over names and
    bytes."""

    tensors: int
    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do. routed_experts: can report the experts it chose; partial: an abort keeps tokens
    made so far."""

    name: str
    routed_experts: bool
    partial: bool


class Engine(Protocol):
    """A rollout engine. Raises EngineError when it is not usable; between `begin_push` and `commit` it never
    generates."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def version(self) -> int | None:
        """The policy version it serves; None before the first push and after one that did not finish."""

    def generate(
        self, requests: Sequence[Request], progress: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """One completion a request, in the order of the requests. progress is told how many finished since it
        was last told."""

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-probabilities of tokens 1.. of each sequence given those before, [len - 1] each, in nats.
        Allowed between load_weights and commit: it is how a push is proven."""

    def experts_hit(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Which experts of each MoE layer these tokens reach, [L, E] bool; [0, 0] for a dense model."""

    def begin_push(self) -> None:
        """From here the engine is unusable until `commit`. Refused while requests are running."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> PushReceipt:
        """Takes a stream of named tensors in Hugging Face layout; every weight exactly once, or
        EngineError."""

    def commit(self, version: int) -> None:
        """Ends a push whose receipt and probe were found right; the engine now serves `version`."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None:
        """Ends running requests; each returns its tokens so far with finish reason `abort`."""

    def flush(self) -> None:
        """Forgets cached prefixes. Refused, with the engine left alive, while requests are running."""

    def health(self) -> dict[str, Any]:
        """What an operator wants to know: state, version, running requests."""


HfTensors = Iterator[tuple[str, "Tensor"]]
"""A stream of named tensors in the layout of a Hugging Face checkpoint: what export writes and a push
sends."""
