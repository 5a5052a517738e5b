"""Tests of this folder import Megatron-Core: what it expects of CUDA is redirected before."""

from megagspo.platform.device import pick_platform

pick_platform("cpu")
