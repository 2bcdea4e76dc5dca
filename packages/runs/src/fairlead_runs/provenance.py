"""Where a result comes from: code, packages, machine, scheduler, command line; without secrets."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairlead.interfaces import Job
from fairlead.secret_names import is_secret_name
from fairlead.user_code import user_folders
from fairlead_runs.redaction import redact_argv, redact_text
from fairlead_runs.submitted import submitted_code

MAX_DIFF_BYTES = 1 << 20
MAX_UNTRACKED = 200
TIMEOUT_S = 10.0

_NAME_AND_VERSION = re.compile(r"^(Name|Version): *(\S+)", re.MULTILINE)

# Which environment variables are written besides those that the job names; those named like a secret never are.
_ALLOWED = re.compile(
    r"(KUBERNETES_SERVICE_HOST|JOB_COMPLETION_INDEX|HOSTNAME|CONDA_DEFAULT_ENV|VIRTUAL_ENV|MASTER_ADDR|MASTER_PORT)"
    r"|(WORLD_SIZE|RANK|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK)"
    r"|TORCHELASTIC_\w+|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|CUBLAS_WORKSPACE_CONFIG|PYTHONHASHSEED"
    r"|(NCCL|GLOO|UCX|FI|OMP|MKL|KMP|TORCH|PYTORCH|XLA|FAIRLEAD)_\w+"
)


@dataclass(frozen=True)
class CodeChange:
    """Whether the code is another than at the start before (None: not known), and a sentence for a warning."""

    changed: bool | None
    summary: str


def collect_provenance(
    environ: Mapping[str, str],
    *,
    job: Job | None = None,
    code: Path | None = None,
    argv: Sequence[str] | None = None,
) -> dict[str, Any]:
    """All that is known about where a start runs and what it runs, of JSON types.

    An allow-list of `environ` is stored, and what `job` names; git is queried for `code`, else the working directory.
    Of a submitted job `git` is its state then, with `snapshot`: the copy that runs.
    """
    named = job.variables if job is not None else ()
    return {
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "host": platform.node(),
        "cwd": _cwd(),
        "code": [str(folder) for folder in user_folders()],
        "argv": redact_argv(sys.argv if argv is None else argv),
        "packages": packages(importlib.metadata.distributions()),
        "git": submitted_code(environ) or git_state(code or Path(), environ),
        "environ": {
            name: redact_text(value)
            for name, value in sorted(environ.items())
            if (name in named or _ALLOWED.fullmatch(name)) and not is_secret_name(name)
        },
        "scheduler_job": job.id if job is not None else None,
        "hardware": hardware(environ),
    }


def origin(provenance: Mapping[str, Any]) -> dict[str, str | None]:
    """What a checkpoint says of the provenance that wrote it.

    `code` is the commit, with `+changes` where files differ from it, None without git; `environment` a digest of the
    Python version, the machine's architecture and all installed packages.
    """
    git = provenance.get("git") or {}
    commit = git.get("commit")
    packages, python = provenance.get("packages"), (provenance.get("python") or {}).get("version")
    installed = json.dumps([python, platform.machine(), packages])
    return {
        "code": f"{commit}{'+changes' if git.get('dirty') else ''}" if commit else None,
        "environment": hashlib.sha256(installed.encode()).hexdigest()[:16],
    }


def packages(distributions: Iterable[importlib.metadata.Distribution]) -> list[str]:
    """Installed packages as `name==version`; damaged metadata is left out."""
    found = set()
    for distribution in distributions:
        # Not `distribution.metadata`, which parses all of a few hundred descriptions: half a second of every start.
        header = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
        fields = dict(_NAME_AND_VERSION.findall(header))
        if len(fields) == 2:
            found.add(f"{fields['Name']}=={fields['Version']}")
    return sorted(found, key=str.lower)


def git_state(code: Path, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Commit, branch, changes (secrets redacted), new files of the repository around `code`; None without git."""
    git = shutil.which("git", path=environ.get("PATH"))
    if git is None:
        return None

    def ask(*args: str, limit: int = 1 << 20) -> tuple[str, bool] | None:
        return _run([git, "-C", str(code), *args], environ, limit)

    root = ask("rev-parse", "--show-toplevel")
    if root is None:
        return None
    status = ask("status", "--porcelain", "-z", "--untracked-files=all")
    if status is None:
        return None
    entries = status[0].split("\0")
    commit, branch = ask("rev-parse", "--verify", "HEAD"), ask("symbolic-ref", "--short", "-q", "HEAD")
    diff = ask("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", limit=MAX_DIFF_BYTES) if commit else None
    untracked = [entry[3:] for entry in entries if entry.startswith("?? ")]
    return {
        "root": root[0].rstrip("\n"),
        "commit": commit[0].strip() if commit else None,
        "branch": branch[0].strip() if branch else None,
        "dirty": any(entries),
        "diff": redact_text(diff[0]) if diff else None,
        "diff_cut": bool(diff and diff[1]),
        "untracked": untracked[:MAX_UNTRACKED],
        "untracked_count": len(untracked),
    }


def code_change(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> CodeChange:
    """Compares the `git` parts of two provenances."""
    digests = [(state.get("snapshot") or {}).get("digest") for state in (old or {}, new or {})]
    if digests[0] is not None and digests[0] == digests[1]:
        return CodeChange(False, "the code is the same: the copy that was submitted")
    if not old or not new:
        return CodeChange(None, "unknown: the code is not in a git repository, or git is not installed")
    if old.get("commit") != new.get("commit"):
        before, after = (str(state.get("commit") or "none")[:12] for state in (old, new))
        return CodeChange(True, f"the commit changed: {before} -> {after}")
    if old.get("diff") != new.get("diff"):
        files = sorted(_changed_files(old) ^ _changed_files(new)) or sorted(_changed_files(new))
        return CodeChange(True, f"uncommitted changes differ: {', '.join(files[:5]) or 'see provenance.json'}")
    if old.get("untracked") != new.get("untracked"):
        files = sorted(set(old.get("untracked") or ()) ^ set(new.get("untracked") or ()))
        return CodeChange(True, f"untracked files differ: {', '.join(files[:5])}")
    if None not in digests:  # what no list of names shows: the content of files that git does not track
        return CodeChange(True, "files that git does not track have another content")
    if new.get("diff_cut"):
        return CodeChange(None, "unknown: the uncommitted changes are too large to be stored")
    return CodeChange(False, "the code is the same")


def hardware(environ: Mapping[str, str]) -> dict[str, Any]:
    """CPU cores (of the machine, and usable by this process), memory in GiB, NVIDIA GPUs by name, memory, driver."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    gpus: list[str] | None = None
    if tool := shutil.which("nvidia-smi", path=environ.get("PATH")):
        query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        answer = _run(query, environ, 1 << 20)
        gpus = answer[0].splitlines() if answer else None
    return {"cpus": os.cpu_count(), "cpus_usable": usable, "memory_gib": round(memory, 1), "gpus": gpus}


def _changed_files(state: Mapping[str, Any]) -> set[str]:
    return set(re.findall(r"^diff --git a/.* b/(.*)$", state.get("diff") or "", re.MULTILINE))


def _run(command: list[str], environ: Mapping[str, str], limit: int) -> tuple[str, bool] | None:
    """Output of a command and whether it was cut; None when it fails or is too slow."""
    with tempfile.TemporaryFile() as output:  # not a pipe: the output may be gigabytes
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                env={**environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return None
        output.seek(0)
        data = output.read(limit + 1)
    return data[:limit].decode(errors="replace"), len(data) > limit


def _cwd() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # deleted under us
        return None
