"""`strategy: fsdp` on real ranks over gloo, against one process with the whole batch."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from fairlead import PluginManager
from fairlead.exactness import device_reasons, verdict
from fairlead.testing import minimal_resolution
from fairlead_distributed.testing import run_ranks

CLOSE = 1e-6
"""Largest difference of any number after eight steps of Adam: the order of float32 additions differs."""
LAUNCHER = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
PARAMETERS = 84 + 3 * 156 + 26  # of the scenarios' network, in five units that two ranks share evenly
EQUAL = [
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "one_unit",
    "by_size",
    "checkpointed",
    "clip_norm",
    "clip_value",
    "accumulate",
    "flat",
    "cpu_offload",
    "own_units",
]


def scenarios(rank: int, table: str, folder: str) -> dict[str, Any]:
    """All scenarios of a table, one after the other, in this rank."""
    if (here := str(Path(__file__).parent)) not in sys.path:
        sys.path.insert(0, here)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # Lightning's advice about loaders, torch's about its newer APIs
    module: Any = importlib.import_module("fsdp_scenarios")
    found: dict[str, Any] = module.run(getattr(module, table)(folder))
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("fsdp"))
    return run_ranks(scenarios, 2, "two_ranks", folder, env=LAUNCHER, timeout=300)[0]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("fsdp"))
    return run_ranks(scenarios, 3, "three_ranks", folder, env=LAUNCHER, timeout=300)[0]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("fsdp"))
    return run_ranks(scenarios, 4, "four_ranks", folder, env=LAUNCHER, timeout=300)[0]


def outcome(found: dict[str, Any], name: str) -> Any:
    assert "failed" not in found[name], found[name]["failed"]
    return found[name]


def equals_one_process(found: dict[str, Any]) -> None:
    assert found["size"] > 1  # of the gradients
    assert found["moved"] > 0.01  # every parameter
    assert found["steps"] == 8
    assert max(found["losses"], found["gradients"], found["weights"]) < CLOSE, found


@pytest.mark.parametrize("name", EQUAL)
def test_training_on_two_ranks_equals_one_process(two: dict[str, Any], name: str) -> None:
    """Loss of every step, gradients of the first, weights after the last; rank 1 started from other weights."""
    equals_one_process(outcome(two, name))


def test_no_shard_is_ddp_bit_for_bit(two: dict[str, Any]) -> None:
    assert outcome(two, "no_shard_is_ddp") == {"equal": True, "compared": 10}


@pytest.mark.parametrize(
    ("strategy", "parameters", "rest", "gathers"),
    [("FULL_SHARD", 1 / 2, 1 / 2, 10), ("SHARD_GRAD_OP", 3 / 2, 1 / 2, 5), ("NO_SHARD", 1, 1, 0)],
)
def test_a_rank_holds_and_gathers_what_the_formula_says(
    two: dict[str, Any], strategy: str, parameters: float, rest: float, gathers: int
) -> None:
    """Between forward and backward FULL_SHARD has its half, SHARD_GRAD_OP also the whole, which is not gathered again.

    Gradients, and two numbers a parameter in Adam, are halved by both.
    """
    whole = PARAMETERS * 4
    assert outcome(two, f"counted {strategy}") == {
        "parameters": whole * parameters,
        "gradients": whole * rest,
        "optimizer": 2 * whole * rest,
        "all_gathers": gathers,
        "reduce_scatters": 0 if strategy == "NO_SHARD" else 5,
        "all_reduces": 5 if strategy == "NO_SHARD" else 0,
    }


def test_accumulation_reduces_every_batch(two: dict[str, Any]) -> None:
    """Lightning's FSDP does not put it off: each of two batches sends its gradients, which then are sharded at once."""
    assert outcome(two, "counted accumulate")["reduce_scatters"] == 5


def test_a_module_can_be_called_outside_of_its_steps(two: dict[str, Any]) -> None:
    """A callback that generates text at the end of a fit; Lightning's would find the shards."""
    found = outcome(two, "called_outside")
    assert max(found.values()) < CLOSE


def test_exactly_the_named_layers_are_checkpointed(two: dict[str, Any]) -> None:
    assert outcome(two, "layers") == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("name", "held", "computed", "reduced"),
    [
        ("bf16-mixed", "torch.float32", "torch.bfloat16", "torch.bfloat16"),
        ("bf16-true", "torch.bfloat16", "torch.bfloat16", "torch.bfloat16"),
        ("policy", "torch.float32", "torch.bfloat16", "None"),
    ],
)
def test_precision_of_the_trainer_or_by_policy(
    two: dict[str, Any], name: str, held: str, computed: str, reduced: str
) -> None:
    found = outcome(two, name)
    assert (found["held"], found["computed"], found["reduced"]) == ([held], computed, reduced)
    assert found["moved"] > 0.01


@pytest.mark.parametrize(("name", "file"), [("resume", True), ("resume_sharded", False), ("resume_flat", True)])
def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(two: dict[str, Any], name: str, file: bool) -> None:
    """From one file that rank 0 writes, and from a folder of shards."""
    assert outcome(two, name) == {"equal": True, "file": file}


def test_a_whole_checkpoint_goes_on_under_ddp_and_back(two: dict[str, Any]) -> None:
    """With two groups of parameters that are not in the order of the module."""
    assert outcome(two, "into_another") == {"to_ddp": 0.0, "from_ddp": 0.0}


def test_manual_optimization_is_refused(two: dict[str, Any]) -> None:
    """Lightning lets it pass: it then steps before FSDP1 has finished the backward pass, and cannot save."""
    found = outcome(two, "manual")
    assert found["error"] == "ConfigError"
    assert "fsdp2" in found["text"]


def test_fabric_trains_clips_saves_and_resumes(two: dict[str, Any]) -> None:
    found = outcome(two, "fabric")
    assert found["apart"] < CLOSE
    assert found["resumed"] == 0.0


@pytest.mark.parametrize("name", ["resume", "resume_clipped"])
def test_fsdp_is_exact_on_three_ranks(three: dict[str, Any], name: str) -> None:
    """What `fairlead_exactness` says rests on this."""
    assert outcome(three, name) == {"equal": True, "file": True}


@pytest.mark.full
@pytest.mark.parametrize("name", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "clip_norm"])
def test_two_copies_of_two_shards_equal_one_process(four: dict[str, Any], name: str) -> None:
    equals_one_process(outcome(four, name))


def test_a_hybrid_rank_holds_half_and_sends_its_gradients_to_the_other_copy(four: dict[str, Any]) -> None:
    found = outcome(four, "counted")
    assert (found["parameters"], found["gradients"]) == (PARAMETERS * 2, PARAMETERS * 2)
    assert (found["reduce_scatters"], found["all_reduces"]) == (5, 5)


def test_a_hybrid_run_resumes(four: dict[str, Any]) -> None:
    assert outcome(four, "resume") == {"equal": True, "file": True}


@pytest.mark.parametrize(
    ("ranks", "strategy", "expected"),
    [
        (4, "fsdp", "exact"),
        (4, {"name": "fsdp", "process_group_backend": "nccl"}, "not known"),
        (2, {"name": "fsdp", "state_dict_type": "sharded"}, "not known"),
        (2, {"name": "fsdp", "use_orig_params": False}, "not known"),
    ],
)
def test_what_fsdp_says_of_a_resume(ranks: int, strategy: Any, expected: str) -> None:
    plugins = PluginManager()
    resolution = minimal_resolution(plugins, devices=ranks, strategy=strategy, accelerator="cpu")
    assert verdict(device_reasons(resolution, plugins)) == expected
