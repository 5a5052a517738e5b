"""The command line. Commands are thin: they check what the user wrote, then hand over.

Exit status: 0 on success, 2 on a user's mistake with one clear message, 1 on a failure. torch and Megatron
are imported only by what needs them, so that a mistake is answered at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megagspo.errors import MegagspoError, MissingError

if TYPE_CHECKING:
    from megagspo.config import Config

app = typer.Typer(
    name="megagspo",
    help="Reinforcement learning for Mixture-of-Experts language models at Megatron scale.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
convert = typer.Typer(help="Hugging Face checkpoints to Megatron's and back.", no_args_is_help=True)
app.add_typer(convert, name="convert")

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML file, see megagspo/config/README.md.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="section.key=value ...", help="Values that replace the file's.")
]


@app.command(epilog="Example: megagspo train configs/tiny_moe_cpu.yaml run.name=mine trainer.steps=20")
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Reinforcement learning. Starts its own ranks where the layout needs several; joins under torchrun or
    srun."""
    loaded = _checked(config, overrides)
    if not _started_ranks(loaded):
        from megagspo.loop import train

        train(loaded)


@app.command(epilog="Example: megagspo sft configs/tiny_moe_sft_cpu.yaml trainer.steps=100")
def sft(config: ConfigFile, overrides: Overrides = None) -> None:
    """Supervised warm-up on the reference answers of data.train."""
    loaded = _checked(config, overrides)
    if not _started_ranks(loaded):
        from megagspo.sft import sft

        sft(loaded)


@app.command("eval", epilog="Example: megagspo eval runs/tiny_moe eval.samples=4 --json scores.json")
def evaluate(
    target: Annotated[
        Path, typer.Argument(metavar="CONFIG|RUN_DIR", help="A YAML file, or the directory of a run.")
    ],
    overrides: Overrides = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the scores to this file.")
    ] = None,
    show: Annotated[int, typer.Option(help="Show so many answers.")] = 0,
) -> None:
    """avg@k and unbiased pass@k on the held-out prompts of data.eval, k = eval.samples.

    Of a run, the exported model (RUN_DIR/hf) is scored; of a configuration, the model at model.path.
    """
    loaded = _evaluated(target, overrides or [])
    from megagspo.evaluate import evaluate
    from megagspo.measure import full_reward

    scores, samples = evaluate(loaded)
    table = Table(title=f"{loaded.model.path}: {len({s.group for s in samples})} held-out prompts")
    for name in scores:
        table.add_column(name, justify="right")
    table.add_row(*(f"{value:.3f}" for value in scores.values()))
    console = Console(highlight=False)
    console.print(table)
    for sample in samples[:show]:
        mark = "right" if sample.reward >= full_reward(loaded.reward) else "wrong"
        console.print(f"{sample.prompt.text.strip()}  ->  {sample.text.strip()}  ({mark})", markup=False)
    if json_file:
        _write_json(json_file, {"model": loaded.model.path, **scores})


@convert.command(
    "hf-to-megatron", epilog="Example: megagspo convert hf-to-megatron runs/tiny_moe/hf /tmp/megatron"
)
def hf_to_megatron(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A Hugging Face directory.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="The checkpoint to write; must not exist.")
    ],
) -> None:
    """A Megatron distributed checkpoint of the weights, which every parallel layout can load
    (model.checkpoint)."""
    from megagspo.conversion import hf_to_megatron

    hf_to_megatron(source, destination)
    print(f"wrote {destination}")


@convert.command("megatron-to-hf", epilog="Example: megagspo convert megatron-to-hf /tmp/megatron /tmp/hf")
def megatron_to_hf(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A Megatron checkpoint, also one of a run.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="The directory to write; must not exist.")
    ],
    like: Annotated[
        Path | None, typer.Option(help="Take config and tokenizer from this Hugging Face directory.")
    ] = None,
) -> None:
    """A Hugging Face directory of a Megatron checkpoint; config and tokenizer are carried over unchanged."""
    from megagspo.conversion import megatron_to_hf

    megatron_to_hf(source, destination, like=like)
    print(f"wrote {destination}")


