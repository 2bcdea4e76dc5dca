"""Can this machine offload to NVMe? Asked without torch, before a run."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fairlead import Finding
from fairlead.findings import Severity

APT: Final = "apt install libaio-dev"
_PARTS: Final = ("offload_optimizer", "offload_param")
_FOLDERS: Final = ("/usr/include", "/usr/local/include")


def nvme_findings(settings: Mapping[str, Any], environ: Mapping[str, str], *, here: bool) -> Iterator[Finding]:
    """What is missing for the device `nvme`; `here`: the job runs on this machine, not on others."""
    severity: Severity = "error" if here else "warning"
    used = _used(settings)
    if used and not (_has_header(environ) or _is_built()):
        yield Finding(
            severity,
            "deepspeed-nvme",
            "DeepSpeed's reading and writing of NVMe (async_io) cannot be compiled on this machine",
            where="trainer.strategy",
            why="libaio.h is in none of the folders where the compiler looks",
            fix=f"{APT} (yum install libaio-devel), or offload to the device cpu",
        )
    for path in sorted({str(part.get("nvme_path")) for part in used}):
        if not (Path(path).is_dir() and os.access(path, os.W_OK)):
            yield Finding(
                severity,
                "deepspeed-nvme",
                f"there is no folder {path} to write to on this machine",
                where="trainer.strategy.nvme_path",
                why="offloaded state is kept there",
                fix="give the folder of a fast local disk as nvme_path",
            )


def uses_nvme(settings: Mapping[str, Any]) -> bool:
    """Whether anything is offloaded to NVMe."""
    return bool(_used(settings))


def _used(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    zero = settings.get("zero_optimization")
    parts = [zero.get(name) for name in _PARTS] if isinstance(zero, Mapping) else []
    return [part for part in parts if isinstance(part, Mapping) and part.get("device") == "nvme"]


def _has_header(environ: Mapping[str, str]) -> bool:
    """Whether a compiler would find libaio; DeepSpeed itself asks by compiling, once a run starts."""
    folders = [
        *_FOLDERS,
        *environ.get("CPATH", "").split(os.pathsep),
        *environ.get("C_INCLUDE_PATH", "").split(os.pathsep),
    ]
    folders += [word[2:] for word in shlex.split(environ.get("CFLAGS", "")) if word.startswith("-I")]
    if prefix := environ.get("CONDA_PREFIX"):
        folders.append(f"{prefix}/include")
    return any(folder and Path(folder, "libaio.h").is_file() for folder in folders)


def _is_built() -> bool:
    """Whether DeepSpeed was installed with it (`DS_BUILD_AIO=1 pip install deepspeed`)."""
    found = importlib.util.find_spec("deepspeed")
    folders = found.submodule_search_locations if found is not None else None
    return any(any(Path(folder, "ops", "aio").glob("async_io_op*.so")) for folder in folders or ())
