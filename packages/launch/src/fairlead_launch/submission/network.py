"""Variables that the ranks' libraries need on a kind of network, with where that is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NOT_THESE: Final = "^docker,lo,veth"
"""Interfaces by which no other node is reached; NCCL takes a list behind `^` as prefixes to leave out."""

NETWORKS: Final[Mapping[str, Mapping[str, str]]] = {
    # https://github.com/aws-samples/awsome-distributed-training/blob/main/1.architectures/efa-cheatsheet.md
    # Huge pages and fork do not go together: a loader's workers fail with "Cannot allocate memory".
    "efa": {
        "FI_PROVIDER": "efa",
        "FI_EFA_FORK_SAFE": "1",
        "FI_EFA_USE_HUGE_PAGE": "0",
        "NCCL_SOCKET_IFNAME": _NOT_THESE,
    },
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    # Named, so that a missing driver is an error: NCCL would go on over TCP, many times slower.
    "infiniband": {"NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": _NOT_THESE},
    "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": _NOT_THESE},
}
