"""What `fairlead check` says of a requeuer before the job runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fairlead.detect import find_jobs
from fairlead.findings import Finding
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager


def findings(value: Any, environ: dict[str, str], *, inside_job: bool = True, rank: int = 0) -> list[tuple[str, str]]:
    manager = PluginManager()
    config = parse_backend("requeue", value, manager)
    plugin = manager.of(config)
    # What these checks read of a Resolution.
    job = next(iter(find_jobs(environ, manager).values()), None)
    resolution = SimpleNamespace(
        requeue=config, inside_job=inside_job, job=job, value=lambda name: {"global_rank": rank}[name]
    )
    found: list[Finding] = []
    for result in manager.call(plugin, "fairlead_check", resolution=resolution, environ=environ):
        found.extend(result)
    assert all(finding.code in plugin.codes for finding in found)
    return [(finding.severity, finding.code) for finding in found]


@pytest.mark.parametrize(("tag", "variable"), [("slurm", "SLURM_JOB_ID"), ("lsf", "LSB_JOBID")])
def test_a_container_without_the_schedulers_command(tag: str, variable: str, tmp_path: Path) -> None:
    """Pain 9."""
    environ = {"PATH": str(tmp_path), variable: "17"}
    assert findings(tag, environ) == [("warning", "requeue-command-missing")]
    assert findings(tag, environ, inside_job=False) == [("info", "requeue-command-missing")]
    for name in ("scontrol", "brequeue"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert findings(tag, environ) == []
    assert findings(tag, {"PATH": str(tmp_path)}) == [("warning", "requeue-job-unknown")]
    assert findings(tag, {"PATH": str(tmp_path)}, inside_job=False) == []


def test_script_without_a_directory_is_an_error_inside_a_job() -> None:
    job = {"SLURM_JOB_ID": "17"}
    assert findings("script", job) == [("error", "requeue-directory-missing")]
    assert findings("script", {}, inside_job=False) == [("info", "requeue-directory-missing")]
    assert findings("script", {**job, "NSHRUNNER_LSF_EXIT_SCRIPT_DIR": "/x"}) == []
    assert findings({"name": "script", "directory": "/x"}, {}) == [("warning", "requeue-job-unknown")]
    assert findings({"name": "script", "directory": "/x", "argv": ["true"]}, {}) == []


def test_a_command_that_is_not_there() -> None:
    environ = {"PATH": "/usr/bin:/bin"}
    assert findings({"name": "command", "argv": ["no-such-program"]}, environ) == [
        ("warning", "requeue-command-missing")
    ]
    assert findings({"name": "command", "argv": ["sh"]}, environ) == []


def test_the_command_of_the_jobs_scheduler(tmp_path: Path) -> None:
    """Without `argv` it is the one that the environment of the job names."""
    assert findings("command", {"PATH": str(tmp_path)}) == [("warning", "requeue-job-unknown")]
    job = {"PATH": str(tmp_path), "LSB_JOBID": "17"}
    assert findings("command", job) == [("warning", "requeue-command-missing")]


@pytest.mark.parametrize("answer", ["Requeue=0 BatchFlag=1", "Requeue=1 BatchFlag=0"])
def test_a_job_that_slurm_will_not_requeue(answer: str, tmp_path: Path) -> None:
    """Found at the start, by one rank: at the stop it would be too late. FAKE: prints what the real one printed."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho JobId=17 JobName=x JobState=RUNNING Reason=None {answer} Restarts=0\n")
    scontrol.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17"}
    assert findings("slurm", environ) == [("warning", "requeue-refused")]
    assert findings("slurm", environ, rank=1) == []
    assert findings("slurm", environ, inside_job=False) == []
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert findings("slurm", environ) == []  # it does not say
