"""`srun fairlead fit` on two nodes, disturbed as SLURM disturbs, ends as an undisturbed run on one machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration_tests.exact.compare import differences
from integration_tests.exact.references import References
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import Job, submit
from integration_tests.slurm.system import wait_until
from integration_tests.slurm.training import (
    PAIR,
    PASSED_ON,
    as_if_nothing_had_happened,
    fit,
    history,
    the_same,
    until_at,
    until_saved,
)

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_two_nodes_compute_what_one_machine_computes(cluster: Cluster, references: References, tmp_path: Path) -> None:
    """The same bits as four ranks on one machine; the run says where it ran."""
    job = fit(cluster, tmp_path)
    as_if_nothing_had_happened(references, tmp_path, job)
    (start,) = history(tmp_path, "start")
    assert start["job"] == f"slurm:{job.id}"
    assert start["world_size"] == 4
    logs = sorted((tmp_path / "runs").glob("*/logs/*"))  # of what Python prints, under `srun` too
    assert [log.name for log in logs] == [f"rank-0000{rank}.log" for rank in range(4)]
    assert "[Rank 0] INFO: start       4 ranks on 2 nodes" in logs[0].read_text()


# -- ten stops in one run


def the_tasks(job: Job) -> None:
    job.signal("USR1")


def the_batch_script(job: Job) -> None:
    job.signal("USR1", "-b")


def one_rank(job: Job) -> None:
    """One of the second node; `pkill -n` takes the newest."""
    job.cluster.run(*job.cluster.on(job.nodes()[1], "pkill", "-USR1", "-n", "-f", "fairlead fit"))


def twice_at_once(job: Job) -> None:
    job.signal("USR1")
    job.signal("TERM")


def an_urgent_job(job: Job) -> None:
    submit(
        job.cluster, "sleep 2\n", job.output.parent, "-p", "urgent", "-N2", "--exclusive", "-w", ",".join(job.nodes())
    )


def somebody_requeues(job: Job) -> None:
    job.cluster.run("scontrol", "requeue", job.id)


@dataclass(frozen=True)
class Stop:
    """One of the stops: where the first rank is then, who asks how, and the reason that is found out."""

    place: str
    step: int
    ask: Callable[[Job], None]
    reason: str = "unknown"


STOPS = (
    Stop("setup", 0, the_tasks),  # before the first step: nothing to be saved
    Stop("train_batch_start", 2, the_tasks),
    Stop("train_batch_start", 4, the_batch_script),
    Stop("train_batch_start", 6, one_rank),
    Stop("validation_batch_start", 8, the_tasks),  # cut, and done again from its start
    Stop("save", 12, the_tasks),  # finished first
    Stop("train_batch_start", 14, twice_at_once),
    Stop("train_batch_start", 16, an_urgent_job, "preempted"),
    Stop("setup", 0, an_urgent_job, "preempted"),  # again, while it resumes
    Stop("train_batch_start", 18, somebody_requeues, "requeued"),  # by hand; not once more by us
)


@pytest.mark.full
def test_ten_stops_in_one_run(cluster: Cluster, references: References, tmp_path: Path) -> None:
    """Whoever is asked, wherever the run is: all ranks stop at one step, and no step is lost."""
    pause = {"setup": 2.0, "train_batch_start": 0.3, "validation_batch_start": 0.5, "save": 0.5}
    job = fit(cluster, tmp_path, "-w", "n[1-2]", pause=pause, script=PASSED_ON, case=PAIR)
    for number, stop in enumerate(STOPS, start=1):
        wait_until(f"start {number}", lambda n=number: len(history(tmp_path, "start")) == n, 300)  # type: ignore[misc]
        until_at(job, tmp_path, stop.place, stop.step)
        stop.ask(job)
        wait_until(f"stop {number}", lambda n=number: len(history(tmp_path, "stop")) == n, 150)  # type: ignore[misc]
        for place in tmp_path.glob("place-*"):
            place.unlink()
    stepless = sum(stop.place == "setup" for stop in STOPS)
    reasons = [stop.reason for stop in STOPS]
    as_if_nothing_had_happened(references, tmp_path, job, *reasons, stepless=stepless, case=PAIR)
    by_us = [stop for stop in STOPS if stop.ask is not somebody_requeues]
    assert [event["by"] for event in history(tmp_path, "requeue")] == ["slurm"] * len(by_us)
    asked = history(tmp_path, "signal")
    assert all("SIGUSR1" in event["signals"] for event in asked[:7])
    assert len(asked[3]["ranks"]) == 1  # one heard it, and all stopped
    where = [event["step"] for event in history(tmp_path, "stop")]
    assert where[0] == 0
    assert where[4] == 8
    assert where[8] == where[7]


@pytest.mark.full
def test_preempted_where_slurm_would_cancel(cluster: Cluster, references: References, tmp_path: Path) -> None:
    """In a partition with PreemptMode=CANCEL: started again all the same, once."""
    job = fit(cluster, tmp_path, "-p", "brief", case=PAIR, pause=0.3)
    until_saved(job, tmp_path, 3)
    an_urgent_job(job)
    as_if_nothing_had_happened(references, tmp_path, job, "preempted", case=PAIR)


@pytest.mark.full
@pytest.mark.parametrize("warned", [True, False])
def test_the_time_limit(cluster: Cluster, references: References, tmp_path: Path, warned: bool) -> None:
    """With a warning ahead, and with nothing but the SIGTERM at the end."""
    options = ("--signal=USR1@30", "--time=60") if warned else ("--time=60",)
    job = fit(cluster, tmp_path, *options, case=PAIR, pause=2.5)
    until_saved(job, tmp_path, 3)
    cluster.run("scontrol", "update", f"JobId={job.id}", f"EndTime=now+{50 if warned else 1}")
    wait_until("it has stopped", lambda: bool(history(tmp_path, "stop")), 120)
    job.wait("PENDING")
    cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    as_if_nothing_had_happened(references, tmp_path, job, "time_limit", case=PAIR)
    (signal,) = history(tmp_path, "signal")
    assert ("SIGTERM" in signal["signals"]) is not warned


@pytest.mark.full
def test_while_a_loader_blocks(cluster: Cluster, references: References, tmp_path: Path) -> None:
    """Its worker has nothing yet; the main threads wait, and the signal is heard all the same."""
    case = dataclasses.replace(PAIR, workers=1)
    job = fit(cluster, tmp_path, pause={"sample": 0.15}, case=case)
    until_saved(job, tmp_path, 3)
    job.signal("USR1")
    as_if_nothing_had_happened(references, tmp_path, job, "unknown", case=case)


@pytest.mark.full
def test_an_array_has_a_run_for_each_task(cluster: Cluster, references: References, tmp_path: Path) -> None:
    """Three tasks, each on a node of its own with two ranks; each is warned, and started again by itself."""
    # The directories of the runs differ by themselves; the files that the test's own callback leaves would not.
    script = "mkdir -p t$SLURM_ARRAY_TASK_ID\ncd t$SLURM_ARRAY_TASK_ID\nsrun {command}\n"
    job = fit(cluster, tmp_path, "--array=0-2", pause=0.4, case=PAIR, nodes=1, script=script)
    runs = [tmp_path / f"t{task}" / "runs" / f"mlp-task-{task}" for task in range(3)]
    for run in runs:
        until_saved(job, tmp_path, 3, run=run)
    job.signal("USR1")  # to all tasks of the array
    ended = lambda: all(history(tmp_path, "finished", run=run) for run in runs)  # noqa: E731
    wait_until("all tasks have ended", ended, 400)
    for run in runs:
        (stop,) = history(tmp_path, "stop", run=run)
        assert [event["step"] for event in history(tmp_path, "training", run=run)] == [0, stop["step"]]
        found = differences(references.of(PAIR).run, run)
        assert not found, "\n".join([*found, job.text()])


@pytest.mark.full
def test_a_node_that_fails_costs_the_steps_behind_the_last_checkpoint(
    cluster: Cluster, references: References, tmp_path: Path
) -> None:
    """SLURM starts the job again on nodes that are left; it goes on, without a word from the user."""
    job = fit(cluster, tmp_path, case=PAIR, pause=0.5)
    until_saved(job, tmp_path, 6)
    victim = job.nodes()[1]  # not the one of the batch script
    cluster.fail(victim)
    try:
        wait_until("the job runs again", lambda: len(history(tmp_path, "start")) == 2, 300)
        assert job.wait() == "COMPLETED", job.text()
    finally:
        cluster.boot(victim)
    assert job.shown()["Restarts"] == "1"
    the_same(references, tmp_path, job, PAIR)


@pytest.mark.full
def test_a_node_that_slurm_cannot_reach_for_a_while(cluster: Cluster, references: References, tmp_path: Path) -> None:
    """SLURM starts the job again elsewhere while the first rank lives on there: it neither writes nor finishes."""
    job = fit(cluster, tmp_path, case=PAIR, pause=2.0)
    until_saved(job, tmp_path, 3)
    victim = job.nodes()[0]
    cluster.run(*cluster.on(victim, "pkill", "-STOP", "slurmd"))
    try:
        wait_until("the job runs again", lambda: len(history(tmp_path, "start")) == 2, 200)
        assert job.wait() == "COMPLETED", job.text()
    finally:
        cluster.fail(victim)
        cluster.boot(victim)
    assert job.shown()["Restarts"] == "1"
    the_same(references, tmp_path, job, PAIR)


# -- what people do


@pytest.mark.full
def test_a_run_that_is_cancelled_with_a_checkpoint_is_cancelled_for_slurm_too(cluster: Cluster, tmp_path: Path) -> None:
    """`fairlead cancel`: saved, and not FAILED in `sacct` and in the mail."""
    job = fit(cluster, tmp_path, case=PAIR, pause=0.3)
    until_saved(job, tmp_path, 3)
    (run,) = (tmp_path / "runs").iterdir()
    (run / "STOP").touch()
    assert job.wait() == "CANCELLED"
    (stop,) = history(tmp_path, "stop")
    assert stop["reason"] == "cancelled"
    assert history(tmp_path, "checkpoint")[-1]["step"] == stop["step"]


@pytest.mark.full
def test_a_cancelled_job_is_saved_and_goes_on_when_submitted_again(
    cluster: Cluster, references: References, tmp_path: Path
) -> None:
    """`scancel`: SIGTERM to all tasks at once, often twice; never requeued, and nothing that was trained is lost."""
    job = fit(cluster, tmp_path, case=PAIR, pause=0.3)
    until_saved(job, tmp_path, 3)
    job.cluster.run("scancel", job.id)
    assert job.wait() == "CANCELLED"
    (stop,) = history(tmp_path, "stop")
    assert stop["reason"] == "cancelled"
    assert not history(tmp_path, "requeue")
    assert history(tmp_path, "checkpoint")[-1]["step"] == stop["step"]
    again = fit(cluster, tmp_path, case=PAIR)
    as_if_nothing_had_happened(references, tmp_path, again, "cancelled", restarts=0, case=PAIR)


# -- what the config says


def test_no_requeue_means_it(cluster: Cluster, references: References, tmp_path: Path) -> None:
    """`auto_requeue: false`; saved all the same."""
    job = fit(cluster, tmp_path, case=PAIR, pause=0.3, sets=("trainer.environment={name: slurm, auto_requeue: false}",))
    until_saved(job, tmp_path, 3)
    job.signal("USR1")
    assert job.wait() == "FAILED"
    assert job.shown()["ExitCode"] == "143:0", job.text()
    assert not history(tmp_path, "requeue")
    again = fit(cluster, tmp_path, case=PAIR)
    as_if_nothing_had_happened(references, tmp_path, again, "unknown", restarts=0, case=PAIR)


@pytest.mark.full
def test_a_job_that_may_not_be_requeued_is_told_at_its_start(
    cluster: Cluster, references: References, tmp_path: Path
) -> None:
    job = fit(cluster, tmp_path, "--no-requeue", case=PAIR, pause=0.3)
    until_saved(job, tmp_path, 3)
    assert "warning[requeue-refused]" in job.text()
    job.signal("USR1")
    assert job.wait() == "FAILED"
    assert job.shown()["ExitCode"] == "75:0", job.text()
    assert "does not restart by itself" in job.text()
    again = fit(cluster, tmp_path, case=PAIR)
    as_if_nothing_had_happened(references, tmp_path, again, "unknown", restarts=0, case=PAIR)
