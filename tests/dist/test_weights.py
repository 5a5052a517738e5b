"""Weights and optimizer state keep their bits on every way: Hugging Face files, streams, checkpoints of
any layout."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megagspo.convert.safetensors_io import HfCheckpoint, write_checkpoint
from tests.dist.harness import RankFailure, RankPool
from tests.dist.learner import make_policy, update, weights_of

LAYOUTS: dict[str, dict[str, int]] = {
    "one_rank": {},
    "ep2": {"expert": 2},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "tp2_ep2_pp2": {"tensor": 2, "expert": 2, "pipeline": 2},
}
MORE_LAYOUTS = {
    **LAYOUTS,
    "tp2_ep2_etp2": {"tensor": 2, "expert": 2, "expert_tensor": 2},
    "ep4": {"expert": 4},
    "dp2": {"data": 2},
    "cp2": {"context": 2},
    "pp2_vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "pp2_vpp2_ep2": {"pipeline": 2, "virtual_pipeline": 2, "expert": 2},
}

# Large steps, so that a lost moment shows: without bias correction's step number or the moments the next
# update is several times as large. The rate falls with each update, so that a lost position shows as
# well.
OPTIMIZER: dict[str, Any] = {
    "lr": 1e-2,
    "lr_min": 0.0,
    "schedule": "linear",
    "eps": 1e-2,
    "weight_decay": 0.1,
}


def stream(layout: Any, platform: Any, model: Path, bucket_bytes: int) -> dict[str, Tensor]:
    return weights_of(make_policy(layout, platform, model, sync={"bucket_bytes": bucket_bytes}))


def names_in_order(layout: Any, platform: Any, model: Path) -> list[str]:
    return [name for name, _ in make_policy(layout, platform, model).hf_tensors()]


def train_and_save(
    layout: Any,
    platform: Any,
    model: Path,
    directory: Path,
    updates: int,
    distributed: bool,
    dtype: str,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """Weights when saved; weights and report one update later, without a break."""
    policy = _policy(layout, platform, model, distributed, dtype)
    for seed in range(updates):
        update(policy, seed=seed)
    policy.version = 7
    policy.save(directory)
    saved = weights_of(policy)
    report = update(policy, seed=99)
    return saved, weights_of(policy), report


def train_on(
    layout: Any, platform: Any, model: Path, updates: int, distributed: bool, dtype: str
) -> dict[str, Tensor]:
    """The same updates, never saved."""
    policy = _policy(layout, platform, model, distributed, dtype)
    for seed in [*range(updates), 99]:
        update(policy, seed=seed)
    return weights_of(policy)


def load_and_train(
    layout: Any, platform: Any, model: Path, directory: Path, distributed: bool, dtype: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float], tuple[int, int]]:
    policy = _policy(layout, platform, model, distributed, dtype)
    policy.load(directory)
    counters = (policy.version, policy.updates)
    loaded = weights_of(policy)
    report = update(policy, seed=99)
    return loaded, weights_of(policy), report, counters


def load_twice(
    layout: Any, platform: Any, model: Path, directory: Path, distributed: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights one update after a load into a policy that has trained elsewhere, and after another load of
    the same."""
    policy = _policy(layout, platform, model, distributed, "float32")
    results = []
    for seed in (5, 6):
        update(policy, seed=seed)
        policy.load(directory)
        update(policy, seed=99)
        results.append(weights_of(policy))
    return results[0], results[1]


def weights_from_checkpoint(layout: Any, platform: Any, model: Path, directory: Path) -> dict[str, Tensor]:
    return weights_of(make_policy(layout, platform, model, model={"checkpoint": str(directory)}))


def _policy(layout: Any, platform: Any, model: Path, distributed: bool, dtype: str) -> Any:
    return make_policy(
        layout,
        platform,
        model,
        model={"dtype": dtype},
        trainer={"distributed_optimizer": distributed, "tokens_per_microbatch": 48},
        optimizer=OPTIMIZER,
    )


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert list(actual) == list(expected)
    worst = {name: float((actual[name] - expected[name]).abs().max()) for name in expected}
    assert max(worst.values()) <= tolerance, max(worst, key=lambda name: worst[name])


# --- Hugging Face -> Megatron -> Hugging Face
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_export_is_bit_equal_to_what_was_imported_in_every_layout(
    ranks: RankPool, moe_dir: Path, layout: str
) -> None:
    source = HfCheckpoint(moe_dir)
    for exported in ranks.run(stream, moe_dir, 1 << 20, **MORE_LAYOUTS[layout]):
        assert set(exported) == set(source)
        assert_equal(dict(sorted(exported.items())), {name: source[name] for name in sorted(source)})


