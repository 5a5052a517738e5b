"""The ranks, and the models they load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megagspo.platform.device import pick_platform
from tests.dist.harness import RankPool

pick_platform("cpu")  # before a test module imports anything of Megatron


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four gloo ranks, started when a test first needs them. None outlives the session."""
    pool = RankPool()
    yield pool
    started = pool.processes()
    pool.close()
    assert not [process.name for process in started if process.is_alive()]


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of 4 layers and 4 experts, whose vocabulary no padding divides. Read it, never write to
    it."""
    from tests.dist.models import make_moe

    return make_moe(tmp_path_factory.mktemp("models") / "moe")


@pytest.fixture(scope="session")
def moe_not_renormalised_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with norm_topk_prob false: the chosen experts' weights do not add up to 1."""
    from tests.dist.models import make_moe

    return make_moe(tmp_path_factory.mktemp("models") / "moe_not_renormalised", norm_topk_prob=False)


@pytest.fixture(scope="session")
def dense_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense Qwen3 with an output layer of its own."""
    from tests.dist.models import make_dense

    return make_dense(tmp_path_factory.mktemp("models") / "dense", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense Qwen3 whose output layer is its embedding."""
    from tests.dist.models import make_dense

    return make_dense(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)
