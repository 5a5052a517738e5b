"""The objectives by the name they have in a configuration. To add one: a file, a line here, a line of
defaults in `config/algorithm.py`, and its test against a float64 transcription of its formula."""

from collections.abc import Callable

from megagspo.algo.losses.cispo import cispo
from megagspo.algo.losses.grpo import grpo
from megagspo.algo.losses.gspo import gspo
from megagspo.algo.losses.gspo_token import gspo_token
from megagspo.algo.losses.hybrid import hybrid
from megagspo.algo.objective import Objective
from megagspo.algo.terms import with_all_terms
from megagspo.config.algorithm import AlgorithmConfig, AlgorithmName

LOSSES: dict[AlgorithmName, Callable[[AlgorithmConfig], Objective]] = {
    "gspo": gspo,
    "gspo_token": gspo_token,
    "grpo": grpo,
    "cispo": cispo,
    "hybrid": hybrid,
    # GRPO's term; what makes them differ is their row of DEFAULTS: clip range, aggregation, advantage.
    "dr_grpo": grpo,
    "dapo": grpo,
    "rloo": grpo,
    "reinforce_pp": grpo,
}


def objective_of(config: AlgorithmConfig) -> Objective:
    """The objective that the configuration names, with correction, masking, KL and entropy where they are
    on."""
    return with_all_terms(LOSSES[config.name](config), config)
