"""Two real processes over gloo, against one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import is_nccl_available

CLOSE = 1e-6
"""Largest difference of any weight after eight steps of Adam: the order of float32 additions differs."""


def outcome(trained: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = trained[name]
    assert "failed" not in found, found["failed"]
    return found


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "ddp_view_static",
        "ddp_unused",
        "ddp_options",
        "ddp_accumulate",
        "fsdp2",
        "fsdp2_direct",
        "fsdp2_manual",
        "fsdp2_configure_model",
        "fsdp2_own",
        "fsdp2_keep",
        "fsdp2_accumulate",
        "fsdp2_clip_norm",
        "fsdp2_clip_value",
    ],
)
def test_training_on_two_ranks_equals_one_process(trained: dict[str, Any], name: str) -> None:
    """The final weights agree, though rank 1 started from others."""
    found = outcome(trained, name)
    assert found["moved"] > 0.01
    assert found["apart"] < CLOSE


def test_ddp_says_what_to_do_about_unused_parameters(trained: dict[str, Any]) -> None:
    """Where `ddp` fails, the other literal trains."""
    found = outcome(trained, "ddp_unused_refused")
    assert found["error"] == "RuntimeError"
    assert "ddp_find_unused_parameters_true" in found["text"]


def test_bucket_size_changes_the_number_of_all_reduces(trained: dict[str, Any]) -> None:
    """Counted in torch's profile of one step."""
    found = outcome(trained, "ddp_buckets")
    assert found["1"] > found["25"] >= 1


def test_accumulation_sends_gradients_once_a_step(trained: dict[str, Any]) -> None:
    """Two batches a step: none for the first, all buckets with the second."""
    counts = outcome(trained, "ddp_accumulate")["counts"]
    assert counts[0] == counts[2] == 0
    assert counts[1] >= 1
    assert counts[3] >= 1


def test_communication_hooks_run_on_a_cpu_too(trained: dict[str, Any]) -> None:
    fp16, powersgd = outcome(trained, "ddp_fp16"), outcome(trained, "ddp_powersgd")
    assert fp16["hook"] == "fp16_compress_hook"
    assert CLOSE < fp16["apart"] < 1e-3  # rounded to 16 bits, and no more than that
    assert powersgd["hook"] == "powerSGD_hook"
    assert 1e-3 < powersgd["apart"] < 0.1  # a low-rank approximation from the second step on
    assert outcome(trained, "ddp_fp16_fabric")["hook"] == "fp16_compress_hook"


def test_the_bf16_hook_is_refused_without_nccl(trained: dict[str, Any]) -> None:
    """What the finding `ddp-comm-hook` says beforehand."""
    if is_nccl_available():
        pytest.skip("this build of torch has NCCL")
    assert "NCCL" in outcome(trained, "ddp_bf16_hook")["text"]


def test_fsdp2_holds_half_of_the_parameters_on_each_of_two_ranks(trained: dict[str, Any]) -> None:
    found = outcome(trained, "fsdp2_bytes")
    assert found["local"] * 2 == found["whole"]
    assert found["units"] == 4  # three blocks and the rest


def test_no_shard_is_ddp_bit_for_bit(trained: dict[str, Any]) -> None:
    assert outcome(trained, "no_shard_is_ddp") == {"equal": True, "compared": 10}


def test_a_module_can_be_called_outside_of_its_steps(trained: dict[str, Any]) -> None:
    """A callback that generates text at the end of a fit needs the full weights, not this rank's shards."""
    assert max(outcome(trained, "fsdp2_called_outside").values()) < CLOSE


def test_fsdp2_resumes_from_one_file_that_plain_torch_reads(trained: dict[str, Any]) -> None:
    """The gathered checkpoint is a collective that does not hang; a resumed run equals an uninterrupted one."""
    assert outcome(trained, "fsdp2_resume") == {"apart": 0.0, "one_file": True, "plain_tensors": True}


def test_fsdp2_validates_before_and_after_training(trained: dict[str, Any]) -> None:
    found = outcome(trained, "fsdp2_validate")
    assert found["after"] < found["before"]
    assert found["hook_left"] is False


def test_fsdp2_shards_under_fabric(trained: dict[str, Any]) -> None:
    found = outcome(trained, "fsdp2_fabric")
    assert found["sharded"] is True
    assert found["apart"] < CLOSE


def test_fsdp2_goes_on_under_fabric_whatever_the_order_of_the_optimizer(trained: dict[str, Any]) -> None:
    """Moments that went to other parameters of the same shape would not be noticed."""
    found = outcome(trained, "fsdp2_fabric_goes_on")
    assert found["apart"] < CLOSE
    assert (found["epoch"], found["left"]) == (3, {"more": 1})
    assert found["own"] == 0.0


@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true", "16-true"])
def test_fsdp2_trains_in_the_precisions_it_is_said_to(trained: dict[str, Any], mode: str) -> None:
    found = outcome(trained, f"fsdp2_{mode}")
    assert found["sharded"] is True
    assert found["dtype"] == {"bf16-mixed": "torch.float32", "bf16-true": "torch.bfloat16"}.get(mode, "torch.float16")
    assert found["moved"] > 0.01


def test_fsdp2_does_not_convert_layers_that_are_sharded_already(trained: dict[str, Any]) -> None:
    """A module that shards itself in `configure_model` is left alone, and a layer sync would come too late."""
    assert "layer_sync cannot be applied" in outcome(trained, "fsdp2_own_layer_sync")["text"]


def test_fsdp2_does_not_guess_a_tensor_parallel_plan(trained: dict[str, Any]) -> None:
    found = outcome(trained, "fsdp2_tensor")
    assert found["error"] == "ConfigError"
    assert "configure_model" in found["text"]


@pytest.mark.parametrize("mode", ["64-true", "16-mixed", "transformer-engine"])
def test_fsdp2_refuses_the_precisions_of_the_table(trained: dict[str, Any], mode: str) -> None:
    """The rows `strategy.fsdp2` x `precision.*`: Lightning's words."""
    assert "does not support" in outcome(trained, f"fsdp2_{mode}")["text"]


def test_synchronised_batch_normalisation_equals_the_whole_batch(trained: dict[str, Any]) -> None:
    """Weights and running statistics, under ddp and fsdp2; without it they differ."""
    found = outcome(trained, "sync_batchnorm")
    for strategy in ("ddp", "fsdp2"):
        assert found[strategy] < 1e-5
        assert found[f"{strategy}_running"] < CLOSE
    assert found["without"] > 1e-2


def test_torch_itself_refuses_synchronised_batch_normalisation_on_a_cpu(trained: dict[str, Any]) -> None:
    """Why there is a layer of our own: once this fails, it can go."""
    assert "to be on GPU" in outcome(trained, "torch_sync_batchnorm")["text"]
