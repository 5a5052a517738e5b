"""Builds the parts of a run from its configuration and takes them down again. What they do together is
`loop.py`'s matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor

from megagspo.config import Config, Layout, dump_config
from megagspo.convert.safetensors_io import write_checkpoint
from megagspo.data import PromptSet, PromptStream
from megagspo.errors import NumericsError, writing
from megagspo.inputs import Inputs
from megagspo.observe.metrics import MetricsLog
from megagspo.observe.progress import ProgressDisplay, step_line
from megagspo.observe.run_directory import RunDirectory
from megagspo.platform.device import Platform, pick_platform
from megagspo.platform.distributed import process_groups
from megagspo.platform.world import ALONE, World, launched_world
from megagspo.reward.scoring import Scorer
from megagspo.rollout.embedded.engine import EmbeddedEngine
from megagspo.rollout.store import check_finite, read_samples, step_file, write_samples
from megagspo.sync.in_process import PushReport, push
from megagspo.sync.probe import Probe
from megagspo.types import Engine, Sample, SamplingParams, TrainSequence

if TYPE_CHECKING:  # importing Megatron before the platform is picked would bypass platform/cpu.py
    from megagspo.policy.checkpoints import CheckpointDirectory
    from megagspo.policy.policy import MegatronPolicy


Command = Literal["train", "sft"]
"""The commands that make a run; one does not go on with what the other began."""


@dataclass(frozen=True, kw_only=True)
class Respondent:
    """What it takes to answer prompts and score the answers."""

    engine: Engine
    tokenizer: Any
    scorer: Scorer
    sampling: SamplingParams
    seed: int


@dataclass(kw_only=True)
class Run:
    """The parts of a run on this rank, and the step it has reached."""

    config: Config
    command: Command
    world: World
    directory: RunDirectory
    inputs: Inputs
    stream: PromptStream
    policy: MegatronPolicy
    checkpoints: CheckpointDirectory
    metrics: MetricsLog | None  # on the first rank
    progress: ProgressDisplay
    step: int
    samples: Sequence[Sample] = ()  # of the step being made

    def remaining_steps(self) -> Iterator[int]:
        """The steps still to make, counted from 1."""
        while self.step < self.config.trainer.steps:
            self.step += 1
            yield self.step

    def replayed(self, step: int) -> list[Sample] | None:
        """The saved rollouts of the step, where `rollout.replay` names a directory of them; the stream of
        prompts goes on as if they had been made."""
        replay = self.config.rollout.replay
        if replay is None:
            return None
        self.stream.take(self.config.rollout.prompts)
        return read_samples(step_file(replay, step))

    def keep_rollouts(self, samples: Sequence[Sample]) -> None:
        """Files what the step learns from, to be read and to be replayed. Raises NumericsError when it is not
        finite."""
        self.samples = samples
        if self.world.is_first:
            file = step_file(self.directory.rollouts, self.step)
            write_samples(file, samples, self.step, self.policy.version)
        check_finite(samples)
        groups, wanted = len({sample.group for sample in samples}), self.config.rollout.prompts
        if self.config.algorithm.dynamic_sampling and groups < wanted:
            self.progress.line(
                f"warning: step {self.step} learns from {groups} groups of {wanted}: no more were found "
                "whose rewards differ (algorithm.dynamic_sampling)"
            )

    def keep_failed(self, error: NumericsError) -> NumericsError:
        """Files the sample that the error names in `failed/`, and says so in the error that it returns."""
        named = [sample for sample in self.samples if sample.id == error.sample]
        if not named:
            return error
        file = step_file(self.directory.failed, self.step)
        if self.world.is_first:
            write_samples(file, named, self.step, self.policy.version)
        return NumericsError(
            f"{error}: step {self.step} was not made, and the newest checkpoint stands. "
            f"The sample is in {file}",
            sample=error.sample,
        )

    def renew_reference_when_due(self) -> None:
        """The reference becomes the current policy every `algorithm.kl.reference_every` steps."""
        every = self.config.algorithm.kl.reference_every
        if self.policy.reference and every and self.step % every == 0:
            self.policy.reference.renew()

    def record(self, metrics: dict[str, float]) -> None:
        """Files the step's metrics and shows its line."""
        metrics["policy/version"] = self.policy.version
        if self.metrics:
            self.metrics.write(self.step, metrics)
        self.progress.step_done(step_line(self.step, self.config.trainer.steps, metrics))

    def save_when_due(self) -> None:
        """A checkpoint every `checkpoint.every` steps and at the end."""
        every, last = self.config.checkpoint.every, self.step == self.config.trainer.steps
        if last or (every and self.step % every == 0):
            self.progress.stage("saving")
            state = {"step": self.step, "command": self.command, "prompts": self.stream.state_dict()}
            self.checkpoints.save(self.step, self.policy.save, state)

    def export_when_asked(self) -> None:
        """The Hugging Face directory of the final weights, `runs/NAME/hf`."""
        if self.config.checkpoint.save_hf:
            self.progress.stage("exporting")
            with writing(self.directory.hf):
                export(self.policy, self.directory.hf, like=Path(self.config.model.path))
            self.progress.line(f"exported {self.directory.hf}")


