"""One step of reinforcement learning, and nothing else:

    prompts -> rollouts -> rewards -> advantages -> packed micro-batches -> loss -> optimizer -> weight push
    -> next rollouts

Every rank runs this loop. What a stage does is in `stages/`, what it is given in `assembly.py`, what is
measured in `measure.py`.
"""

from __future__ import annotations

from megagspo.algo.losses import objective_of
from megagspo.assembly import WeightPush, assemble, empty_engine, respondent
from megagspo.config import Config
from megagspo.evaluate import held_out_metrics
from megagspo.inputs import inputs_for_training
from megagspo.measure import (
    mismatch_metrics,
    objective_metrics,
    reward_metrics,
    speed_metrics,
    update_metrics,
)
from megagspo.observe.progress import StepTimer
from megagspo.stages import divisions, experience, explore, lesson, mini_batch, score_before_updates, update


def train(config: Config) -> None:
    """Trains until `trainer.steps`, from the newest checkpoint where the run has one. Called by every rank
    alike."""
    objective = objective_of(config.algorithm)
    temperature = config.rollout.temperature
    inputs = inputs_for_training(config)
    with assemble(config, inputs, command="train") as run:
        policy, engine = run.policy, empty_engine(config, run.policy)
        push = WeightPush(policy, engine, seed=config.run.seed, warn=run.progress.line)
        with respondent(config, inputs, engine) as answering:
            push()  # the engine has weights, proven, before its first request
            for step in run.remaining_steps():
                timer = StepTimer(run.progress)

                with timer.stage("rollout"):
                    samples = run.replayed(step) or explore(config, answering, run.stream, step=step)
                run.keep_rollouts(samples)
                data = experience(samples)

                if config.algorithm.needs_trainer_pass or config.algorithm.needs_reference:
                    with timer.stage("old_logprob"):
                        data = score_before_updates(policy, data, config.algorithm, temperature=temperature)
                whole = lesson(config, data)

                with timer.stage("train"):
                    updates = [
                        update(policy, mini_batch(config, whole, members), objective, temperature=temperature)
                        for members in divisions(config, len(data.samples), step=step)
                    ]
                    policy.version = step
                run.renew_reference_when_due()

                with timer.stage("push"):
                    push()

                run.record(
                    reward_metrics(samples, config.reward)
                    | update_metrics(updates)
                    | objective_metrics(updates, objective, config.algorithm)
                    | mismatch_metrics(data, config.algorithm)
                    | held_out_metrics(run, answering)
                    | speed_metrics(timer, updates)
                )
                run.save_when_due()
        run.export_when_asked()
