"""Name resolution: the own name, and those of the other nodes."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from fairlead_diagnostics.checking import Bench, Result


def own(bench: Bench) -> Result:
    """Whether this machine knows its own name, as gloo and NCCL ask for it."""
    name = socket.gethostname()
    problem = resolves(name)
    if problem:
        return Result(False, f"its own name {problem}: gloo and NCCL need that; `getent hosts {name}`")
    return Result(True, f"{name} is {socket.getaddrinfo(name, None)[0][4][0]}")


def others(bench: Bench, hosts: Mapping[int, str]) -> Result:
    """Whether the names of all nodes resolve here."""
    failed, began = {}, time.monotonic()
    for node, host in hosts.items():
        if problem := resolves(host):
            failed[node] = problem
        bench.progress()
    if failed:
        return Result(False, "; ".join(list(failed.values())[:4]), failed=failed)
    return Result(True, f"{len(hosts)} names resolve", time.monotonic() - began)


def resolves(name: str) -> str | None:
    """Why a name does not resolve here; None: it does."""
    try:
        socket.getaddrinfo(name, None)
    except (socket.gaierror, UnicodeError) as error:
        return f"{name} does not resolve ({getattr(error, 'strerror', None) or error})"
    return None
