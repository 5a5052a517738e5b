"""Samples per second of megagspo and of TRL's GRPOTrainer on the same job, by turns. `--help` for options.

The job: a Qwen3-MoE of 4 layers, hidden 128, 8 experts of which 2 are active; batches of 128 samples (16
prompts x 8 responses) of up to 32 new tokens; sequence-level importance ratios; 4 mini-batches a batch, each
an optimizer step. One batch is everything: generation, rewards, old log-probabilities, training, and on our
side the proven weight push and the files of the run as well. Both read the same model, tokenizer and prompts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

PROMPTS, RESPONSES, NEW_TOKENS, MINIBATCHES = 16, 8, 32, 4
LEARNING_RATE = 1e-5
SAMPLES = PROMPTS * RESPONSES


@dataclass(frozen=True, kw_only=True)
class Side:
    """A way to run the job. `command` must print or file one line a batch; see `_seconds_per_batch`."""

    name: str
    command: Sequence[str]
    threads: int


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="peer_trl_") as scratch:
        work = Path(scratch)
        model = Path(arguments.model) if arguments.model else _random_model(work)
        data = _prompts(work, model, count=PROMPTS * (arguments.warm + arguments.batches))
        ours = [_ours(work, model, data, arguments, layout=layout) for layout in arguments.ours]
        peers = [
            _trl(work, model, data, arguments, threads=threads, checkpointing=checkpointing)
            for threads in arguments.trl_threads
            for checkpointing in arguments.trl_checkpointing
        ]
        rates: dict[str, list[float]] = {side.name: [] for side in (*ours, *peers)}
        for turn in range(arguments.rounds):
            for side in (*ours, *peers):  # by turns, so that a busy moment of the machine hits both
                seconds = _seconds_per_batch(side, work, arguments)
                rates[side.name].append(SAMPLES / statistics.median(seconds))
                print(
                    f"round {turn + 1}  {side.name:<32} {rates[side.name][-1]:7.1f} samples/s  "
                    f"(median of {len(seconds)} batches; {min(seconds):.2f} to {max(seconds):.2f} s a batch)",
                    flush=True,
                )
    best_ours, best_peer = (
        max((side.name for side in sides), key=lambda name: statistics.median(rates[name]))
        for sides in (ours, peers)
    )
    ratios = [mine / theirs for mine, theirs in zip(rates[best_ours], rates[best_peer], strict=True)]
    print(
        f"{best_ours}: {statistics.median(rates[best_ours]):.1f} samples/s, "
        f"{best_peer}: {statistics.median(rates[best_peer]):.1f} samples/s, "
        f"ratio {statistics.median(ratios):.2f} (rounds {min(ratios):.2f} to {max(ratios):.2f})"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: .venv/bin/pip install -r tools/bench/requirements.txt && "
        ".venv/bin/python tools/bench/peer_trl.py --rounds 3",
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default 3)")
    parser.add_argument("--batches", type=int, default=8, help="measured batches a turn (default 8)")
    parser.add_argument("--warm", type=int, default=2, help="batches before the measured ones (default 2)")
    parser.add_argument("--model", help="a Hugging Face directory (default: the random one of the job)")
    parser.add_argument(
        "--ours",
        nargs="+",
        choices=sorted(LAYOUTS),
        default=["data=2"],
        help="layouts of ours to run (default data=2)",
    )
    parser.add_argument(
        "--trl-threads", nargs="+", type=int, default=[2], help="OpenMP threads of TRL's process (default 2)"
    )
    parser.add_argument(
        "--trl-checkpointing",
        nargs="+",
        choices=["on", "off"],
        default=["on", "off"],
        help="gradient checkpointing, which TRL switches on by default (default: both ways)",
    )
    return parser.parse_args()


def _random_model(work: Path) -> Path:
    from tools.make_tiny_moe import make_tiny_moe

    make_tiny_moe(work / "model")
    return work / "model"


def _prompts(work: Path, model: Path, *, count: int) -> Path:
    """A JSONL of distinct sums, prompt and answer as text, that both sides read."""
    from transformers import AutoTokenizer

    from megagspo.config import load_config
    from megagspo.data import load_prompts

    config = load_config(ROOT / "configs/tiny_moe_cpu.yaml", [f"model.path={model}"])
    prompts = load_prompts(config.data, AutoTokenizer.from_pretrained(model)).train[:count]
    lines = [json.dumps({"prompt": prompt.text, "answer": prompt.answer}) for prompt in prompts]
    (work / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return work / "prompts.jsonl"


LAYOUTS = {
    "1 rank": ("parallel.expert=1", "parallel.data=1", "platform.threads_per_rank=2"),
    "data=2": ("parallel.expert=1", "parallel.data=2"),
    "expert=2": ("parallel.expert=2",),
}


def _ours(work: Path, model: Path, data: Path, arguments: argparse.Namespace, *, layout: str) -> Side:
    words = (
        f"model.path={model}",
        f"run.dir={work / 'runs'}",
        "run.name=ours",
        f"data.train=[{{jsonl: {data}, prompt: prompt, answer: answer}}]",
        "data.eval=[]",
        f"rollout.prompts={PROMPTS}",
        f"rollout.responses={RESPONSES}",
        f"rollout.response_length_max={NEW_TOKENS}",
        f"trainer.minibatches={MINIBATCHES}",
        f"trainer.steps={arguments.warm + arguments.batches}",
        f"optimizer.lr={LEARNING_RATE}",
        "checkpoint.every=0",
        "checkpoint.save_hf=false",
        *LAYOUTS[layout],
    )
    command = [sys.executable, "-m", "megagspo", "train", "configs/tiny_moe_cpu.yaml", *words]
    return Side(name=f"megagspo {layout}", command=command, threads=1)


def _trl(
    work: Path,
    model: Path,
    data: Path,
    arguments: argparse.Namespace,
    *,
    threads: int,
    checkpointing: str,
) -> Side:
    settings = {
        "model": str(model),
        "data": str(data),
        "output": str(work / "trl"),
        "batches": arguments.warm + arguments.batches,
        "samples": SAMPLES,
        "responses": RESPONSES,
        "new_tokens": NEW_TOKENS,
        "minibatches": MINIBATCHES,
        "learning_rate": LEARNING_RATE,
        "gradient_checkpointing": checkpointing == "on",
    }
    command = [sys.executable, str(HERE / "trl_process.py"), json.dumps(settings)]
    name = f"TRL {threads} thread{'s' * (threads > 1)}, checkpointing {checkpointing}"
    return Side(name=name, command=command, threads=threads)


def _seconds_per_batch(side: Side, work: Path, arguments: argparse.Namespace) -> list[float]:
    """Runs a side and gives the wall time of its measured batches: the time between the lines it files.

    Each side appends a line to a file when a batch begins or ends (ours: metrics.jsonl; TRL: a callback at
    the first optimizer step of each batch); from a line to the next is one batch whole.
    """
    subprocess.run(["rm", "-rf", str(work / "runs"), str(work / "trl")], check=True)
    lines = work / ("runs/ours/metrics.jsonl" if side.name.startswith("megagspo") else "trl/batches")
    log = work / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": str(side.threads), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            side.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        seen: list[float] = []
        while process.poll() is None:
            count = lines.read_bytes().count(b"\n") if lines.is_file() else 0
            seen += [time.perf_counter()] * (count - len(seen))
            time.sleep(0.01)
    if process.returncode:
        sys.exit(f"{side.name} failed:\n{log.read_text()[-3000:]}")
    measured = seen[arguments.warm :]
    return [after - before for before, after in itertools.pairwise(measured)]


if __name__ == "__main__":
    main()
