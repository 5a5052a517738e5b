"""Exactly one BOS where the tokenizer has the habit, none elsewhere, whatever the template does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from megagspo.data.templates import encode, render
from megagspo.errors import DataError

BOS = "<|system|>"  # any special token of the tiny tokenizer serves


def with_bos(tokenizer: Any, *, prepends: bool, in_template: bool) -> Any:
    made = copy.deepcopy(tokenizer)
    made.bos_token = BOS
    if prepends:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{BOS} $A <|endoftext|>",  # some append an end as well, which no prompt may have
            special_tokens=[(BOS, made.bos_token_id), ("<|endoftext|>", made.eos_token_id)],
        )
    if in_template:
        made.chat_template = "{{ bos_token }}" + made.chat_template
    return made


@pytest.mark.parametrize("template", ["none", "chat"])
@pytest.mark.parametrize("prepends", [True, False])
@pytest.mark.parametrize("in_template", [True, False])
def test_bos_is_there_exactly_once_or_not_at_all(
    tiny_tokenizer: Any, template: Any, prepends: bool, in_template: bool
) -> None:
    tokenizer = with_bos(tiny_tokenizer, prepends=prepends, in_template=in_template)
    token_ids = encode(render("2 + 2?", template=template, tokenizer=tokenizer), tokenizer=tokenizer)
    expected = prepends or (template == "chat" and in_template)
    assert token_ids.count(tokenizer.bos_token_id) == int(expected)
    assert (token_ids[0] == tokenizer.bos_token_id) == expected
    assert token_ids[-1] != tokenizer.eos_token_id


def test_a_tokenizer_without_bos_gets_none(tiny_tokenizer: Any) -> None:
    assert tiny_tokenizer.bos_token_id is None
    assert tiny_tokenizer.decode(encode("2 + 2?\n", tokenizer=tiny_tokenizer)) == "2 + 2?\n"


def test_the_text_ends_where_the_model_answers(tiny_tokenizer: Any) -> None:
    assert render("Hi", template="none", tokenizer=tiny_tokenizer) == "Hi\n"
    chat = render("Hi", template="chat", tokenizer=tiny_tokenizer)
    assert chat == "<|user|>\nHi<|endoftext|>\n<|assistant|>\n"


def test_chat_without_a_chat_template_is_a_users_mistake(tiny_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="template: none"):
        render("Hi", template="chat", tokenizer=tokenizer)
