"""Prompt sources, templates, and the resumable order in which prompts are trained on."""

from megagspo.data.prompts import PromptSet, load_held_out, load_prompts
from megagspo.data.stream import PromptStream

__all__ = ["PromptSet", "PromptStream", "load_held_out", "load_prompts"]
