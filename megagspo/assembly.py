"""Builds the parts of a run from its configuration and takes them down again. What they do together is
`loop.py`'s matter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from megagspo.config import Config, Layout, dump_config
from megagspo.convert.safetensors_io import write_checkpoint
from megagspo.data import PromptSet, PromptStream, load_prompts
from megagspo.errors import ConfigError, ModelError
from megagspo.model.architecture import Architecture, read_architecture
from megagspo.observe.metrics import MetricsLog
from megagspo.observe.progress import ProgressDisplay, step_line
from megagspo.observe.run_directory import RunDirectory
from megagspo.platform.device import Platform, pick_platform
from megagspo.platform.distributed import process_groups
from megagspo.platform.world import ALONE, World, launched_world
from megagspo.reward.scoring import Scorer
from megagspo.rollout.embedded.engine import EmbeddedEngine
from megagspo.rollout.store import read_samples, step_file, write_samples
from megagspo.sync.in_process import PushReport, push
from megagspo.sync.probe import Probe
from megagspo.types import Engine, Sample, SamplingParams, TrainSequence

if TYPE_CHECKING:  # importing Megatron before the platform is picked would bypass platform/cpu.py
    from megagspo.policy.checkpoints import CheckpointDirectory
    from megagspo.policy.policy import MegatronPolicy


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
    layout: Layout
    world: World
    directory: RunDirectory
    prompts: PromptSet
    stream: PromptStream
    tokenizer: Any
    policy: MegatronPolicy
    checkpoints: CheckpointDirectory
    metrics: MetricsLog | None  # on the first rank
    progress: ProgressDisplay
    step: int

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
        """Files what the step learned from, to be read and to be replayed."""
        if self.world.is_first:
            write_samples(
                step_file(self.directory.rollouts, self.step), samples, self.step, self.policy.version
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
            state = {"step": self.step, "prompts": self.stream.state_dict()}
            self.checkpoints.save(self.step, self.policy.save, state)

    def export_when_asked(self) -> None:
        """The Hugging Face directory of the final weights, `runs/NAME/hf`."""
        if self.config.checkpoint.save_hf:
            self.progress.stage("exporting")
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
def assemble(config: Config, *, updates_per_step: int) -> Iterator[Run]:
    """All parts of a run, at the step it has reached: a run that has a checkpoint continues from the newest
    whole one."""
    world = launched_world() or ALONE
    layout = config.parallel.resolve(world.size)
    platform = pick_platform(
        config.platform.device, local_rank=world.local_rank, threads=config.platform.threads_per_rank
    )
    directory = RunDirectory(config.run_dir)
    with ExitStack() as stack:
        if world.is_first:
            stack.enter_context(directory.locked())
        tokenizer = load_tokenizer(config.model.path)
        prompts = load_prompts(config.data, tokenizer)
        check_lengths(config, read_architecture(config.model.path), prompts)
        stack.enter_context(process_groups(layout, platform, world, seed=config.run.seed))
        policy, checkpoints, state = _policy_at_its_step(
            config, layout, platform, world, directory, updates_per_step
        )
        stream = PromptStream(prompts.train, seed=config.run.seed)
        step = state["step"] if state else 0
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
        progress.line(_opening(config, layout, platform, prompts, step))
        changed = directory.remember(dump_config(config)) if world.is_first else []
        for change in changed if step else ():
            progress.line(f"warning: since this run was last started, {change}")
        yield Run(
            config=config,
            layout=layout,
            world=world,
            directory=directory,
            prompts=prompts,
            stream=stream,
            tokenizer=tokenizer,
            policy=policy,
            checkpoints=checkpoints,
            metrics=metrics,
            progress=progress,
            step=step,
        )


@contextmanager
def respondent(config: Config, tokenizer: Any, engine: Engine) -> Iterator[Respondent]:
    """An engine with what it needs to answer as the configuration says."""
    with Scorer(config.reward) as scorer:
        yield Respondent(
            engine=engine,
            tokenizer=tokenizer,
            scorer=scorer,
            seed=config.run.seed,
            sampling=SamplingParams(
                max_new_tokens=config.rollout.response_length_max,
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
                top_k=config.rollout.top_k,
                stop_token_ids=config.rollout.stop_ids or stop_token_ids(config.model.path, tokenizer),
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


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a Hugging Face directory. Raises ModelError when it does not fit the model's
    vocabulary."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_path} holds no tokenizer that transformers can load: {error}") from error
    vocab_size = read_architecture(model_path).vocab_size
    if len(tokenizer) > vocab_size:
        raise ModelError(
            f"{model_path}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {vocab_size}: "
            "they do not belong together"
        )
    return tokenizer


def stop_token_ids(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a response: those of generation_config.json (it may list several), else the
    tokenizer's own."""
    file = Path(model_path) / "generation_config.json"
    try:
        ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    except (json.JSONDecodeError, AttributeError) as error:
        raise ModelError(f"{file} is not a JSON object: {error}") from error
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ConfigError(f"{model_path} names no end-of-sequence token: give rollout.stop_ids")
    return tuple(ids) if isinstance(ids, list) else (ids,)


def check_lengths(config: Config, architecture: Architecture, prompts: PromptSet) -> None:
    """Raises ConfigError when the longest prompt and response together pass what the model or a micro-batch
    holds."""
    longest = max((*prompts.train, *prompts.held_out), key=lambda prompt: len(prompt.token_ids))
    total = len(longest.token_ids) + config.rollout.response_length_max
    for limit, name in (
        (architecture.max_positions, "the model's max_position_embeddings"),
        (config.trainer.tokens_per_microbatch, "trainer.tokens_per_microbatch"),
    ):
        if total > limit:
            raise ConfigError(
                f"prompt {longest.id} has {len(longest.token_ids)} tokens, which with "
                f"rollout.response_length_max={config.rollout.response_length_max} makes {total}, "
                f"more than {name} ({limit}): "
                "lower rollout.response_length_max or drop long prompts"
            )


def _policy_at_its_step(
    config: Config,
    layout: Layout,
    platform: Platform,
    world: World,
    directory: RunDirectory,
    updates_per_step: int,
) -> tuple[MegatronPolicy, CheckpointDirectory, dict[str, Any] | None]:
    """The policy, continued from the newest whole checkpoint where there is one."""
    from megagspo.policy.checkpoints import CheckpointDirectory
    from megagspo.policy.policy import MegatronPolicy

    policy = MegatronPolicy(config, layout, platform, total_updates=config.trainer.steps * updates_per_step)
    checkpoints = CheckpointDirectory(
        directory.checkpoints, keep=config.checkpoint.keep, rank=world.rank, barrier=dist.barrier
    )
    newest = checkpoints.newest(warn=lambda text: print(f"warning: {text}") if world.is_first else None)
    if newest is None:
        return policy, checkpoints, None
    policy.load(newest.directory)
    return policy, checkpoints, newest.state()


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
        where = f"has made its {config.trainer.steps} steps (trainer.steps); nothing is left to do"
    return f"{config.run_dir} {where} on {place}; {data}"
