"""All ranks go on from the checkpoint that the first one chose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.dist.harness import RankPool


def choose(layout: Any, platform: Any, /, roots: list[str]) -> tuple[str | None, dict[str, Any]]:
    """Each rank looks at a directory of its own, as where a shared file system is late to show a rename."""
    import torch.distributed as dist

    from megagspo.assembly import _newest
    from megagspo.platform.world import World
    from megagspo.policy.checkpoints import CheckpointDirectory

    rank, size = dist.get_rank(), dist.get_world_size()
    checkpoints = CheckpointDirectory(Path(roots[rank]), keep=2, rank=rank, barrier=dist.barrier)
    newest, state = _newest(checkpoints, World(rank=rank, size=size, local_rank=rank))
    return str(newest) if newest else None, state


def save(root: Path, step: int) -> Path:
    directory = root / f"step_{step:06d}"
    directory.mkdir(parents=True)
    state = json.dumps({"step": step})
    (directory / "state.json").write_text(state)
    (directory / "manifest.json").write_text(json.dumps({"state.json": len(state)}))
    return directory


def test_ranks_that_see_other_checkpoints_follow_the_first(ranks: RankPool, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    first = save(old, 10)
    save(new, 10)
    second = save(new, 20)
    for roots, chosen in (([new, old], second), ([old, new], first), ([tmp_path / "none", new], None)):
        expected = (str(chosen), {"step": int(chosen.name[-2:])}) if chosen else (None, {})
        assert ranks.run(choose, roots=[str(root) for root in roots], data=2) == [expected] * 2
