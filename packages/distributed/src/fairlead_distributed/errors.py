"""What can go wrong between processes, as errors that say what to do."""

from __future__ import annotations

from fairlead.errors import ConfigError, RunFailedError


class AlreadyInitializedError(ConfigError):
    """The process group was initialised a second time without destroying the first."""


class NotInitializedError(ConfigError):
    """A collective was called in a process that is one of several, before `init_process_group`."""


class RendezvousError(RunFailedError):
    """The ranks did not find each other. `missing` holds the ranks that never arrived, where known."""

    missing: tuple[int, ...] = ()


class AddressNotFoundError(RendezvousError):
    """The name of the main address does not resolve on this machine."""


class AddressUnreachableError(RendezvousError):
    """Nothing answers at the main address: no route, a firewall, or rank 0 is not there."""


class PreflightError(RendezvousError):
    """The ranks came and do not fit together, or some did not come; the same text on all ranks."""


class CollectiveError(RunFailedError):
    """A collective operation or a barrier failed or timed out. `missing`: the ranks that did not come, where known."""

    missing: tuple[int, ...] = ()


class CollectiveMismatchError(CollectiveError):
    """The ranks called different collectives where they should have called the same one."""


class TensorMismatchError(ConfigError):
    """The ranks called one collective with tensors that do not fit together, or the tensor cannot be reduced so."""


class NonFiniteGradientError(RunFailedError):
    """A gradient is infinite or NaN. `parameter` is the name of the first such parameter, where known."""

    parameter: str | None = None


class RankFailedError(RunFailedError):
    """A process started by `run_ranks` raised, died or did not end in time. `rank` is the first such rank."""

    rank: int = -1