@pytest.mark.parametrize("layout", ["one_rank", "tp2", "pp2", "pp2_vpp2"])
@pytest.mark.parametrize("model", ["dense_dir", "tied_dir"])
def test_export_of_a_dense_model_is_bit_equal(
    ranks: RankPool, request: pytest.FixtureRequest, model: str, layout: str
) -> None:
    directory = request.getfixturevalue(model)
    source = HfCheckpoint(directory)
    for exported in ranks.run(stream, directory, 1 << 20, **MORE_LAYOUTS[layout]):
        assert_equal(dict(sorted(exported.items())), {name: source[name] for name in sorted(source)})


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 30])
def test_bucket_size_changes_nothing(ranks: RankPool, moe_dir: Path, bucket_bytes: int) -> None:
    """One parameter a bucket, several, all."""
    source = HfCheckpoint(moe_dir)
    for exported in ranks.run(stream, moe_dir, bucket_bytes, **LAYOUTS["tp2_ep2_pp2"]):
        assert_equal(dict(sorted(exported.items())), {name: source[name] for name in sorted(source)})


def test_order_of_the_stream_does_not_depend_on_the_layout(ranks: RankPool, moe_dir: Path) -> None:
    orders = [order for sizes in LAYOUTS.values() for order in ranks.run(names_in_order, moe_dir, **sizes)]
    assert all(order == orders[0] for order in orders)
    assert len(set(orders[0])) == len(orders[0])


def test_missing_and_surplus_tensors_are_all_named(ranks: RankPool, moe_dir: Path, tmp_path: Path) -> None:
    source = HfCheckpoint(moe_dir)
    lost = {
        "model.layers.1.mlp.gate.weight",
        "model.layers.3.mlp.experts.2.up_proj.weight",
        "lm_head.weight",
    }
    added = {"model.layers.4.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"}
    tensors = {name: source[name] for name in source if name not in lost} | dict.fromkeys(
        added, torch.ones(3)
    )
    write_checkpoint(tmp_path / "changed", tensors.items(), like=moe_dir)
    with pytest.raises(RankFailure) as caught:
        ranks.run(stream, tmp_path / "changed", 1 << 20)
    for name in lost | added:
        assert name in str(caught.value)


def test_wrong_shape_names_the_tensor(ranks: RankPool, moe_dir: Path, tmp_path: Path) -> None:
    source = HfCheckpoint(moe_dir)
    name = "model.layers.2.self_attn.o_proj.weight"
    tensors = {key: source[key] for key in source} | {name: torch.zeros(3, 3)}
    write_checkpoint(tmp_path / "changed", tensors.items(), like=moe_dir)
    with pytest.raises(RankFailure, match=name):
        ranks.run(stream, tmp_path / "changed", 1 << 20)


# --- checkpoints
# --------------------------------------------------------------------------------------------------------

Saved = tuple[Path, dict[str, Tensor], dict[str, Tensor], dict[str, float]]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """A checkpoint after two updates in a layout, made once: its directory, weights, and what came one
    update later."""
    made: dict[Any, Saved] = {}

    def save(layout: str, *, distributed: bool = True) -> Saved:
        if (layout, distributed) not in made:
            directory = tmp_path_factory.mktemp("checkpoint")
            result = ranks.run(
                train_and_save,
                moe_dir,
                directory,
                2,
                distributed,
                "float32",
                **MORE_LAYOUTS[layout],
            )[0]
            made[layout, distributed] = (directory, *result)
        return made[layout, distributed]

    return save


# The update after the load sees gradients that agree to 1e-5 of the clipped norm of 1 between layouts
# (test_layouts.py) and turns a difference into lr / eps = 1 times itself. Moments lost instead would move
# a weight by lr = 1e-2.
ACROSS_LAYOUTS = 1e-5


