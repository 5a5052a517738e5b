"""A transformers model as the engine uses it: hidden states over a growing cache, logits where wanted.

Everything that knows how transformers is built is in this file and in `weights.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicLayer
from transformers.initialization import no_init_weights
from transformers.utils import logging

from megagspo.errors import MissingError, ModelError

# transformers chooses the experts implementation itself: grouped_mm, the fastest (README.md).
_IMPLEMENTATIONS = {"attn_implementation": "sdpa"}


class GrowingLayer(DynamicLayer):
    """One layer's keys and values in buffers with room to spare: [B, H, capacity, head], capacity <= limit.

    transformers' own layer concatenates, which copies the whole cache for every token.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._key_buffer = self._value_buffer = torch.empty(0)
        self._length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._key_buffer, self._value_buffer = self._widened(key_states), self._widened(value_states)
        start, self._length = self._length, self._length + key_states.shape[2]
        if self._length > self._key_buffer.shape[2]:
            self._key_buffer = self._widened(self._key_buffer[:, :, :start])
            self._value_buffer = self._widened(self._value_buffer[:, :, :start])
        self._key_buffer[:, :, start : self._length] = key_states
        self._value_buffer[:, :, start : self._length] = value_states
        self.keys = self._key_buffer[:, :, : self._length]
        self.values = self._value_buffer[:, :, : self._length]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Makes row i a copy of the old row indices[i], with the room that the old rows had."""
        self._key_buffer = self._key_buffer.index_select(0, indices)
        self._value_buffer = self._value_buffer.index_select(0, indices)
        self.keys = self._key_buffer[:, :, : self._length]
        self.values = self._value_buffer[:, :, : self._length]

    def _widened(self, states: Tensor) -> Tensor:
        """A buffer that begins with `states` [B, H, T, head] and has room for half as many tokens more."""
        batch, heads, held, head = states.shape
        buffer = states.new_empty(batch, heads, min(held * 3 // 2 + 16, self._limit), head)
        buffer[:, :, :held] = states
        return buffer


class LanguageModel:
    """Decoder and head. Inputs are padded on the right: causality hides the padding without a mask."""

    def __init__(self, model: nn.Module) -> None:
        model.eval().requires_grad_(False)
        self.module = model
        self.config: Any = model.config
        self._decoder = model.get_decoder()  # type: ignore[operator]
        self._head = model.get_output_embeddings()  # type: ignore[operator]
        self._layers = _full_attention_layers(self.config)
        # transformers renamed the argument within version 5.
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        """How many tokens a prompt and its response may have together."""
        return self.config.max_position_embeddings

    def new_cache(self, limit: int) -> Cache:
        """An empty cache for at most `limit` tokens a row."""
        return Cache(layers=[GrowingLayer(limit) for _ in range(self._layers)])

    def hidden(
        self,
        token_ids: Tensor,
        *,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Last hidden states [B, T, D] of token_ids [B, T], which come after what the cache holds.

        mask: [B, 1, T, cached + T] bool, which tokens each one sees; plain causality where it is None.
        """
        output = self._decoder(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=cache is not None,
            **{self._cache_argument: cache},
        )
        return output.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V], in the dtype of the model."""
        return self._head(hidden)

    @contextmanager
    def recorded_experts(self) -> Iterator[list[Tensor]]:
        """While entered, each MoE layer in turn appends the experts it chose, [B * T, K]."""
        chosen: list[Tensor] = []

        def record(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
            chosen.append(inputs[1])  # hidden states, experts, their weights: so in every family

        hooks = [experts.register_forward_pre_hook(record) for experts in self.experts()]
        try:
            yield chosen
        finally:
            for hook in hooks:
                hook.remove()

    def experts(self) -> list[Any]:
        """The packed experts of each MoE layer in turn; none for a dense model."""
        return [module for name, module in self.module.named_modules() if name.endswith("mlp.experts")]


def _full_attention_layers(config: Any) -> int:
    """The layers of the cache. A sliding window would take the gap after a short prompt for tokens."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        raise ModelError(
            f"the embedded engine runs full attention only; this {config.model_type} has {sorted(kinds)}, "
            f"sliding window {getattr(config, 'sliding_window', None)}, which this engine does not compute"
        )
    return config.num_hidden_layers


def _config_of(model_path: str | Path) -> Any:
    if not (Path(model_path) / "config.json").is_file():
        raise MissingError(f"{model_path} has no config.json: give the directory of a Hugging Face model")
    return AutoConfig.from_pretrained(model_path)


def empty_model(model_path: str | Path, *, dtype: torch.dtype, device: torch.device | str) -> LanguageModel:
    """The model that config.json describes, weights uninitialised; computed buffers (rotary) are right."""
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(_config_of(model_path), dtype=dtype, **_IMPLEMENTATIONS)
    model.tie_weights()  # left out above together with the initialisation
    return LanguageModel(model)


def pretrained_model(
    model_path: str | Path, *, dtype: torch.dtype, device: torch.device | str
) -> LanguageModel:
    """The model with the weights of its directory."""
    config = _config_of(model_path)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_path, config=config, dtype=dtype, output_loading_info=True, **_IMPLEMENTATIONS
        )
    finally:
        if shown:
            logging.enable_progress_bar()
    model, found = loaded
    if missing := sorted(found["missing_keys"]):  # transformers leaves random weights in their place
        raise ModelError(f"{model_path} lacks {len(missing)} of the model's weights, {missing[0]} among them")
    return LanguageModel(model.to(device))
