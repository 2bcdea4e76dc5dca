"""The checks, one family a file, in the order in which they are made."""

from __future__ import annotations

from typing import Final

from fairlead_diagnostics.checking import Check

_DEVICES: Final = Check("devices", "fairlead_diagnostics.checks.devices:count", limit_s=120.0)
_MEMORY: Final = Check("memory", "fairlead_diagnostics.checks.memory:free", limit_s=120.0)
_MATMUL: Final = Check("matmul", "fairlead_diagnostics.checks.devices:matmul", limit_s=120.0, torch=True, sure=True)
_WRITE: Final = Check("write", "fairlead_diagnostics.checks.disk:write", limit_s=300.0, folder=True)

LOCAL: Final[tuple[Check, ...]] = (_DEVICES, _MEMORY, _MATMUL, _WRITE)
"""What each node of an allocation does for itself."""

HERE: Final[tuple[Check, ...]] = (
    Check("python", "fairlead_diagnostics.checks.software:python"),
    Check("torch", "fairlead_diagnostics.checks.software:torch_here", limit_s=120.0),
    _DEVICES,
    Check("cpus", "fairlead_diagnostics.checks.memory:cpus"),
    _MEMORY,
    Check("disk", "fairlead_diagnostics.checks.disk:space", folder=True),
    _WRITE,
    Check("name", "fairlead_diagnostics.checks.names:own"),
    Check("clock", "fairlead_diagnostics.checks.clock:with_files", folder=True),
    _MATMUL,
)
"""What `fairlead doctor` looks at on one machine."""

NAMES: Final = Check("names", "fairlead_diagnostics.checks.names:others", limit_s=60.0)
OPEN: Final = Check("all-reduce", "fairlead_diagnostics.checks.pair:listen", limit_s=120.0, torch=True)
PAIR: Final = Check("all-reduce", "fairlead_diagnostics.checks.pair:all_reduce", limit_s=120.0, torch=True)