@pytest.mark.parametrize(("source", "target"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_checkpoint_of_any_layout_continues_in_any_other(
    ranks: RankPool, moe_dir: Path, saved: Callable[..., Saved], source: str, target: str
) -> None:
    directory, weights, later, report = saved(source)
    for loaded, continued, new_report, counters in ranks.run(
        load_and_train, moe_dir, directory, True, "float32", **LAYOUTS[target]
    ):
        assert_equal(loaded, weights)
        assert counters == (7, 2)
        assert new_report["lr"] == report["lr"] < OPTIMIZER["lr"]
        assert_close(continued, later, 0.0 if source == target else ACROSS_LAYOUTS)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("pp2_vpp2", "pp2_vpp2"),
        ("pp2_vpp2", "pp2"),
        ("pp2", "pp2_vpp2_ep2"),
        ("pp2_vpp2_ep2", "one_rank"),
        ("one_rank", "pp2_vpp2"),
        ("cp2", "tp2_ep2_pp2"),
        ("ep2", "cp2"),
    ],
)
def test_checkpoint_continues_across_pipeline_chunks_and_context_ranks(
    ranks: RankPool, moe_dir: Path, saved: Callable[..., Saved], source: str, target: str
) -> None:
    directory, weights, later, _ = saved(source)
    for loaded, continued, _, counters in ranks.run(
        load_and_train, moe_dir, directory, True, "float32", **MORE_LAYOUTS[target]
    ):
        assert_equal(loaded, weights)
        assert counters == (7, 2)
        assert_close(continued, later, 0.0 if source == target else ACROSS_LAYOUTS)


@pytest.mark.parametrize(
    ("source", "distributed", "target"),
    [
        ("dp2", True, "dp2"),
        ("dp2", False, "dp2"),
        ("ep2", True, "tp2"),
        ("ep2", False, "tp2"),
        ("tp2", False, "one_rank"),
        ("one_rank", True, "tp2_ep2_pp2"),
        ("tp2_ep2_pp2", False, "ep2"),
        ("tp2_ep2_etp2", True, "ep4"),
        ("pp2_vpp2", True, "ep2"),
        ("tp2_ep2_pp2", False, "pp2_vpp2_ep2"),
        ("cp2", False, "dp2"),
    ],
)
def test_distributed_optimizer_may_be_switched_on_or_off_by_a_resumed_run(
    ranks: RankPool,
    moe_dir: Path,
    saved: Callable[..., Saved],
    source: str,
    distributed: bool,
    target: str,
) -> None:
    directory, weights, later, _ = saved(source, distributed=distributed)
    for loaded, continued, _, _ in ranks.run(
        load_and_train, moe_dir, directory, not distributed, "float32", **MORE_LAYOUTS[target]
    ):
        assert_equal(loaded, weights)
        assert_close(continued, later, ACROSS_LAYOUTS)


@pytest.mark.parametrize("layout", ["one_rank", "dp2", "tp2_ep2_pp2"])
@pytest.mark.parametrize("distributed", [True, False])
def test_resumed_run_is_bit_equal_to_one_never_interrupted(
    ranks: RankPool, moe_dir: Path, saved: Callable[..., Saved], layout: str, distributed: bool
) -> None:
    directory, _, later, _ = saved(layout, distributed=distributed)
    never_saved = ranks.run(train_on, moe_dir, 2, distributed, "float32", **MORE_LAYOUTS[layout])
    resumed = ranks.run(load_and_train, moe_dir, directory, distributed, "float32", **MORE_LAYOUTS[layout])
    for expected, (_, continued, _, _) in zip(never_saved, resumed, strict=True):
        assert_equal(later, expected)
        assert_equal(continued, expected)


@pytest.mark.parametrize("layout", ["one_rank", "ep2"])
@pytest.mark.parametrize("distributed", [True, False])
def test_checkpoint_before_the_first_update_changes_nothing(
    ranks: RankPool, moe_dir: Path, tmp_path: Path, layout: str, distributed: bool
) -> None:
    settings = (distributed, "float32")
    never_saved = ranks.run(train_on, moe_dir, 0, *settings, **LAYOUTS[layout])[0]
    _, later, _ = ranks.run(train_and_save, moe_dir, tmp_path, 0, *settings, **LAYOUTS[layout])[0]
    assert_equal(later, never_saved)
    _, continued, _, _ = ranks.run(load_and_train, moe_dir, tmp_path, *settings, **LAYOUTS[layout])[0]
    assert_equal(continued, never_saved)


@pytest.mark.parametrize("distributed", [True, False])
def test_load_replaces_whatever_state_was_there(
    ranks: RankPool, moe_dir: Path, saved: Callable[..., Saved], distributed: bool
) -> None:
    directory, _, later, _ = saved("ep2", distributed=distributed)
    for first, second in ranks.run(load_twice, moe_dir, directory, distributed, **LAYOUTS["ep2"]):
        assert_equal(first, later)
        assert_equal(second, later)


