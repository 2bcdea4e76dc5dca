"""Which host of a TPU slice this is, or a machine whose CPU or GPUs are driven through PJRT.

The variables are those of `torch_xla/_internal/tpu.py` and `torch_xla/core/xla_env_vars.py`: TPU_WORKER_ID,
TPU_WORKER_HOSTNAMES (a comma list), TPU_PROCESS_ADDRESSES (`host:port,...`, or `local`), CLOUD_TPU_TASK_ID (index in
the latter), TPU_PROCESS_BOUNDS, formerly TPU_HOST_BOUNDS (`x,y,z`, whose product is the number of processes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from fairlead import Claim, EnvironmentConfigBase, EnvironmentPlugin, Specificity, Topology, hookimpl
from fairlead.engines import LIGHTNING
from fairlead.interfaces import Setting
from fairlead.topology import check_ranks
from fairlead.variables import integer, malformed, required, text


class XLAEnvironmentConfig(EnvironmentConfigBase):
    """Hosts of a TPU slice, one process each; or one machine whose CPU or GPUs PJRT drives.

    On one host that process drives all devices. On several, PyTorch/XLA starts a rank per chip in each; they meet
    through the TPU runtime, so there is no main address or port to set.

    Example:
        >>> XLAEnvironmentConfig().name
        'xla'
    """

    name: Literal["xla"] = "xla"


class XLA(EnvironmentPlugin):
    """Hosts of a TPU slice, or one machine with PJRT."""

    config = XLAEnvironmentConfig
    aliases = ("XLAEnvironmentPlugin",)
    engines = (*LIGHTNING, "torch-xla")
    extra = "xla"
    example_environ: ClassVar[Mapping[str, str]] = {
        "TPU_WORKER_ID": "1",
        "TPU_WORKER_HOSTNAMES": "t0,t1",
        "PJRT_DEVICE": "TPU",
    }

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims a host of a slice; a machine on which PJRT_DEVICE was exported only as by hand."""
        worker, slice_, device = text(environ, *_WORKER), text(environ, *_SLICE), text(environ, "PJRT_DEVICE")
        if worker is not None and slice_ is not None:
            return Claim(f"{worker.reason}={worker.value}, {slice_.reason}", Specificity.SCHEDULER)
        return Claim(f"PJRT_DEVICE={device.value}", Specificity.MANUAL) if device is not None else None

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """Number and index of the hosts; PyTorch/XLA starts the ranks."""
        hosts = _hosts(environ)
        nodes = _num_nodes(environ, hosts)
        return check_ranks(
            Topology(
                launched=False,
                num_nodes=nodes,
                node_rank=_node_rank(environ, nodes),
                main_address=None if hosts is None else Setting(hosts.value[0], f"first of {hosts.reason}"),
            ),
            _BY,
        )


xla = XLA()


_WORKER = ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")
_SLICE = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
_BY = "the TPU runtime"


def _hosts(environ: Mapping[str, str]) -> Setting | None:
    """The hosts in order, each once."""
    found = text(environ, "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")
    if found is None or found.value == "local":
        return None
    hosts = [_without_port(entry) for entry in found.value.split(",")]
    if not all(hosts):
        raise malformed(found.reason, found.value, "a comma list of hosts such as t1k-0,t1k-1")
    return Setting(tuple(dict.fromkeys(hosts)), found.reason)


def _without_port(entry: str) -> str:
    """`host:port` without the port; an IPv6 address has more than one colon."""
    entry = entry.strip()
    return entry.partition(":")[0] if entry.count(":") == 1 else entry


def _num_nodes(environ: Mapping[str, str], hosts: Setting | None) -> Setting:
    if hosts is not None:
        return Setting(len(hosts.value), f"hosts in {hosts.reason}")
    bounds = text(environ, "TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
    if bounds is None:
        return Setting(1, "one host")
    sides = bounds.value.split(",")
    if not all(side.strip().isdigit() and int(side) > 0 for side in sides):
        raise malformed(bounds.reason, bounds.value, "three numbers such as 2,2,1")
    return Setting(math.prod(map(int, sides)), f"product of {bounds.reason}={bounds.value}")


def _node_rank(environ: Mapping[str, str], nodes: Setting) -> Setting:
    if integer(environ, "TPU_WORKER_ID") is None:
        addresses = text(environ, "TPU_PROCESS_ADDRESSES")
        task = integer(environ, "CLOUD_TPU_TASK_ID")
        if task is None and nodes.value == 1:
            return Setting(0, nodes.reason)
        if task is not None and addresses is not None and "," in addresses.value:
            # Several processes may share a host: each has an index in this list.
            listed = [_without_port(entry) for entry in addresses.value.split(",")]
            if task.value < len(listed):
                node = list(dict.fromkeys(listed)).index(listed[task.value])
                return Setting(node, f"host of CLOUD_TPU_TASK_ID={task.value} in TPU_PROCESS_ADDRESSES")
    return required(environ, *_WORKER, by=_BY)
