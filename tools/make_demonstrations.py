"""Writes demonstrations of a careless teacher: problems of a configuration with answers that are often wrong.

Run `python tools/make_demonstrations.py configs/tiny_moe_cpu.yaml /tmp/demonstrations.jsonl`. Imitating them,
a model becomes about as good as its teacher; the quickstart then shows what reinforcement learning with a
verifiable reward adds. Only for tasks whose answers are whole numbers.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from megagspo.config import load_config
from megagspo.data.sources import problems_of

# Slips of mental arithmetic: a digit off by one or two, a carry forgotten.
SLIPS = (-10, -2, -1, 1, 2, 10)


def make_demonstrations(config: Path, destination: Path, *, wrong: float = 0.45, seed: int = 0) -> int:
    """Writes one JSON object a line, `prompt` and `answer`, for every problem of data.train; returns their
    number.

    wrong: the share of answers with a slip. The same arguments give the same file.
    """
    chance = random.Random(seed)
    lines = []
    for source in load_config(config).data.train:
        for problem in problems_of(source):
            assert problem.answer is not None, f"{source.label}/{problem.index} has no answer"
            answer = int(problem.answer)
            if chance.random() < wrong:
                answer = max(0, answer + chance.choice(SLIPS))
            lines.append(json.dumps({"prompt": problem.question, "answer": str(answer)}))
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.write_text("\n".join(lines) + "\n")
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="example: python tools/make_demonstrations.py configs/tiny_moe_cpu.yaml /tmp/demos.jsonl",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="its data.train gives the problems")
    parser.add_argument("destination", type=Path, metavar="DST", help="file to write")
    parser.add_argument("--wrong", type=float, default=0.45, help="share of answers with a slip")
    parser.add_argument("--seed", type=int, default=0, help="decides which are wrong, and how")
    options = parser.parse_args()
    if not 0 <= options.wrong <= 1:
        parser.error(f"--wrong is {options.wrong}, it is a share between 0 and 1")
    count = make_demonstrations(options.config, options.destination, wrong=options.wrong, seed=options.seed)
    print(f"wrote {options.destination}: {count} demonstrations")


if __name__ == "__main__":
    main()