@pytest.mark.parametrize(
    ("layers", "sizes", "distributed"),
    [
        (2, {"data": 2}, True),
        (2, {"data": 2}, False),
        (2, {"context": 2}, True),
        (4, {"pipeline": 2, "virtual_pipeline": 2}, True),
    ],
)
def test_bfloat16_run_resumes_bit_equal(
    ranks: RankPool,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    layers: int,
    sizes: dict[str, int],
    distributed: bool,
) -> None:
    """The float32 masters carry what bfloat16 weights round away: they are part of the checkpoint."""
    from tests.dist.models import make_moe

    model = make_moe(tmp_path_factory.mktemp("models") / "layers", num_hidden_layers=layers)
    settings = (distributed, "bfloat16")
    never_saved = ranks.run(train_on, model, 2, *settings, **sizes)
    saved_weights, later, _ = ranks.run(train_and_save, model, tmp_path, 2, *settings, **sizes)[0]
    resumed = ranks.run(load_and_train, model, tmp_path, *settings, **sizes)
    assert any(tensor.dtype == torch.bfloat16 for tensor in saved_weights.values())
    for expected, (loaded, continued, _, _) in zip(never_saved, resumed, strict=True):
        assert_equal(loaded, saved_weights)
        assert_equal(later, expected)
        assert_equal(continued, expected)


@pytest.mark.parametrize("layout", ["one_rank", "tp2_ep2_pp2"])
def test_weights_alone_may_come_from_a_checkpoint_with_optimizer_state(
    ranks: RankPool, moe_dir: Path, saved: Callable[..., Saved], layout: str
) -> None:
    directory, weights, _, _ = saved("tp2")
    for loaded in ranks.run(weights_from_checkpoint, moe_dir, directory, **LAYOUTS[layout]):
        assert_equal(loaded, weights)


def test_checkpoint_without_metadata_is_named(ranks: RankPool, moe_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="not a Megatron distributed checkpoint"):
        ranks.run(load_and_train, moe_dir, tmp_path, True, "float32")


class MakesDirectory:
    """Unpickled, it makes a directory: code that a checkpoint of others would run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.directory),)


def save_malicious(layout: Any, platform: Any, model: Path, directory: Path, made: Path) -> None:
    """A checkpoint's weights, and code wherever this Megatron version itself keeps what is no tensor."""
    from megatron.core import dist_checkpointing

    from megagspo.policy.megatron_checkpoint import _model_state

    weights = _model_state(make_policy(layout, platform, model)._bare)
    dist_checkpointing.save({"model": weights, "counters": MakesDirectory(made)}, str(directory))


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_files_that_would_run_code_are_refused(
    ranks: RankPool, moe_dir: Path, saved: Callable[..., Saved], tmp_path: Path, file: str
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(saved("one_rank")[0], changed)
    malicious = MakesDirectory(tmp_path / "executed")
    if file == ".metadata":
        (changed / file).write_bytes(pickle.dumps(malicious))
    else:
        torch.save(malicious, changed / file)
    with pytest.raises(RankFailure, match=r"posix\.mkdir|more than tensors and plain values"):
        ranks.run(load_and_train, moe_dir, changed, True, "float32")
    assert not (tmp_path / "executed").exists()


def test_plain_values_that_would_run_code_are_refused_wherever_megatron_keeps_them(
    ranks: RankPool, moe_dir: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    ranks.run(save_malicious, moe_dir, checkpoint, tmp_path / "executed")
    with pytest.raises(RankFailure, match="more than tensors and plain values"):
        ranks.run(weights_from_checkpoint, moe_dir, checkpoint)
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_holds_tensors_and_plain_values_only(saved: Callable[..., Saved]) -> None:
    """No pickled objects of the model's (`_extra_state`). `common_state` is Megatron 0.19's place for what
    every version finds in common.pt."""
    from megagspo.policy.megatron_checkpoint import _read_metadata

    directory = saved("tp2")[0]
    entries = _read_metadata(directory).state_dict_metadata
    assert entries
    objects = {name for name, entry in entries.items() if type(entry).__name__ != "TensorStorageMetadata"}
    assert all(name.startswith("common_state/") for name in objects)
    plain = torch.load(directory / "common.pt", weights_only=True)
    assert plain == {"counters": {"version": 7, "updates": 2}}
