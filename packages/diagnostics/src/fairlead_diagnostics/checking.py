"""What a check is, what it is given, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Requested:
    """What a job asks of a node, as plain values: it is handed to another process.

    Args:
        device: The device type of torch on which the ranks compute: `cpu`, `cuda`.
        backend: The backend of torch.distributed: `gloo`, `nccl`.
        count: Devices that each node is to have; None: the job does not say, or computes on CPUs.
        found: Devices that are there, as the accelerator's plugin sees them without torch.
        found_by: How it sees them: `nvidia-smi`, `CUDA_VISIBLE_DEVICES`.
        memory_gib: Memory of one device, GiB; None: not given.
        host_memory_gib: Main memory of a node, GiB; None: not given.
        folder: The run directory, or the folder for runs; None: nothing is written.
    """

    device: str = "cpu"
    backend: str = "gloo"
    count: int | None = None
    found: int = 0
    found_by: str = ""
    memory_gib: float | None = None
    host_memory_gib: float | None = None
    folder: str | None = None


@dataclass(frozen=True)
class Result:
    """What a check has found.

    Args:
        ok: False: the node is unfit; None: the check was not made, and `detail` says why.
        detail: What was seen, in a few words.
        seconds: What is compared with the other nodes, where slowness shows in it.
        warns: Whether what it says is worth a warning though it is ok.
        failed: Of a check between nodes: the nodes that it failed with, and how.
        data: What the rest of a screen needs of it.
    """

    ok: bool | None
    detail: str
    seconds: float | None = None
    warns: bool = False
    failed: Mapping[int, str] = field(default_factory=dict)
    data: Any = None

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False, {}) or name == "ok"}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """Back from `plain`."""
        failed = {int(node): why for node, why in plain.get("failed", {}).items()}
        return cls(**{**plain, "failed": failed})


@dataclass
class Bench:
    """What a check works with.

    Args:
        requested: What the job needs of the node.
        progress: To be called after each part of the work: a check that is slow is not one that hangs.
        cache: What an earlier check of the same process has left, such as a store.
    """

    requested: Requested
    progress: Callable[[], None] = lambda: None
    cache: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One check; to add one, write a function and put it on a list of `fairlead_diagnostics.checks`.

    Args:
        name: The word for it in reports.
        run: `module:function`, called with a `Bench` in a separate process; returns a `Result`. What it raises is a
            failure of the node.
        limit_s: Seconds without progress after which it hangs.
        torch: Whether it needs torch.
        sure: Whether a failure is the node's own fault also where no other node is there to compare with.
        folder: Whether it needs a folder.

    Example:
        >>> Check("fans", "my_site.checks:fans", limit_s=5.0).name
        'fans'
    """

    name: str
    run: str
    limit_s: float = 60.0
    torch: bool = False
    sure: bool = False
    folder: bool = False
