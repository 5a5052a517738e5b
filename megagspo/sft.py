"""Supervised warm-up: the reference answers as responses, with the same policy, data order and checkpoints as
`loop.py`."""

from __future__ import annotations

from megagspo.algo.losses.likelihood import likelihood
from megagspo.assembly import assemble, stop_token_ids
from megagspo.config import Config
from megagspo.measure import speed_metrics, update_metrics
from megagspo.observe.progress import StepTimer
from megagspo.stages import answer_tokens, divisions, supervised_batch, update


def sft(config: Config) -> None:
    """Trains until `trainer.steps`, `sft.sequences` answers a step in `trainer.minibatches` updates."""
    with assemble(config, updates_per_step=config.trainer.minibatches * config.trainer.epochs) as run:
        answer_tokens(
            run.prompts.train, run.tokenizer, 0
        )  # a prompt without an answer is found before the first step
        stop = stop_token_ids(config.model.path, run.tokenizer)[0]
        for step in run.remaining_steps():
            timer = StepTimer(run.progress)
            prompts = run.stream.take(config.sft.sequences)
            answers = answer_tokens(prompts, run.tokenizer, stop)
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
            run.record(update_metrics(updates) | speed_metrics(timer, updates))
            run.save_when_due()
        run.export_when_asked()
