"""Which device a process computes on."""

from __future__ import annotations

import pytest
import torch

from megagspo.errors import ConfigError
from megagspo.platform.device import pick_platform
from megagspo.platform.world import launched_world


def test_cpu_computes_in_float32_over_gloo() -> None:
    platform = pick_platform("cpu", threads=1)
    assert (platform.backend, platform.default_dtype, platform.is_cpu) == ("gloo", torch.float32, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_on_a_machine_without_it_is_a_user_error() -> None:
    with pytest.raises(ConfigError, match=r"platform\.device=cuda.*auto or cpu"):
        pick_platform("cuda")
    assert pick_platform("auto").is_cpu


def test_rank_is_read_from_torchrun_or_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "MASTER_ADDR",
    ):
        monkeypatch.delenv(name, raising=False)
    assert launched_world() is None
    for name, value in {
        "SLURM_PROCID": 5,
        "SLURM_NTASKS": 8,
        "SLURM_LOCALID": 1,
        "MASTER_ADDR": "n1",
    }.items():
        monkeypatch.setenv(name, str(value))
    world = launched_world()
    assert world is not None
    assert (world.rank, world.size, world.local_rank) == (5, 8, 1)
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 3}.items():
        monkeypatch.setenv(name, str(value))
    world = launched_world()
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.is_first) == (3, 4, 3, False)