class WeightPush:
    """Pushes the policy's weights into an engine, proven each time."""

    def __init__(
        self, policy: MegatronPolicy, engine: Engine, *, seed: int, warn: Callable[[str], None]
    ) -> None:
        self._policy = policy
        self._warn = warn
        self._warned = False
        self._engine = engine
        architecture = policy.architecture
        self._probe = Probe(
            vocab_size=architecture.vocab_size,
            seed=seed,
            max_length=min(architecture.max_positions, policy.config.trainer.tokens_per_microbatch),
        )

    def __call__(self) -> PushReport:
        """The weights of the policy's version; after it the engine serves that version."""
        report = push(
            self._engine,
            self._policy.hf_tensors(),
            version=self._policy.version,
            probe=self._probe,
            trainer_logprobs=self._trainer_logprobs,
        )
        if self._probe.missed and not self._warned:
            self._warned = True
            self._warn(
                f"warning: the push probe reaches all experts but {self._probe.missed}; those go unproven"
            )
        return report

    def _trainer_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        rows = [
            TrainSequence(id=f"probe/{i}", token_ids=tuple(tokens), prompt_length=1)
            for i, tokens in enumerate(sequences)
        ]
        return self._policy.logprobs(rows, temperature=1.0).logprobs


@contextmanager
def assemble(config: Config, inputs: Inputs, *, command: Command) -> Iterator[Run]:
    """All parts of a run, at the step it has reached: a run that has a checkpoint continues from the newest
    whole one, if the same command made it."""
    world = launched_world() or ALONE
    layout = config.parallel.resolve(world.size)
    directory = RunDirectory(config.run_dir)
    with ExitStack() as stack:
        if world.is_first:
            stack.enter_context(directory.locked())
        platform = pick_platform(
            config.platform.device, local_rank=world.local_rank, threads=config.platform.threads_per_rank
        )
        stack.enter_context(process_groups(layout, platform, world, seed=config.run.seed))
        policy, checkpoints = _policy_and_checkpoints(config, layout, platform, world, directory)
        newest, state = _newest(checkpoints, world)
        directory.refuse_other_command(command, state)
        if newest:
            policy.load(newest)
        step = state.get("step", 0)
        stream = PromptStream(inputs.prompts.train, seed=config.run.seed)
        if state:
            stream.load_state_dict(state["prompts"])
        metrics = None
        if world.is_first:
            metrics = MetricsLog(directory.root, resume_step=step, tensorboard=config.observe.tensorboard)
            stack.callback(metrics.close)
        progress = stack.enter_context(
            ProgressDisplay(
                title=config.run.name, total=config.trainer.steps, done=step, visible=world.is_first
            )
        )
        progress.line(_opening(config, layout, platform, inputs.prompts, step))
        changed = directory.remember(dump_config(config)) if world.is_first else []
        for change in changed if step else ():
            progress.line(f"warning: since this run was last started, {change}")
        run = Run(
            config=config,
            command=command,
            world=world,
            directory=directory,
            inputs=inputs,
            stream=stream,
            policy=policy,
            checkpoints=checkpoints,
            metrics=metrics,
            progress=progress,
            step=step,
        )
        try:
            yield run
        except NumericsError as error:
            raise run.keep_failed(error) from error


