"""Tokenizer and prompts of a configuration, checked against its model: one function a command.

Every mistake in the data is found here, before a rank joins the others and before a file of the run is
touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagspo.config import Config
from megagspo.data import PromptSet, load_held_out, load_prompts
from megagspo.errors import ConfigError, DataError, ModelError
from megagspo.model.architecture import read_architecture
from megagspo.reward.scoring import check_prompts
from megagspo.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a command reads: stop_token_ids end a response."""

    tokenizer: Any
    prompts: PromptSet
    stop_token_ids: tuple[int, ...]


def inputs_for_training(config: Config) -> Inputs:
    """Of `megagspo train`: every prompt leaves room for its response and can be judged."""
    inputs = _read(config)
    prompts = [*inputs.prompts.train, *(inputs.prompts.held_out if config.eval.every else ())]
    check_prompts(config.reward, prompts)
    _check_room_for_responses(config, prompts, train=True)
    return inputs


def inputs_for_warm_up(config: Config) -> Inputs:
    """Of `megagspo sft`: every training prompt has an answer, and both fit; held-out prompts, where
    `eval.every` asks for them, leave room for a response and can be judged."""
    inputs = _read(config)
    train = inputs.prompts.train
    answers = answer_tokens(train, inputs.tokenizer, inputs.stop_token_ids[0])
    for limit, name in _limits(config, train=True):
        for prompt, answer in zip(train, answers, strict=True):
            if len(prompt.token_ids) + len(answer) > limit:
                raise ConfigError(
                    f"prompt {prompt.id} has {len(prompt.token_ids)} tokens and its answer {len(answer)}, "
                    f"together more than {name} ({limit}): take the problem out of data.train"
                    f"{_or_raise(name)}"
                )
    if config.eval.every:
        check_prompts(config.reward, inputs.prompts.held_out)
        _check_room_for_responses(config, inputs.prompts.held_out, train=False)
    return inputs


def inputs_for_evaluation(config: Config) -> Inputs:
    """Of `megagspo eval`: the held-out prompts alone, of which there is at least one."""
    inputs = _read(config, train=False)
    held_out = inputs.prompts.held_out
    if not held_out:
        raise ConfigError("data.eval is empty: there is nothing to evaluate on; list a source there")
    check_prompts(config.reward, held_out)
    _check_room_for_responses(config, held_out, train=False)
    return inputs


def answer_tokens(prompts: Sequence[Prompt], tokenizer: Any, stop: int) -> list[tuple[int, ...]]:
    """The reference answers as token ids, each ended by the stop token."""
    unanswered = [prompt for prompt in prompts if prompt.answer is None]
    if unanswered:
        raise DataError(
            f"prompt {unanswered[0].id} has no reference answer to learn from: give source "
            f"{unanswered[0].source!r} an answer field, or leave it out of data.train"
        )
    encoded = tokenizer([prompt.answer for prompt in prompts], add_special_tokens=False)["input_ids"]
    return [(*ids, stop) for ids in encoded]


def _read(config: Config, *, train: bool = True) -> Inputs:
    tokenizer = _load_tokenizer(config.model.path)
    prompts = load_prompts(config.data, tokenizer) if train else load_held_out(config.data, tokenizer)
    stop = config.rollout.stop_ids or _stop_token_ids(config.model.path, tokenizer)
    return Inputs(tokenizer=tokenizer, prompts=prompts, stop_token_ids=stop)


def _load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a Hugging Face directory. Raises ModelError when it does not fit the model's
    vocabulary."""
    from transformers import AutoTokenizer

    remedy = "copy the model's tokenizer files there"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise whatever their readers raise
        reason = [type(error).__name__, *str(error).strip().splitlines()[:1]][-1]
        raise ModelError(
            f"{model_path} holds no tokenizer that transformers can load ({reason}): {remedy}"
        ) from error
    if not tokenizer.encode("a", add_special_tokens=False):  # without files some families get an empty one
        raise ModelError(f"{model_path} holds no tokenizer, or one that knows no text: {remedy}")
    vocab_size = read_architecture(model_path).vocab_size
    if len(tokenizer) > vocab_size:
        raise ModelError(
            f"{model_path}: the tokenizer has {len(tokenizer)} tokens, but config.json says "
            f"vocab_size={vocab_size}: they do not belong together; restore the files as they were published"
        )
    return tokenizer


def _stop_token_ids(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a response: those of generation_config.json (it may list several), else the
    tokenizer's own."""
    file = Path(model_path) / "generation_config.json"
    try:
        ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{file} is not a JSON object ({error}): mend or remove it") from error
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ConfigError(f"{model_path} names no end-of-sequence token: set rollout.stop_ids=[ID]")
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _check_room_for_responses(config: Config, prompts: Iterable[Prompt], *, train: bool) -> None:
    """Raises ConfigError when the longest prompt and response together pass what the model or, where it is
    trained on, a micro-batch holds."""
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    response = config.rollout.response_length_max
    total = len(longest.token_ids) + response
    for limit, name in _limits(config, train=train):
        if total > limit:
            raise ConfigError(
                f"prompt {longest.id} has {len(longest.token_ids)} tokens, which with "
                f"rollout.response_length_max={response} makes {total}, more than {name} ({limit}): "
                f"lower rollout.response_length_max or take long prompts out{_or_raise(name)}"
            )


def _limits(config: Config, *, train: bool) -> list[tuple[int, str]]:
    """How many tokens a sequence may have, and what says so."""
    positions = read_architecture(config.model.path).max_positions
    limits = [(positions, "the model's max_position_embeddings")]
    if train:
        limits.append((config.trainer.tokens_per_microbatch, "trainer.tokens_per_microbatch"))
    return limits


def _or_raise(name: str) -> str:
    """The other remedy, for a limit that the configuration sets."""
    return f", or raise {name}" if name.startswith("trainer.") else ""
