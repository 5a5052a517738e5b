"""Supervised warm-up: the reference answers as responses, with the same policy, data order and checkpoints as
`loop.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megagspo.algo.losses.likelihood import likelihood
from megagspo.assembly import Run, WeightPush, assemble, empty_engine, respondent
from megagspo.config import Config
from megagspo.evaluate import held_out_metrics
from megagspo.inputs import Inputs, answer_tokens, inputs_for_warm_up
from megagspo.measure import speed_metrics, update_metrics
from megagspo.observe.progress import StepTimer
from megagspo.stages import divisions, supervised_batch, update


def sft(config: Config) -> None:
    """Trains until `trainer.steps`, `sft.sequences` answers a step in `trainer.minibatches` updates."""
    inputs = inputs_for_warm_up(config)
    with assemble(config, inputs, command="sft") as run, _held_out(run, inputs) as held_out:
        for step in run.remaining_steps():
            timer = StepTimer(run.progress)
            prompts = run.stream.take(config.sft.sequences)
            answers = answer_tokens(prompts, inputs.tokenizer, inputs.stop_token_ids[0])
            with timer.stage("train"):
                updates = [
                    update(
                        run.policy,
                        supervised_batch([prompts[i] for i in members], [answers[i] for i in members]),
                        likelihood,
                        temperature=1.0,
                    )
                    for members in divisions(config, len(prompts), step=step)
                ]
                run.policy.version = step
            run.record(update_metrics(updates) | held_out() | speed_metrics(timer, updates))
            run.save_when_due()
        run.export_when_asked()


@contextmanager
def _held_out(run: Run, inputs: Inputs) -> Iterator[Callable[[], dict[str, float]]]:
    """What `eval.every` asks for, at the steps it asks for; an engine is there only if it asks at all."""
    config = run.config
    if not config.eval.every:
        yield dict
        return
    engine = empty_engine(config, run.policy)
    push = WeightPush(run.policy, engine, seed=config.run.seed, warn=run.progress.line)

    def measured() -> dict[str, float]:
        if run.step % config.eval.every:
            return {}
        push()
        return held_out_metrics(run, answering)

    with respondent(config, inputs, engine) as answering:
        yield measured
