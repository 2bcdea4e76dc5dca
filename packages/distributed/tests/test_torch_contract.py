"""The private parts of torch and torchmetrics that are used anywhere: they fail when torch changes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _traverse
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.pipelining import PipelineStage
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch, _pytree
from torch.utils.data import DataLoader

from fairlead.engines import too_old

PARTS: dict[str, tuple[Any, str]] = {
    # what to do when it breaks: where it is
    "process_group.group_store: make a TCPStore of our own and keep it": (dist.distributed_c10d, "_get_default_store"),
    "stacks: name the groups in the flight record in torch's new way": (dist.distributed_c10d, "_world"),
    "stacks: leave the flight record out": (torch._C, "_distributed_c10d"),
    "exact_reduction: leave a model alone that has a hook": (DistributedDataParallel, "_get_ddp_logging_data"),
    "gradients: multiply one tensor after the other": (torch, "_foreach_mul_"),
    "gradients: take the norm of one tensor after the other": (torch, "_foreach_norm"),
    "lifecycle.stops: block signals around the loader's `iter`": (DataLoader, "_get_iterator"),
    "checkpoint-io overlap: walk through dicts and lists by hand": (_pytree, "tree_leaves"),
    "checkpoint-io layout: put values into dicts and lists by hand": (_traverse, "set_element"),
    "checkpoint-io snapshot: tell storages apart by data_ptr and size": (torch.UntypedStorage, "_cdata"),
    "parallel._sequence: call the function of the operation below torch": (
        torch._C,
        "DisableTorchFunction",
    ),
    "activation_checkpointing: tell operators by their names": (torch._ops, "OpOverload"),
    "memory_pool: count allocations by a hook of saved tensors": (_python_dispatch, "TorchDispatchMode"),
    "parallel.pipeline.stage: free what was received by hand": (PipelineStage, "_get_recv_ops"),
    "parallel.pipeline.stage: close gaps of outputs in the layers": (PipelineStage, "_compute_outputs"),
    "parallel.pipeline.stage: close gaps of gradients in a hook": (PipelineStage, "_compute_input_grads"),
    "parallel.pipeline.stage: put buffers back": (
        PipelineStage,
        "_post_metadata_inference_cleanup",
    ),
    "strategies.mesh.steps: gather the root once more, behind a step": (_fsdp_common.TrainingState, "FORWARD"),
    "strategies.mesh.device_mesh: make the mesh of shards with `init_device_mesh`": (DeviceMesh, "_flatten"),
    "strategies.mesh.device_mesh: give `fully_shard` a mesh of its own": (
        DeviceMesh,
        "_concatenate" if hasattr(DeviceMesh, "_concatenate") else "__getitem__",  # before torch 2.10
    ),
    "strategies.sync_batchnorm_runtime: name BatchNorm1d, 2d and 3d": (batchnorm, "_BatchNorm"),
}


@pytest.mark.parametrize("todo", PARTS)
def test_a_private_part_of_torch_is_there(todo: str) -> None:
    """The name of the case says where it is used, and what to do without it."""
    holder, name = PARTS[todo]
    if todo.startswith("parallel.pipeline.stage") and (old := too_old("pipeline")) is not None:
        pytest.skip(str(old))
    assert hasattr(holder, name)


def test_workers_that_persist_are_kept_in_the_loader() -> None:
    """Copies of a loader with another sampler set it to None.  If torch renames it, they draw by the old sampler."""
    loader: DataLoader[int] = DataLoader(range(2), num_workers=0, persistent_workers=False)  # type: ignore[arg-type]
    assert vars(loader)["_iterator"] is None


def test_a_wrapped_model_says_whether_python_reduces() -> None:
    """`exact_reduction` leaves such a model alone.  If torch renames it, ask what `ddp_model` has in its place."""
    assert "_use_python_reducer" in DistributedDataParallel.__init__.__code__.co_names


def test_a_metric_counts_its_updates() -> None:
    """`module_state` restores both.  If torchmetrics renames them, restore all attributes of the metric."""
    metric = pytest.importorskip("torchmetrics").MeanMetric()
    metric.update(1.0)
    assert (metric._update_count, metric._computed) == (1, None)
    metric.compute()
    assert metric._computed == 1.0
