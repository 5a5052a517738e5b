"""The objectives by the name they have in a configuration. To add one: a file, a line here, a line of
defaults in `config/algorithm.py`, and its test against a float64 transcription of its formula."""

from megagspo.algo.losses.grpo import grpo
from megagspo.algo.losses.gspo import gspo
from megagspo.algo.objective import Objective
from megagspo.config.algorithm import AlgorithmConfig

LOSSES = {"gspo": gspo, "grpo": grpo}


def objective_of(config: AlgorithmConfig) -> Objective:
    """The objective that the configuration names, with its clip range."""
    return LOSSES[config.name](
        clip_low=config.clip_low, clip_high=config.clip_high, log_ratio_max=config.log_ratio_max
    )
