"""One step of reinforcement learning, and nothing else:

    prompts -> rollouts -> rewards -> advantages -> packed micro-batches -> loss -> optimizer -> weight push
    -> next rollouts

Every rank runs this loop. What a stage does is in `stages.py`, what it is given in `assembly.py`, what is
measured in `measure.py`.
"""

from __future__ import annotations

from megagspo.algo.losses import objective_of
from megagspo.assembly import WeightPush, assemble, empty_engine, respondent
from megagspo.config import Config
from megagspo.evaluate import held_out_metrics
from megagspo.inputs import inputs_for_training
from megagspo.measure import mismatch_metrics, ratio_metrics, reward_metrics, speed_metrics, update_metrics
from megagspo.observe.progress import StepTimer
from megagspo.stages import divide, experience, mini_batch, recompute_old_logprobs, respond, update


def train(config: Config) -> None:
    """Trains until `trainer.steps`, from the newest checkpoint where the run has one. Called by every rank
    alike."""
    objective = objective_of(config.algorithm)
    temperature = config.rollout.temperature
    inputs = inputs_for_training(config)
    with assemble(config, inputs, command="train", updates_per_step=config.trainer.minibatches) as run:
        policy, engine = run.policy, empty_engine(config, run.policy)
        push = WeightPush(policy, engine, seed=config.run.seed, warn=run.progress.line)
        with respondent(config, inputs, engine) as answering:
            push()  # the engine has weights, proven, before its first request
            for step in run.remaining_steps():
                timer = StepTimer(run.progress)

                with timer.stage("rollout"):
                    prompts = run.stream.take(config.rollout.prompts)
                    samples = run.replayed(step) or respond(
                        answering, prompts, responses=config.rollout.responses, step=step
                    )
                run.keep_rollouts(samples)
                data = experience(config.algorithm, samples)
                batches = divide(
                    len(data.samples), config.trainer.minibatches, seed=config.run.seed, step=step
                )

                if config.algorithm.old_logprobs == "trainer":
                    with timer.stage("old_logprob"):
                        data = recompute_old_logprobs(policy, data, temperature=temperature)

                with timer.stage("train"):
                    updates = [
                        update(
                            policy,
                            mini_batch(config.algorithm, data, members),
                            objective,
                            temperature=temperature,
                        )
                        for members in batches
                    ]
                    policy.version = step

                with timer.stage("push"):
                    push()

                run.record(
                    reward_metrics(samples, config.reward)
                    | update_metrics(updates)
                    | ratio_metrics(updates)
                    | mismatch_metrics(data, config.algorithm)
                    | held_out_metrics(run, answering)
                    | speed_metrics(timer, updates)
                )
                run.save_when_due()
        run.export_when_asked()
