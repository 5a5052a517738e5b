"""What a person at the terminal sees: a bar over the steps with the stage at work, and one line a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class StepTimer:
    """Seconds spent in each stage of a step, wall clock."""

    def __init__(self, show: ProgressDisplay) -> None:
        self._show = show
        self._began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of the block to the stage's."""
        began = time.perf_counter()
        self._show.stage(name)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def total(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._began


class ProgressDisplay:
    """A live bar where the output is a terminal; plain lines elsewhere; nothing at all when not visible
    (other ranks)."""

    def __init__(self, *, title: str, total: int, done: int, visible: bool) -> None:
        self._console = Console(quiet=not visible, highlight=False)
        self._bar = Progress(
            TextColumn(f"[bold]{title}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[stage]}"),
            console=self._console,
            disable=not visible or not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(title, total=total, completed=done, stage="")

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, name: str) -> None:
        self._bar.update(self._task, stage=name.replace("_", " "))

    def line(self, text: str) -> None:
        """A line that stays. `text` is printed as it is, without markup."""
        self._console.print(text, markup=False, soft_wrap=True)

    def step_done(self, text: str) -> None:
        self.line(text)
        self._bar.advance(self._task)


_SHOWN = {
    "reward/mean": "reward {:.3f}",
    "eval/": "held-out {:.3f}",
    "policy/loss": "loss {:+.2e}",
    "policy/grad_norm": "|grad| {:.2e}",
    "policy/clip_fraction": "clipped {:.2f}",
    "policy/entropy": "entropy {:.2f}",
    "response/length_mean": "length {:.1f}",
    "mismatch/logprob_abs_mean": "mismatch {:.0e}",
    "time/step": "{:.2f} s",
}


def step_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """One line of what matters most, from those metrics that the step has."""
    shown = [
        form.format(value)
        for key, form in _SHOWN.items()
        for name, value in metrics.items()
        if name == key or (key.endswith("/") and name.startswith(key))
    ]
    return f"step {step:>{len(str(steps))}}/{steps}  " + "  ".join(shown)
