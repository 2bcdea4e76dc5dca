"""The scheduler's job: its id, its task of an array and its CPUs, whichever environment started the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fairlead import PluginManager, Setting
from fairlead.detect import choose_environment, find_jobs
from fairlead.interfaces import Job

BATCH = {"SLURM_JOB_ID": "17"}


def first_job(environ: Mapping[str, str], plugins: PluginManager, **more: Any) -> Job | None:
    """The job that counts."""
    return next(iter(find_jobs(environ, plugins, **more).values()), None)


@pytest.mark.parametrize(
    ("environ", "job", "attempt", "task", "cancel"),
    [
        ({"SLURM_JOB_ID": "1"}, "slurm:1", 0, None, "scancel 1"),
        ({"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "2"}, "slurm:1", 2, None, "scancel 1"),
        ({"SLURM_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"}, "slurm:1", 0, "0", "scancel 1"),
        ({"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "x", "SLURM_CPUS_PER_TASK": ""}, "slurm:1", 0, None, "scancel 1"),
        ({"LSB_JOBID": "5"}, "lsf:5", 0, None, "bkill 5"),
        ({"LSB_JOBID": "5", "LSB_JOBINDEX": "0"}, "lsf:5", 0, None, "bkill 5"),
        ({"LSB_JOBID": "5", "LSB_JOBINDEX": "3"}, "lsf:5[3]", 0, "3", "bkill '5[3]'"),
        ({"PBS_JOBID": "9.srv"}, "pbs:9.srv", 0, None, None),
        ({"PBS_JOBID": "9[2].srv", "PBS_ARRAY_INDEX": "2"}, "pbs:9[2].srv", 0, "2", None),
        ({"JOB_ID": "4", "SGE_TASK_ID": "undefined"}, "sge:4", 0, None, None),
        ({"JOB_ID": "4", "SGE_TASK_ID": "6"}, "sge:4.6", 0, "6", None),
    ],
)
def test_a_job_has_its_id_and_its_task(
    plugins: PluginManager, environ: dict[str, str], job: str, attempt: int, task: str | None, cancel: str | None
) -> None:
    found = first_job(environ, plugins)
    assert found is not None
    assert (found.id, found.attempt, found.array_task, found.cancel) == (job, attempt, task, cancel)


@pytest.mark.parametrize("environ", [{}, {"JOB_ID": "4"}, {"SGE_TASK_ID": "6"}, {"SLURM_JOB_ID": " "}])
def test_outside_of_a_job_there_is_none(plugins: PluginManager, environ: dict[str, str]) -> None:
    """JOB_ID alone is a name that many programs use."""
    assert first_job(environ, plugins) is None


def test_the_cpus_of_a_slurm_job(plugins: PluginManager) -> None:
    environ = {**BATCH, "SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "8"}
    found = first_job(environ, plugins)
    assert found is not None
    assert found.cpus_per_rank == Setting(3, "SLURM_CPUS_PER_TASK")
    assert found.cpus_on_node == Setting(8, "SLURM_CPUS_ON_NODE")
    assert first_job({**BATCH, "SLURM_CPUS_PER_TASK": "0"}, plugins) == first_job(BATCH, plugins)


def test_torchrun_inside_a_job_leaves_the_job(plugins: PluginManager) -> None:
    worker = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
    }
    chosen = choose_environment("auto", {**BATCH, **worker}, plugins)
    assert chosen.setting.value == "torchelastic"
    assert isinstance(chosen.job, Job)
    assert chosen.job.id == "slurm:17"


def test_what_is_recorded_of_a_job_is_no_secret(plugins: PluginManager) -> None:
    for environ in (BATCH, {"LSB_JOBID": "5"}, {"PBS_JOBID": "9"}):
        found = first_job(environ, plugins)
        assert found is not None
        assert set(environ) <= set(found.variables)
        assert not any("JWT" in name or "TOKEN" in name for name in found.variables)