@convert.command(epilog="Example: megagspo convert verify runs/tiny_moe/hf /tmp/hf")
def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="A Hugging Face directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
) -> None:
    """Compares names, shapes, dtypes, values, config and tokenizer files; exits 1 and lists the first
    differences."""
    from megagspo.convert.verify import differences

    found = differences(a, b)
    if found:
        print("\n".join(found))
        raise typer.Exit(1)
    print(f"{a} and {b} are the same")


@app.command(epilog="Example: megagspo conformance --vectors mine.json --json results.json")
def conformance(
    vectors: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file of vectors, or a directory of them; left out: megagspo's."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write what came of each vector to this file.")
    ] = None,
) -> None:
    """The objectives against reference vectors, see tests/conformance/README.md; exits 1 when one fails."""
    from megagspo.conformance.comparison import as_json, run_vectors
    from megagspo.conformance.vectors import read_vectors, shipped_vectors

    results = run_vectors(read_vectors(vectors or shipped_vectors()))
    if json_file:
        _write_json(json_file, [as_json(result) for result in results])
    failed = [result for result in results if result.wrong]
    table = Table(title=f"{len(results) - len(failed)} of {len(results)} vectors pass")
    for heading in ("vector", "objective", "", "where it differs"):
        table.add_column(heading)
    for result in results:
        name = str(result.vector.algorithm.get("name", "gspo"))
        wrong = "\n".join(result.wrong[:3])
        table.add_row(result.vector.name, name, "FAIL" if result.wrong else "pass", wrong)
    Console(highlight=False, markup=False).print(table)
    if failed:
        raise typer.Exit(1)


@app.command(epilog="Example: megagspo doctor")
def doctor() -> None:
    """Versions, devices, what works on this machine, what is missing and how to get it."""
    from megagspo.doctor import findings

    table = Table(show_header=False)
    for finding in findings():
        table.add_row(finding.what, {True: "yes", False: "no"}[finding.works], finding.detail)
    Console(highlight=False).print(table)


def _write_json(file: Path, content: Any) -> None:
    try:
        file.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise MissingError(f"--json: cannot write {file}: {error.strerror}: name another file") from error


def _checked(file: Path, overrides: list[str] | None) -> Config:
    """The configuration, with every check that needs neither torch nor Megatron; warnings are shown once."""
    from megagspo.config import check_config, check_paths, load_config
    from megagspo.launcher.local import LAUNCHED
    from megagspo.model.architecture import check_divides, read_architecture

    config = load_config(file, overrides or [])
    warnings = check_config(config)
    check_paths(config)
    check_divides(read_architecture(config.model.path), config.parallel.resolve(_world_size()))
    if os.environ.get("RANK", "0") == "0" and LAUNCHED not in os.environ:
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
    return config


def _world_size() -> int | None:
    from megagspo.platform.world import launched_world

    world = launched_world()
    return world.size if world else None


def _started_ranks(config: Config) -> bool:
    """Starts the ranks of this very command where it was started alone and the layout needs several; exits
    with their status."""
    from megagspo.launcher.local import run_ranks

    ranks = config.parallel.resolve(_world_size()).world_size
    if _world_size() is not None or ranks == 1:
        return False
    logs = config.run_dir / "logs"
    status = run_ranks(sys.argv[1:], ranks=ranks, threads=config.platform.threads_per_rank, logs=logs)
    if status:
        raise typer.Exit(status)
    return True


def _evaluated(target: Path, overrides: list[str]) -> Config:
    """The configuration to evaluate: a file's, or that of a run with its exported model."""
    from megagspo.config import check_paths, load_config

    if target.is_dir():
        if not (target / "config.yaml").is_file():
            raise MissingError(f"{target} is not the directory of a run: it has no config.yaml")
        if not (target / "hf").is_dir():
            raise MissingError(
                f"{target}/hf does not exist: the run exports it at its end with checkpoint.save_hf=true"
            )
        overrides = [f"model.path={target / 'hf'}", *overrides]
        target = target / "config.yaml"
    config = load_config(target, overrides)
    check_paths(config)
    return config


def main() -> None:
    """Runs the command line and exits with its status."""
    try:
        app()
    except MegagspoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
