"""GSPO-token: sequence ratios with an advantage a token (arXiv 2507.18071, eq. 13 and 14)."""

from __future__ import annotations

from megagspo.algo.losses.hybrid import blended
from megagspo.algo.objective import Objective
from megagspo.config.algorithm import AlgorithmConfig


def gspo_token(config: AlgorithmConfig) -> Objective:
    """s_it = sg[s_i] pi_theta(y_it) / sg[pi_theta(y_it)]; minus min(s_it A_it, clip(s_it) A_it) at every
    token.

    Its value is that of GSPO and, where the advantages of a response are equal, so is its gradient; the form
    to use with per-token advantages. It is the end a = 1 of `hybrid`.
    """
    return blended(config, weight=1.0)
