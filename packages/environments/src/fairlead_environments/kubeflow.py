"""Which pod of a Kubeflow job this is, from what the operators' sources set:

- PyTorchJob (kubeflow/training-operator, `pkg/controller.v1/pytorch/envvar.go`): MASTER_ADDR, MASTER_PORT; RANK is the
  *pod's* index (the master is 0); WORLD_SIZE is pods times `nprocPerNode`, where one that is no number (its default is
  `auto`) counts as 1, and before release 1.7 always 1. Newer releases add PET_NODE_RANK, PET_NPROC_PER_NODE (as
  written) and PET_NNODES; elastic ones (`elastic.go`) PET_RDZV_ENDPOINT and PET_NNODES=min:max, for torchrun only.
- TrainJob (kubeflow/trainer, `pkg/runtime/framework/plugins/torch/torch.go`): PET_NNODES, PET_NPROC_PER_NODE,
  PET_NODE_RANK (the index of the indexed Job), PET_MASTER_ADDR, PET_MASTER_PORT; neither RANK nor WORLD_SIZE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from fairlead import Claim, EnvironmentConfigBase, Specificity, Topology, Unused, hookimpl
from fairlead.errors import ConfigError
from fairlead.interfaces import Setting
from fairlead.topology import check_ranks
from fairlead.variables import integer, malformed, present, required, text
from fairlead_environments.shared import ResolvedRanks
from fairlead_environments.variables import COMPLETION_INDEX, in_kubernetes, supervised


class KubeflowEnvironmentConfig(EnvironmentConfigBase):
    """Pods of a Kubeflow PyTorchJob or TrainJob.

    A pod is a node: Kubernetes starts one process in it. With one rank per pod that process is the
    rank; with several (`nprocPerNode`, or `devices` in the job) Fairlead starts them in the pod.
    Inside `torchrun` the environment is `torchelastic`.

    Example:
        >>> KubeflowEnvironmentConfig().name
        'kubeflow'
    """

    name: Literal["kubeflow"] = "kubeflow"


class Kubeflow(ResolvedRanks):
    """Pods of a Kubeflow job."""

    config = KubeflowEnvironmentConfig
    aliases = ("KubeflowEnvironmentPlugin",)
    extra = "kubeflow"
    requeue = "exit_code"
    example_environ: ClassVar[Mapping[str, str]] = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29500",
    }
    reads_world_size = True  # a PyTorchJob counts its pods where `nprocPerNode` is no number

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims a pod with the variables of Kubeflow's operators."""
        evidence = find_pod(environ)
        return None if evidence is None else Claim(evidence, Specificity.SCHEDULER)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """From the operator's variables; the ranks in a pod are Fairlead's to start."""
        if (started_here := supervised(environ)) is not None:
            return started_here
        per_pod = _ranks_per_pod(environ)
        nodes = _num_pods(environ, per_pod)
        node_rank = required(environ, "PET_NODE_RANK", "RANK", by=_BY)
        address = text(environ, "PET_MASTER_ADDR", "MASTER_ADDR")
        if address is None:
            raise ConfigError(
                "PET_MASTER_ADDR is not set",
                where="environment variable PET_MASTER_ADDR",
                why=f"{_BY} sets PET_MASTER_ADDR or MASTER_ADDR to the name of the first pod",
                fix="run it as a PyTorchJob or TrainJob, or name another `environment`",
            )
        single = per_pod is not None and per_pod.value == 1
        local_rank = Setting(0, f"{per_pod.reason}=1") if per_pod is not None and single else None
        return check_ranks(
            Topology(
                launched=single,
                num_nodes=nodes,
                local_world_size=per_pod,
                world_size=None
                if per_pod is None
                else Setting(nodes.value * per_pod.value, f"{nodes.reason} x {per_pod.reason}"),
                node_rank=node_rank,
                local_rank=local_rank,
                global_rank=node_rank if single else None,
                main_address=address,
                main_port=required(environ, "PET_MASTER_PORT", "MASTER_PORT", by=_BY, minimum=1),
            ),
            _BY,
        )

    @hookimpl
    def fairlead_unused(self, environ: Mapping[str, str]) -> Unused | None:
        """An elastic job of several pods, in one without torchrun."""
        return idle_job(environ)


kubeflow = Kubeflow()


_PYTORCHJOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_TRAINJOB = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")
_BY = "Kubeflow's operator"
_COUNTED_BY_TORCHRUN = ("auto", "gpu", "cpu", "xpu")


def find_pod(environ: Mapping[str, str]) -> str | None:
    """The evidence that this process is in a pod of a Kubeflow job; None when it is not."""
    pod = in_kubernetes(environ)
    if pod is None:
        return None
    # A TrainJob's pods are those of an Indexed Job. A PyTorchJob's belong to no Job, which may set the same variables.
    kinds = (_TRAINJOB,) if text(environ, COMPLETION_INDEX) is not None else (_TRAINJOB, _PYTORCHJOB)
    for names in kinds:
        if present(environ, names):
            return f"{', '.join(names)} in a pod ({pod.reason})"
    return None


def idle_job(environ: Mapping[str, str]) -> Unused | None:
    """What an elastic job holds that a pod without torchrun leaves unused; None: nothing."""
    endpoint, nodes = text(environ, "PET_RDZV_ENDPOINT"), text(environ, "PET_NNODES")
    if endpoint is None or nodes is None or nodes.value in {"1", "1:1"} or find_pod(environ) is not None:
        return None
    what = f"this pod belongs to an elastic job of {nodes.value} nodes (PET_NNODES) at {endpoint.value}"
    return Unused(what, "torchrun did not start this process", "torchrun")


def _ranks_per_pod(environ: Mapping[str, str]) -> Setting | None:
    """The job's `nprocPerNode`; None where it is to be counted (`auto`) or the operator does not pass it."""
    requested = text(environ, "PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE")
    if requested is None or requested.value in _COUNTED_BY_TORCHRUN:
        return None
    return integer(environ, requested.reason, minimum=1)


def _num_pods(environ: Mapping[str, str], per_pod: Setting | None) -> Setting:
    requested = text(environ, "PET_NNODES")
    if requested is not None and ":" in requested.value:
        low, _, high = requested.value.partition(":")
        if low != high or not low.isdigit():
            raise ConfigError(
                f"PET_NNODES is {requested.value!r}: the number of pods may change",
                where="environment variable PET_NNODES",
                why="only torchrun can bring an elastic job together",
                fix="start the job with `torchrun -m fairlead fit JOB`, or take `elasticPolicy` out of the PyTorchJob",
            )
        return Setting(int(low), requested.reason)
    if requested is not None:
        return required(environ, "PET_NNODES", by=_BY, minimum=1)
    world = required(environ, "WORLD_SIZE", by=_BY, minimum=1)
    if per_pod is None:
        return Setting(world.value, "WORLD_SIZE, which counts pods")
    if world.value % per_pod.value:
        raise malformed("WORLD_SIZE", str(world.value), f"a multiple of {per_pod.reason}={per_pod.value}")
    return Setting(world.value // per_pod.value, f"WORLD_SIZE / {per_pod.reason}")
