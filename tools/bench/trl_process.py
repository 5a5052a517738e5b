"""TRL's side of peer_trl.py: GRPOTrainer on the job given as JSON, a line in OUTPUT/batches as each batch
begins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class BatchClock(TrainerCallback):
    """Files a line when an optimizer step begins that is the first of its batch, and at the end."""

    def __init__(self, file: Path, *, steps_per_batch: int) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._steps_per_batch = steps_per_batch

    def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._steps_per_batch == 0:
            self._line()

    def on_train_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        self._line()

    def _line(self) -> None:
        with self._file.open("a") as file:
            file.write("batch\n")


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the reference answer, else 0: our `exact` reward."""
    return [float(text.strip() == right.strip()) for text, right in zip(completions, answer, strict=True)]


def main() -> None:
    job = json.loads(sys.argv[1])
    settings = GRPOConfig(
        output_dir=job["output"],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=job["samples"] // job["minibatches"],
        steps_per_generation=job["minibatches"],
        gradient_accumulation_steps=1,
        max_steps=job["batches"] * job["minibatches"],
        num_generations=job["responses"],
        max_completion_length=job["new_tokens"],
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        gradient_checkpointing=job["gradient_checkpointing"],
        save_strategy="no",
        report_to=[],
        logging_steps=job["minibatches"],
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        reward_funcs=exact,
        args=settings,
        train_dataset=load_dataset("json", data_files=job["data"], split="train"),
        callbacks=[BatchClock(Path(job["output"]) / "batches", steps_per_batch=job["minibatches"])],
    )
    trainer.train()


if __name__ == "__main__":
    main()
