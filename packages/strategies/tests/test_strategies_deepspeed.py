"""DeepSpeed on two real processes over gloo, against one process with the whole batch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlead_distributed.testing import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of DeepSpeed's own imports

CLOSE = 1e-6
"""Largest difference of a weight, gradient or norm: the order of float32 additions differs."""
LITERALS = (
    "deepspeed",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
)
TRUST = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""What DeepSpeed puts into its files beside tensors and plain data."""
LAUNCHER = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
"""What torchrun sets besides."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks save."""
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def ranks_did(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """What came out of everything in `deepspeed_runs.py`, by rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import deepspeed_runs  # type: ignore[import-not-found, unused-ignore]

        yield run_ranks(deepspeed_runs.everything, 2, str(folder), timeout=300, env=LAUNCHER)


def outcome(ranks_did: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for found in ranks_did:
        assert "failed" not in found[name], found[name]["failed"]
    first: dict[str, Any] = ranks_did[0][name]
    return first


@pytest.mark.parametrize("name", [*LITERALS, "stage_0", "each_batch", "own_config", "batchnorm"])
def test_every_stage_trains_as_one_process(ranks_did: list[dict[str, Any]], name: str) -> None:
    """Weights after two epochs, every gradient of every step, the norm that is clipped, and the loss.

    With two batches to a step and five in an epoch, one is left over, which is stepped with as well.
    """
    found = outcome(ranks_did, name)
    assert found["moved"] > 0.05
    assert found["weights"] < CLOSE
    assert found["gradients"] < CLOSE
    steps = 10 if name in ("each_batch", "batchnorm") else 6
    expected = (steps, steps, 0 if name == "stage_0" else steps)  # DeepSpeed computes no norm where it splits nothing
    assert tuple(found["steps"]) == expected
    assert found["norm"] < CLOSE
    assert found["smallest"] > 0.05  # so all steps are clipped where clipping is asked for
    whole, own = found["losses"]
    other = ranks_did[1][name]["losses"][1]
    assert [(a + b) / 2 for a, b in zip(own, other, strict=True)] == pytest.approx(whole, abs=CLOSE)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_module_that_steps_itself_keeps_the_gradients_of_all_its_batches(
    ranks_did: list[dict[str, Any]], stage: int
) -> None:
    """It calls backward twice before each step; Lightning's strategy drops the first in stages 1 and 2."""
    found = outcome(ranks_did, f"manual_{stage}")
    assert found["moved"] > 0.05
    assert found["weights"] < CLOSE
    assert found["steps"][2] == 4
    assert found["norm"] < CLOSE


@pytest.mark.parametrize("stage", [2, 3])
def test_sixteen_bits_are_close_to_one_process_in_32(ranks_did: list[dict[str, Any]], stage: int) -> None:
    """bfloat16 has eight bits of mantissa: the last of a gradient of 0.5 is worth 0.002."""
    found = outcome(ranks_did, f"bf16_{stage}")
    assert found["dtype"] == "torch.bfloat16"
    assert found["moved"] > 0.05
    assert 0 < found["weights"] < 0.01
    assert 0 < found["gradients"] < 0.02 * found["largest"]


def test_a_loop_of_ones_own(ranks_did: list[dict[str, Any]]) -> None:
    """Under Fabric, whose gradients can be asked for as well."""
    found = outcome(ranks_did, "fabric")
    assert found["weights"] < CLOSE
    assert found["asked"] == 5 * 4


def test_gradients_are_not_there_behind_the_step(ranks_did: list[dict[str, Any]]) -> None:
    said = outcome(ranks_did, "too_early")["error"]
    assert "no gradient of inlet.weight" in said
    assert "on_before_optimizer_step" in said


@pytest.mark.parametrize("name", [*LITERALS, "bf16"])
def test_a_resumed_run_ends_with_the_same_bits(ranks_did: list[dict[str, Any]], name: str) -> None:
    """From the folder that DeepSpeed writes, each rank its part."""
    found = outcome(ranks_did, f"resume_{name}")
    assert found["moved"] > 0.01
    assert found["equal"], found["apart"]
    assert sum(file.endswith("_optim_states.pt") for file in found["files"]) == 2


@pytest.mark.parametrize("name", LITERALS)
def test_what_it_has_written_becomes_one_state(ranks_did: list[dict[str, Any]], folder: Path, name: str) -> None:
    """As `fairlead checkpoint consolidate` and `convert` read it: weights whole, also frozen ones, and the rest."""
    expected = outcome(ranks_did, f"resume_{name}")["saved"]
    read = importlib.import_module("fairlead_checkpoint_io.commands.other_tools").read_deepspeed
    state = read(folder / name, TRUST)
    assert state["state_dict"].keys() == expected.keys()
    assert all(torch.equal(state["state_dict"][one], expected[one]) for one in expected)
    assert sum(one.startswith("frozen") for one in expected) == 2
    assert (state["epoch"], state["global_step"]) == (1, 5)


@pytest.mark.full
def test_three_ranks_resume_with_the_same_bits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than two the order of the sums could differ: DDP's does, after its first step."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import deepspeed_runs  # type: ignore[import-not-found, unused-ignore]

    names = ("resume_deepspeed", "resume_deepspeed_stage_2", "resume_deepspeed_stage_3")
    did = run_ranks(deepspeed_runs.everything, 3, str(tmp_path), names, timeout=300, env=LAUNCHER)
    for name in names:
        found = outcome(did, name)
        assert found["moved"] > 0.01
        assert found["equal"], found["apart"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_holds_what_the_table_of_zero_says(ranks_did: list[dict[str, Any]], stage: int) -> None:
    """With P weights on N ranks, 16 bits and Adam (Rajbhandari et al. 2020, figure 1): 4P + 12P/N bytes in stage 1,
    2P + 14P/N in stage 2, 16P/N in stage 3."""
    found = outcome(ranks_did, f"held_{stage}")
    weights = found.pop("whole")
    assert found == {
        "parameters": 2 * weights // (2 if stage == 3 else 1),
        "gradients": 2 * weights // (1 if stage == 1 else 2),
        "master": 4 * weights // 2,
        "moments": 8 * weights // 2,
    }
