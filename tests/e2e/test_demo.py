"""The main job from nothing, as `make demo` runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gspo_takes_the_held_out_score_from_at_most_a_half_to_at_least_085(tmp_path: Path, seed: int) -> None:
    result = subprocess.run(
        [sys.executable, "tools/demo.py", "--seed", str(seed), "--runs", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    last = result.stdout.strip().splitlines()[-1]
    scores = re.fullmatch(r"held-out avg@1: before (0\.\d\d) after (0\.\d\d)", last)
    assert scores, last
    before, after = map(float, scores.groups())
    print(f"seed {seed}: {last}")
    assert before <= 0.5
    assert after >= 0.85
    assert (tmp_path / "demo" / "report.html").is_file()
    assert f"wrote {tmp_path / 'demo' / 'report.html'}" in " ".join(result.stdout.split())

    records = [json.loads(line) for line in (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()]
    assert [record["policy/version"] for record in records] == list(range(1, len(records) + 1))
    assert max(record["mismatch/logprob_abs_mean"] for record in records) < 1e-4
