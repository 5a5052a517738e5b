"""The stages of a step, each a function from records to records. `loop.py` shows them in order.

Every rank calls every stage alike. Ranks share the prompts of a step; after the rollouts all ranks know all
samples.
"""

from megagspo.stages.lessons import (
    Experience,
    divisions,
    experience,
    lesson,
    mini_batch,
    score_before_updates,
    supervised_batch,
)
from megagspo.stages.rollouts import explore, respond
from megagspo.stages.updates import Update, update

__all__ = [
    "Experience",
    "Update",
    "divisions",
    "experience",
    "explore",
    "lesson",
    "mini_batch",
    "respond",
    "score_before_updates",
    "supervised_batch",
    "update",
]
