"""Writes a tiny Qwen3-MoE checkpoint with a real tokenizer: what the quickstart trains and most tests load.

Run `python tools/make_tiny_moe.py /tmp/tiny_moe`. The weights are random, everything else is as in a
released model: the standard Hugging Face layout with one tensor an expert, query and key norms, grouped-query
attention, a byte-level BPE tokenizer and a chat template. The weights depend on the seed; the tokenizer does
not, so that two checkpoints made with different seeds read the same ids.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>")

# Every turn ends with the end-of-sequence token: a chat model then stops by the same token as a plain one.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# Qwen's own split: each digit is a piece, hence a token, of its own, with which arithmetic is learnt best.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CORPUS_TASKS = (
    "chain_sum",
    "basic_arithmetic",
    "simple_equations",
    "gcd",
    "lcm",
    "number_sorting",
    "spell_backward",
    "letter_counting",
    "word_sorting",
)


def corpus(problems_per_task: int = 100) -> Iterator[str]:
    """Questions and answers of a few reasoning-gym tasks: always the same text."""
    for task in CORPUS_TASKS:
        for problem in reasoning_gym.create_dataset(task, size=problems_per_task, seed=0):
            yield f"{problem['question']}\n{problem['answer']}"


def make_tiny_tokenizer(*, vocab_size: int = 512, max_length: int = 1024) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `corpus`; any text can be encoded, and no BOS is ever added."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_moe(
    destination: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 128,
    experts: int = 8,
    topk: int = 2,
    moe_intermediate: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab_size: int = 512,
    max_length: int = 1024,
) -> None:
    """Writes model and tokenizer to `destination` in float32; the same arguments give the same bytes.

    The model's vocabulary is exactly len(tokenizer): layouts that need a padded one have to pad it
    themselves, as they must for released models.
    """
    tokenizer = make_tiny_tokenizer(vocab_size=vocab_size, max_length=max_length)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        moe_intermediate_size=moe_intermediate,
        num_experts=experts,
        num_experts_per_tok=topk,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        max_position_embeddings=max_length,
        # 1 / sqrt(hidden size), which a model this small learns much faster from than from the 0.02 of large
        # ones
        initializer_range=hidden**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )  # type: ignore[call-arg]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    _write_the_older_keys_too(destination)


def _write_the_older_keys_too(destination: Path) -> None:
    """Adds the names that released checkpoints use: transformers 4, inside many engines, then reads the same.

    Without them it falls back to its defaults, 128 experts among them, without a word.
    """
    config = json.loads((destination / "config.json").read_text())
    config["num_experts"] = config["num_local_experts"]
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    tokenizer = json.loads((destination / "tokenizer_config.json").read_text())
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokenizer["additional_special_tokens"] = tokenizer.pop("extra_special_tokens")
    for name, content in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        (destination / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Reads the command line; a destination that holds something is left alone unless --force is given."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="example: python tools/make_tiny_moe.py /tmp/tiny_moe --seed 1 --layers 2",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("destination", type=Path, metavar="DST", help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="decides the weights")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers, all of them MoE")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    parser.add_argument("--experts", type=int, default=8, help="experts a layer")
    parser.add_argument("--topk", type=int, default=2, help="experts a token")
    parser.add_argument("--moe-intermediate", type=int, default=128, help="width of one expert")
    parser.add_argument("--vocab-size", type=int, default=512, help="tokens to train the tokenizer to")
    parser.add_argument("--max-length", type=int, default=1024, help="positions")
    parser.add_argument("--force", action="store_true", help="write into DST although it is not empty")
    options = vars(parser.parse_args())
    destination, force = options.pop("destination"), options.pop("force")
    if destination.exists() and not destination.is_dir():
        parser.error(f"{destination} is a file; name a directory")
    if destination.is_dir() and any(destination.iterdir()) and not force:
        parser.error(f"{destination} is not empty; name another directory, or pass --force to write over it")
    logging.disable_progress_bar()
    make_tiny_moe(destination, **options)
    print(f"wrote {destination}", file=sys.stderr)


if __name__ == "__main__":
    main()
