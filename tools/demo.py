"""The main job from nothing, on a CPU: what `make demo` runs. `python tools/demo.py --help`

Makes a tiny Qwen3-MoE, warms it up, trains it with GSPO on two ranks with expert parallelism, and measures
what that brought on held-out problems. Each part is a command that can be run alone; they are printed as they
are started.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CONFIG, WARM_UP = "configs/tiny_moe_cpu.yaml", "configs/tiny_moe_sft_cpu.yaml"
console = Console(highlight=False)


def main() -> None:
    arguments = _arguments()
    runs = Path(arguments.runs)
    initial, warm, trained = runs / "tiny_moe_init", runs / "tiny_moe_warm", runs / "demo"
    for directory in (initial, warm, trained):
        shutil.rmtree(directory, ignore_errors=True)
    seed = f"run.seed={arguments.seed}"
    began = time.perf_counter()

    _part("1. A tiny Qwen3-MoE with random weights")
    _command(sys.executable, "tools/make_tiny_moe.py", initial, "--seed", arguments.seed)

    _part("2. Supervised warm-up: it imitates a teacher that is often wrong")
    demonstrations = initial / "demonstrations.jsonl"
    _command(sys.executable, "tools/make_demonstrations.py", CONFIG, demonstrations, "--seed", arguments.seed)
    source = f"data.train.0.jsonl={demonstrations}"
    _megagspo("sft", WARM_UP, f"run.dir={runs}", f"model.path={initial}", source, seed)
    before = _evaluate(CONFIG, f"model.path={warm / 'hf'}", seed, scores=warm / "held_out.json")

    _part("3. GSPO on two ranks, the experts divided between them")
    _megagspo("train", CONFIG, f"run.dir={runs}", "run.name=demo", f"model.path={warm / 'hf'}", seed)

    _part("4. The exported model on held-out problems")
    after = _evaluate(trained, seed, scores=trained / "held_out.json")
    # What the run started from: the report shows it beside what came of it.
    shutil.copyfile(ROOT / warm / "held_out.json", ROOT / trained / "held_out_before.json")
    _show_answers(trained / "hf")

    _part("5. A page about the run")
    _megagspo("report", trained)

    minutes = (time.perf_counter() - began) / 60
    _summary(trained / "metrics.jsonl", minutes)
    print(f"held-out avg@1: before {before:.2f} after {after:.2f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: python tools/demo.py --seed 1 --runs /tmp/demo. "
        "It replaces tiny_moe_init, tiny_moe_warm and demo in RUNS.",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the runs (default 0)")
    parser.add_argument("--runs", default="runs", help="where to put everything (default runs)")
    return parser.parse_args()


def _part(title: str) -> None:
    console.print(f"\n[bold]{title}[/bold]")


def _megagspo(*words: object) -> None:
    _command(sys.executable, "-m", "megagspo", *words, shown=("megagspo", *words))


def _command(*words: object, shown: tuple[object, ...] | None = None) -> None:
    """Runs a command from the repository's root; a failure ends the demo with the command's own status."""
    console.print("$ " + " ".join(map(str, shown or words)), style="dim", markup=False, soft_wrap=True)
    status = subprocess.run([str(word) for word in words], cwd=ROOT, check=False).returncode
    if status:
        sys.exit(status)


def _evaluate(target: object, *overrides: object, scores: Path) -> float:
    _megagspo("eval", target, *overrides, "--json", scores)
    return json.loads((ROOT / scores).read_text())["avg@1"]


def _show_answers(export: Path) -> None:
    """The export in plain transformers, without a line of megagspo."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(ROOT / export)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / export)
    greedy = GenerationConfig(
        max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=tokenizer.eos_token_id
    )
    console.print(f"\n{export} in plain transformers:")
    for question in ("Calculate 17 + 25.", "Calculate 48 + 36.", "Calculate 99 + 11.", "Calculate 63 + 58."):
        prompt = tokenizer(question + "\n", return_tensors="pt", add_special_tokens=False)
        output = model.generate(
            prompt["input_ids"], attention_mask=prompt["attention_mask"], generation_config=greedy
        )
        answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        console.print(f"  {question}  ->  {answer}", markup=False)


def _summary(metrics: Path, minutes: float) -> None:
    records = [json.loads(line) for line in (ROOT / metrics).read_text().splitlines()]
    table = Table(title=f"GSPO, {len(records)} steps; the whole demo took {minutes:.1f} minutes")
    columns = {
        "step": ("step", "{:d}"),
        "reward": ("reward/mean", "{:.3f}"),
        "clipped": ("policy/clip_fraction", "{:.2f}"),
        "entropy": ("policy/entropy", "{:.2f}"),
        "mismatch": ("mismatch/logprob_abs_mean", "{:.0e}"),
        "time": ("time/step", "{:.2f} s"),
    }
    for title in columns:
        table.add_column(title, justify="right")
    for record in [*records[:: max(1, len(records) // 8)], records[-1]]:
        table.add_row(*(form.format(record[name]) for name, form in columns.values()))
    console.print(table)


if __name__ == "__main__":
    main()
