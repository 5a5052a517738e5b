"""From a question to the prompt's text and token ids, with exactly one BOS where the tokenizer has the habit.

Two faults of systems of this kind are excluded by one rule. A rendered chat template is encoded WITHOUT
special tokens, since it already holds them; a plain text is too, since tokenizers disagree on what they add
(some append an end-of-sequence token). Then the one thing that may be missing, BOS, is put in front if it is
not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from megagspo.errors import DataError


class PromptTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that makes prompts."""

    bos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


def render(question: str, *, template: Literal["none", "chat"], tokenizer: PromptTokenizer) -> str:
    """The prompt's text. It ends where the model has to answer.

    none: the question and a line break; chat: one user turn in the tokenizer's chat template, with the
    opening of the assistant's turn. Raises DataError when the tokenizer has no chat template.
    """
    if template == "none":
        return question + "\n"
    if not tokenizer.chat_template:
        raise DataError("template: chat, but the model's tokenizer has no chat template; use template: none")
    turns = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def encode(text: str, *, tokenizer: PromptTokenizer) -> tuple[int, ...]:
    """Token ids of a rendered prompt: what the text says, and BOS in front if the tokenizer has the habit."""
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    bos = tokenizer.bos_token_id
    if bos is not None and token_ids[:1] != (bos,) and _prepends(bos, tokenizer):
        return (bos, *token_ids)
    return token_ids


def _prepends(bos: int, tokenizer: PromptTokenizer) -> bool:
    """Whether the tokenizer starts every text with BOS, seen from what it does: its settings may not say."""
    return tokenizer.encode("a", add_special_tokens=True)[0] == bos
