"""The requeuer `chain`, and what its batch scripts hold; `squeue` and `scancel` are FAKES here.

`integration_tests/slurm/test_status_on_slurm.py` runs a chain on a real SLURM.
"""

from __future__ import annotations

import os
import stat
import subprocess
import warnings
from pathlib import Path

import pytest

from fairlead.detect import choose_requeuer, find_jobs
from fairlead.errors import RunFailedError
from fairlead.plugins import default_plugins
from fairlead_hpc_signals import PreemptionGuard, SignalFlags, StopOutcome
from fairlead_hpc_signals.chain import ChainRequeueConfig, ChainRequeuer, chain
from fairlead_hpc_signals.programs import UnansweredError
from fairlead_runs.chain import CHAIN, chain_begin, chain_end, chain_name, chain_options
from fairlead_runs.switches import STOP

IN_CHAIN = {"SLURM_JOB_ID": "17", CHAIN: "gpt-1"}


def fake(folder: Path, name: str, body: str) -> dict[str, str]:
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {**IN_CHAIN, "PATH": f"{folder}:/usr/bin:/bin"}


def requeuer(environ: dict[str, str]) -> ChainRequeuer:
    return ChainRequeuer(ChainRequeueConfig(), environ)


def test_the_next_job_is_named(tmp_path: Path) -> None:
    """Nothing is called but a question."""
    environ = fake(tmp_path, "squeue", "echo 18; echo 19")
    assert requeuer(environ).requeue() == "job 18 of the chain gpt-1 is next, of 2 left"
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call == f"--noheader --user={os.getuid()} --name=gpt-1 -t PENDING --format=%i"


def test_the_last_of_a_chain_says_so(tmp_path: Path) -> None:
    """A stop there is saved, but nothing starts it again: not to be passed over in silence."""
    with pytest.raises(RunFailedError, match="the last one of its chain"):
        requeuer(fake(tmp_path, "squeue", "")).requeue()
    with pytest.raises(UnansweredError, match="does not say"):
        requeuer(fake(tmp_path, "squeue", "exit 1")).requeue()
    with pytest.raises(RunFailedError, match="which chain"):
        requeuer({"PATH": ""}).requeue()


def test_a_persons_stop_cancels_the_rest(tmp_path: Path) -> None:
    """Else the next job would go on; where it cannot be cancelled, the file stays, so that the next one stops, too."""

    def stop(environ: dict[str, str]) -> StopOutcome:
        (tmp_path / STOP).touch()
        with PreemptionGuard(environ={}, flags=SignalFlags()) as guard:
            guard.start()
            guard.watch_switches(tmp_path)
            assert guard.should_stop()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is said in `told`, too
                return guard.save_and_requeue(lambda: None, requeuer(environ))

    outcome = stop(fake(tmp_path, "scancel", ""))
    assert (outcome.exit_code, outcome.error) == (143, None)
    assert (tmp_path / "calls").read_text() == f"--user={os.getuid()} --name=gpt-1 -t PENDING\n"
    assert not (tmp_path / STOP).exists()
    (tmp_path / "scancel").unlink()
    outcome = stop({**IN_CHAIN, "PATH": str(tmp_path)})
    assert "It restarts all the same" in outcome.summary()
    assert "scancel is not on the PATH" in outcome.summary()
    assert (tmp_path / STOP).exists()


def test_in_a_container_the_next_starts_all_the_same() -> None:
    assert "squeue is not on the PATH" in requeuer({**IN_CHAIN, "PATH": "/nowhere"}).requeue()


def test_a_job_of_a_chain_is_not_requeued_as_well() -> None:
    """`requeue: auto` takes it before SLURM's own."""
    plugins = default_plugins()
    environ = {**IN_CHAIN, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    assert chain.evidence({}) is None
    assert choose_requeuer("slurm", find_jobs(environ, plugins), environ, plugins) == ("chain", f"{CHAIN} is set")


@pytest.mark.parametrize(("code", "cancels"), [(0, True), (1, False), (2, True), (75, False), (93, True), (143, False)])
def test_the_batch_script_cancels_what_is_of_no_use_any_more(tmp_path: Path, code: int, cancels: bool) -> None:
    """A real shell; after a crash, 1, the next job tries again, and 143 may be srun's word for any end of a rank."""
    environ = fake(tmp_path, "scancel", "")
    script = f"{chain_begin('gpt-1')}\n(exit {code})\n{chain_end()}\n"
    assert subprocess.run(["bash", "-c", script], env=environ).returncode == code
    calls = tmp_path / "calls"
    user = subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
    assert (calls.read_text() if calls.exists() else "") == (
        f"--user={user} --name=gpt-1 --state=PENDING\n" if cancels else ""
    )


def test_the_name_is_no_other_runs() -> None:
    """SLURM takes all of a user's jobs of one name for one chain."""
    one, other = chain_name(Path("/a/gpt")), chain_name(Path("/b/gpt"))
    assert one != other
    assert one.startswith("gpt-")
    assert chain_options(one)["dependency"] == "singleton"
