"""Log-probabilities from hidden states: memory and time of ours, of the naive form and of TRL's selective
log-softmax, forward and backward. `--help` for options.

Each runs in a process of its own, by turns; memory is what the process's peak rises by over what it held
before the first forward pass, weights and inputs included in neither.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

FORMS = ("ours", "naive", "trl")


def main() -> None:
    arguments = _arguments()
    if arguments.form:
        print(json.dumps(_measure(arguments)))
        return
    found: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    for _ in range(arguments.rounds):
        for form in FORMS:
            if (result := _in_a_process(form, arguments)) is not None:
                found[form].append(result)
    print(f"T={arguments.tokens} V={arguments.vocabulary} D={arguments.hidden}, {arguments.threads} threads")
    for form, results in found.items():
        if not results:
            print(f"{form:<6} not measured: TRL is not installed")
            continue
        memory, seconds = (statistics.median(r[key] for r in results) for key in ("gib", "seconds"))
        of_naive = [statistics.median(r[key] for r in found["naive"]) for key in ("gib", "seconds")]
        print(
            f"{form:<6} {memory:6.2f} GiB ({memory / of_naive[0]:4.0%} of naive)   "
            f"{seconds:6.2f} s ({seconds / of_naive[1]:.2f} of naive)"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: .venv/bin/python tools/bench/logprob.py --rounds 3",
    )
    parser.add_argument("--tokens", type=int, default=4096, help="T (default 4096)")
    parser.add_argument("--vocabulary", type=int, default=151936, help="V (default 151936)")
    parser.add_argument("--hidden", type=int, default=256, help="D (default 256)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each form (default 2)")
    parser.add_argument("--threads", type=int, default=2, help="of a process (default 2)")
    parser.add_argument("--form", choices=FORMS, help="measure this one, in this process")
    return parser.parse_args()


def _in_a_process(form: str, arguments: argparse.Namespace) -> dict[str, float] | None:
    words = [sys.executable, __file__, "--form", form, "--tokens", str(arguments.tokens)]
    words += ["--vocabulary", str(arguments.vocabulary), "--hidden", str(arguments.hidden)]
    words += ["--threads", str(arguments.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    result = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def _measure(arguments: argparse.Namespace) -> dict[str, float] | None:
    import torch

    form = _form(arguments.form, arguments)
    if form is None:
        return None
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    tokens, vocabulary, hidden_size = arguments.tokens, arguments.vocabulary, arguments.hidden
    hidden = (torch.randn(tokens, hidden_size) / hidden_size**0.5).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    gradients = torch.randn(tokens)
    before, began = _peak_gib(), time.perf_counter()
    form(hidden, weight, targets).backward(gradients)
    return {"seconds": time.perf_counter() - began, "gib": _peak_gib() - before}


def _form(name: str, arguments: argparse.Namespace) -> Callable | None:
    if name == "naive":
        return lambda h, w, t: (h @ w.t()).log_softmax(-1).gather(1, t[:, None])[:, 0]
    if name == "trl":
        try:
            from trl.trainer.utils import selective_log_softmax
        except ImportError:
            return None
        return lambda h, w, t: selective_log_softmax(h @ w.t(), t)
    import torch.distributed as dist

    from megagspo.policy.logprob import token_logprobs, vocabulary_part

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    part = vocabulary_part(
        rows=arguments.vocabulary, vocab_size=arguments.vocabulary, rank=0, group=dist.group.WORLD
    )
    return lambda h, w, t: token_logprobs(h, w, t, part, temperature=1.0)[0]


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


if __name__ == "__main__":
    main()
