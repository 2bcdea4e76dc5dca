"""The job is requeued without some of its nodes; `scontrol` and `sinfo` are FAKES that answer as 22.05 does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fairlead.errors import RunFailedError
from fairlead.facts import Job
from fairlead_hpc_signals import SLURMRequeueConfig
from fairlead_hpc_signals.slurm import SLURMRequeuer, slurm
from fairlead_runs.exclusion import NodeExcluder

_SHOWN = (
    "JobId=17 JobName=a ExcNodeList=n9 b UserId=me(1) GroupId=me(1) Partition=main ReqNodeList={asked} "
    "ExcNodeList={excluded} NumNodes={nodes}-{nodes} NumCPUs=3 Comment=it is ExcNodeList=n8 "
)


def cluster(folder: Path, *, excluded: str = "(null)", asked: str = "(null)", nodes: int = 2, busy: str = "") -> Path:
    """Four nodes and one job; `scontrol` notes what it is told to do."""
    (folder / "scontrol").write_text(
        f"""#!/bin/bash
case "$1 $2" in
"show job") echo "{_SHOWN.format(excluded=excluded, asked=asked, nodes=nodes)}" ;;
"show hostnames") echo "$3" | sed 's/n\\[3-4\\]/n3,n4/' | tr , '\\n' ;;
*) echo "$*" >> {folder}/done
   {busy or ":"}
   true ;;
esac
"""
    )
    (folder / "sinfo").write_text("#!/bin/bash\nprintf 'n1\\nn2\\nn3\\nn4\\nn4\\n'\n")
    for name in ("scontrol", "sinfo"):
        (folder / name).chmod(0o755)
    return folder


def requeued(folder: Path, *nodes: str) -> tuple[str, list[str]]:
    """What it says, and what was done."""
    environ = {"PATH": f"{folder}:{os.defpath}", "SLURM_JOB_ID": "17"}
    job = Job("slurm:17", requeue=("scontrol", "requeue", "17"))
    requeuer = SLURMRequeuer(SLURMRequeueConfig(retry_wait_s=0.0), environ, job, slurm)
    assert isinstance(requeuer, NodeExcluder)
    said = requeuer.requeue_without(nodes)
    return said, (folder / "done").read_text().splitlines()


def test_the_nodes_are_excluded_once_the_job_is_pending_and_those_of_its_user_stay_so(tmp_path: Path) -> None:
    said, done = requeued(cluster(tmp_path), "n2")
    assert done == ["requeue 17", "update JobId=17 ExcNodeList=n2"]
    assert said == "scontrol requeue 17; scontrol update JobId=17 ExcNodeList=n2"
    (tmp_path / "done").unlink()
    said, done = requeued(cluster(tmp_path, excluded="n4", nodes=1), "n2", "n3")
    assert done == ["requeue 17", "update JobId=17 ExcNodeList=n4,n2,n3"]


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"nodes": 4}, "it needs 4 nodes, and the partition main has 4, of which 3 would be left"),
        ({"nodes": 2, "excluded": "n[3-4]"}, "of which 1 would be left"),
        ({"asked": "n1,n2"}, "the job asks for n2 by name"),
    ],
)
def test_a_job_that_could_not_start_without_them_is_not_requeued(
    tmp_path: Path, job: dict[str, object], why: str
) -> None:
    with pytest.raises(RunFailedError, match="could not start") as raised:
        requeued(cluster(tmp_path, **job), "n2")  # type: ignore[arg-type]
    assert why in str(raised.value.why)
    assert not (tmp_path / "done").exists()


def test_a_controller_that_is_busy_is_asked_again_and_what_it_refuses_is_said(tmp_path: Path) -> None:
    once = f'[ "$1" = update ] && [ ! -e {tmp_path}/tried ] && {{ touch {tmp_path}/tried; echo busy >&2; exit 1; }}'
    said, done = requeued(cluster(tmp_path, busy=once), "n2")
    assert done == ["requeue 17", *["update JobId=17 ExcNodeList=n2"] * 2]
    assert "could not" not in said
    never = '[ "$1" = update ] && { echo "Access/permission denied" >&2; exit 1; }'
    said, _ = requeued(cluster(tmp_path, busy=never), "n2")
    assert said.startswith(
        "scontrol requeue 17; the nodes could not be excluded: exit code 1: Access/permission denied"
    )
