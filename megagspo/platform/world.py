"""Where this process stands among its peers. Imports nothing heavy, so that the launcher can ask as well."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class World:
    """rank of size processes in all; local_rank counts on this machine."""

    rank: int
    size: int
    local_rank: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0


ALONE = World(rank=0, size=1, local_rank=0)


def launched_world() -> World | None:
    """The world as torchrun and megagspo's own launcher (`RANK`) or srun (`SLURM_PROCID`) describe it; None
    when this process was started alone."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return World(rank=rank, size=size, local_rank=int(os.environ.get("LOCAL_RANK", rank)))
    if "SLURM_PROCID" in os.environ and "MASTER_ADDR" in os.environ:
        return World(
            rank=int(os.environ["SLURM_PROCID"]),
            size=int(os.environ["SLURM_NTASKS"]),
            local_rank=int(os.environ.get("SLURM_LOCALID", 0)),
        )
    return None
