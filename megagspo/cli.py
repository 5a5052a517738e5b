"""The command line. Commands are thin: they check what the user wrote, then hand over.

Exit status: 0 on success, 2 on a user's mistake with one clear message, 1 on a failure. torch and Megatron
are imported only by what needs them, so that a mistake is answered at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megagspo.errors import MegagspoError, UserError, writing

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
    loaded = _run_config(config, overrides, command="train")
    if loaded and not _started_ranks(loaded):
        from megagspo.loop import train

        train(loaded)


@app.command(epilog="Example: megagspo sft configs/tiny_moe_sft_cpu.yaml trainer.steps=100")
def sft(config: ConfigFile, overrides: Overrides = None) -> None:
    """Supervised warm-up on the reference answers of data.train."""
    loaded = _run_config(config, overrides, command="sft")
    if loaded and not _started_ranks(loaded):
        from megagspo.sft import sft

        sft(loaded)


@app.command("eval", epilog="Example: megagspo eval runs/tiny_moe eval.samples=4 --json scores.json")
def evaluate(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR|HF_DIR|CONFIG",
            help="The directory of a run, a Hugging Face directory, or a YAML file.",
        ),
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Says on what a directory's model is evaluated; by default its run."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the scores to this file.")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Show so many answers.")] = 0,
) -> None:
    """avg@k, unbiased pass@k and maj@k on the held-out prompts of data.eval, k = eval.samples.

    Of a run, the exported model (RUN_DIR/hf) is scored; a Hugging Face directory, with the configuration
    of the run it is in (HF_DIR/../config.yaml) or that of --config; of a configuration, the model at
    model.path. Runs in one process, whatever `parallel` says.
    """
    from megagspo.launcher.preflight import check_writable, evaluation_config

    loaded = evaluation_config(target, overrides or [], file=config)
    if json_file:
        check_writable(json_file)
    from megagspo.evaluate import evaluate

    found = evaluate(loaded)
    console = Console(highlight=False)
    console.print(found.heading(), markup=False, soft_wrap=True)
    console.print(found.table())
    for sample in found.samples[:show]:
        mark = "right" if sample.reward >= found.solved else "wrong"
        console.print(f"{sample.prompt.text.strip()}  ->  {sample.text.strip()}  ({mark})", markup=False)
    if json_file:
        _write_json(json_file, found.as_json(), then="evaluate again")


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


@app.command(epilog="Example: megagspo report runs/demo --output demo.html")
def report(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run, ended or not.")
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it; RUN_DIR/report.html by default.")
    ] = None,
) -> None:
    """One self-contained HTML page about a run: charts, answers, configuration."""
    from megagspo.observe.report import write_report

    print(f"wrote {write_report(directory, output=output)}")


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
        _write_json(json_file, [as_json(result) for result in results], then="run them again")
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
        table.add_row(finding.what, {True: "yes", False: "no"}[finding.works], escape(finding.detail))
    Console(highlight=False).print(table)


def _write_json(file: Path, content: Any, *, then: str) -> None:
    with writing(file, elsewhere="name another file with --json", then=then):
        file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _run_config(
    file: Path, overrides: list[str] | None, *, command: Literal["train", "sft"]
) -> Config | None:
    """The configuration of a run, checked; None, with a line that says why, where there is nothing to do."""
    from megagspo.launcher.preflight import nothing_to_do, run_config

    config = run_config(file, overrides or [], command=command)
    line = nothing_to_do(config)
    if line:
        print(line)
        return None
    return config


def _started_ranks(config: Config) -> bool:
    """Starts the ranks of this very command where it was started alone and the layout needs several; exits
    with their status."""
    from megagspo.launcher.local import run_ranks
    from megagspo.launcher.preflight import world_size
    from megagspo.observe.run_directory import RunDirectory

    ranks = config.parallel.resolve(world_size()).world_size
    if world_size() is not None or ranks == 1:
        return False
    directory = RunDirectory(config.run_dir)
    threads = config.platform.threads_per_rank
    status = run_ranks(sys.argv[1:], ranks=ranks, threads=threads, directory=directory)
    if status:
        raise typer.Exit(status)
    return True


def main() -> None:
    """Runs the command line and exits with its status."""
    try:
        app()
    except MegagspoError as error:
        if isinstance(error, UserError):
            from megagspo.launcher.local import yield_to_first_rank

            yield_to_first_rank()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
