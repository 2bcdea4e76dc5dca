"""Variables that the ranks' libraries need on a kind of network, with where that is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_NOT_THESE: Final = "^docker,lo,veth"
"""Interfaces by which no other node is reached; NCCL takes a list behind `^` as prefixes to leave out."""


@dataclass(frozen=True)
class Network:
    """The variables of a kind of network, and the page that they are from."""

    variables: Mapping[str, str]
    source: str


NETWORKS: Final[Mapping[str, Network]] = {
    # Huge pages and fork do not go together: a loader's workers fail with "Cannot allocate memory".
    "efa": Network(
        {
            "FI_PROVIDER": "efa",
            "FI_EFA_FORK_SAFE": "1",
            "FI_EFA_USE_HUGE_PAGE": "0",
            "NCCL_SOCKET_IFNAME": _NOT_THESE,
        },
        "https://github.com/aws-samples/awsome-distributed-training/blob/main/1.architectures/efa-cheatsheet.md",
    ),
    # Named, so that a missing driver is an error: NCCL would go on over TCP, many times slower.
    "infiniband": Network(
        {"NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": _NOT_THESE},
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
    ),
    "ethernet": Network(
        {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": _NOT_THESE},
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
    ),
}
