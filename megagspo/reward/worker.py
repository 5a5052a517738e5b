"""A process that judges one response after another; `workers.py` starts it and can afford to lose it.

Protocol: `ready` once the judge is imported; then one JSON object a line in (the judge's keyword arguments),
one out: {"score": number} or {"error": text}. End of input ends it.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys

MEMORY_LIMIT_BYTES = 8 << 30


def main(judge_path: str, time_limit: float) -> None:
    """Serves until the input ends. `judge_path` is `module:function`."""
    # Libraries print when they please: to them standard output is standard error; the real one is ours.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    module, _, function = judge_path.partition(":")
    judge = getattr(importlib.import_module(module), function)
    print("ready", file=answers)
    for line in sys.stdin:
        # Counts processor time, so that a busy machine changes no reward. The default action of SIGPROF ends
        # the process even inside C code that never returns to the interpreter, where no handler would run.
        signal.setitimer(signal.ITIMER_PROF, time_limit)
        try:
            answer = {"score": judge(**json.loads(line))}
        # Whatever a judge raises on a strange response is a verdict about it, reported with its reason.
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