@contextmanager
def respondent(config: Config, inputs: Inputs, engine: Engine) -> Iterator[Respondent]:
    """An engine with what it needs to answer as the configuration says."""
    with Scorer(config.reward) as scorer:
        yield Respondent(
            engine=engine,
            tokenizer=inputs.tokenizer,
            scorer=scorer,
            seed=config.run.seed,
            sampling=SamplingParams(
                max_new_tokens=config.rollout.response_length_max,
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
                top_k=config.rollout.top_k,
                stop_token_ids=inputs.stop_token_ids,
            ),
        )


def empty_engine(config: Config, policy: MegatronPolicy) -> Engine:
    """The engine that the configuration names, without weights: the first push brings them."""
    return EmbeddedEngine(config.model.path, dtype=policy.dtype, device=policy.platform.device)


def export(policy: MegatronPolicy, destination: Path, *, like: Path) -> None:
    """Writes the weights as a Hugging Face directory; all ranks gather, the first writes."""
    if dist.get_rank() == 0:
        write_checkpoint(destination, policy.hf_tensors(), like=like)
    else:
        for _ in policy.hf_tensors():
            pass
    dist.barrier()


def _policy_and_checkpoints(
    config: Config,
    layout: Layout,
    platform: Platform,
    world: World,
    directory: RunDirectory,
) -> tuple[MegatronPolicy, CheckpointDirectory]:
    from megagspo.policy.checkpoints import CheckpointDirectory
    from megagspo.policy.policy import MegatronPolicy

    trainer = config.trainer
    updates = trainer.steps * trainer.epochs * trainer.minibatches
    policy = MegatronPolicy(config, layout, platform, total_updates=updates)
    checkpoints = CheckpointDirectory(
        directory.checkpoints, keep=config.checkpoint.keep, rank=world.rank, barrier=dist.barrier
    )
    return policy, checkpoints


def _newest(checkpoints: CheckpointDirectory, world: World) -> tuple[Path | None, dict[str, Any]]:
    """The newest whole checkpoint and what the loop saved in it; None and nothing where there is none.

    The first rank chooses for all: on a shared file system others may not see yet, or still see, what it
    sees.
    """
    chosen: list[tuple[Path | None, dict[str, Any]]] = [(None, {})]
    if world.is_first:
        newest = checkpoints.newest(warn=lambda text: print(f"warning: {text}"))
        if newest:
            chosen = [(newest.directory, newest.state())]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def _opening(config: Config, layout: Layout, platform: Platform, prompts: PromptSet, step: int) -> str:
    cuts = " ".join(
        f"{name}={size}"
        for name, size in vars(layout).items()
        if name not in ("world_size", "sequence") and size > 1
    )
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    place = f"{ranks} ({' '.join(filter(None, [platform.device.type, cuts]))})"
    data = (
        f"{len(prompts.train)} training prompts, {len(prompts.held_out)} held out, "
        f"{prompts.dropped} dropped as doubles"
    )
    where = f"continues after step {step}" if step else "starts"
    if step >= config.trainer.steps:
        where = f"has made {step} of {config.trainer.steps} steps (trainer.steps); none is left to make"
    return f"{config.run_dir} {where} on {place}; {data}"
