"""The requeuers, with real processes.

`scontrol` and `brequeue` are FAKES here: small scripts on the PATH that record how they were called and
answer as the real ones are documented to. Nothing of a real scheduler is shown by these tests.
"""

from __future__ import annotations

import os
import pkgutil
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fairlead.config_bases import RequeueConfigBase
from fairlead.detect import find_jobs
from fairlead.errors import RunFailedError
from fairlead.interfaces import BuildContext, Requeuer
from fairlead.plugins import default_plugins
from fairlead.testing import minimal_resolution
from fairlead_hpc_signals import (
    CommandRequeueConfig,
    ExitCodeRequeueConfig,
    LSFRequeueConfig,
    NoneRequeueConfig,
    ScriptRequeueConfig,
    SLURMRequeueConfig,
)

SLURM = SLURMRequeueConfig(retry_wait_s=0.0)
LSF = LSFRequeueConfig(retry_wait_s=0.0)
SYSTEM_PATH = "/usr/bin:/bin"


def of(config: RequeueConfigBase, environ: dict[str, str]) -> Requeuer:
    """The requeuer for the job that the installed environments find in these variables."""
    plugins = default_plugins()
    job = next(iter(find_jobs(environ, plugins).values()), None)
    context = BuildContext(replace(minimal_resolution(plugins), job=job), environ, plugins)
    made: Requeuer = pkgutil.resolve_name(str(plugins.of(config).runtime))(config, context)
    return made


class Fake:
    """A FAKE command of a scheduler on a PATH of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir(exist_ok=True)
        self.log = folder / f"{name}.log"
        self.path = self.folder / name

    def answers(self, body: str) -> dict[str, str]:
        """Writes the command; `$N` is the number of this call. Returns the environment that finds it."""
        self.path.write_text(
            f'#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done >> {self.log}\n'
            f"printf -- '--\\n' >> {self.log}\nN=$(grep -c '^--$' {self.log})\n{body}\n"
        )
        self.path.chmod(0o755)
        return {"PATH": f"{self.folder}:{SYSTEM_PATH}"}

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of each call."""
        if not self.log.exists():
            return []
        return [call.splitlines() for call in self.log.read_text().split("--\n")[:-1]]


@pytest.fixture
def scontrol(tmp_path: Path) -> Fake:
    return Fake(tmp_path, "scontrol")


@pytest.fixture
def brequeue(tmp_path: Path) -> Fake:
    return Fake(tmp_path, "brequeue")


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"SLURM_JOB_ID": "17"}, "17"),
        ({"SLURM_JOBID": "17"}, "17"),
        ({"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "0"}, "17_0"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_ID_HET_GROUP_0": "6", "SLURM_JOB_ID_HET_GROUP_1": "7"}, "6"),
    ],
)
def test_slurm_requeues_this_job(variables: dict[str, str], job: str, scontrol: Fake) -> None:
    """With a fake scontrol."""
    environ = {**scontrol.answers("exit 0"), **variables}
    assert of(SLURM, environ).requeue() == f"scontrol requeue {job}"
    assert scontrol.calls == [["requeue", job]]


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"LSB_JOBID": "17"}, "17"),
        ({"LSB_JOBID": "17", "LSB_JOBINDEX": "0"}, "17"),
        ({"LSB_JOBID": "17", "LSB_JOBINDEX": "4"}, "17[4]"),
    ],
)
def test_lsf_requeues_this_job(variables: dict[str, str], job: str, brequeue: Fake) -> None:
    """With a fake brequeue."""
    environ = {**brequeue.answers('echo "Job <$1> is being requeued"'), **variables}
    assert of(LSF, environ).requeue().endswith(f": Job <{job}> is being requeued")
    assert brequeue.calls == [[job]]


def test_a_busy_controller_is_asked_again(scontrol: Fake) -> None:
    body = '[ "$N" -ge 3 ] || { echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }'
    environ = {**scontrol.answers(body), "SLURM_JOB_ID": "17"}
    assert of(SLURM, environ).requeue() == "scontrol requeue 17"
    assert len(scontrol.calls) == 3


def test_after_the_last_attempt_its_words_are_in_the_error(scontrol: Fake) -> None:
    environ = {**scontrol.answers("echo no controller today >&2; exit 1"), "SLURM_JOB_ID": "17"}
    with pytest.raises(RunFailedError, match="after 3 attempts") as caught:
        of(SLURM, environ).requeue()
    assert caught.value.why == "exit code 1: no controller today"
    assert caught.value.where == "scontrol requeue 17"
    assert len(scontrol.calls) == 3


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("Requested operation is presently disabled for job 17", "sbatch --requeue"),
        ("Invalid job id specified", "no longer knows it"),
        ("Access/permission denied for job 17", "requeue: script"),
    ],
)
def test_a_refusal_is_not_asked_again(words: str, fix: str, scontrol: Fake) -> None:
    environ = {**scontrol.answers(f"echo '{words}' >&2; exit 1"), "SLURM_JOB_ID": "17"}
    with pytest.raises(RunFailedError, match="refused") as caught:
        of(SLURM, environ).requeue()
    assert caught.value.why == words
    assert fix in str(caught.value.fix)
    assert len(scontrol.calls) == 1


def test_a_command_that_hangs_is_killed_with_all_it_started(scontrol: Fake, tmp_path: Path) -> None:
    """The grandchild keeps the output open; waiting for it would hang the job until SIGKILL."""
    environ = {**scontrol.answers(f"sleep 600 & echo $! >> {tmp_path}/pids; wait"), "SLURM_JOB_ID": "17"}
    config = SLURMRequeueConfig(timeout_s=2, retries=1, retry_wait_s=0.0)
    with pytest.raises(RunFailedError, match="after 2 attempts") as caught:
        of(config, environ).requeue()
    assert "no answer within 2 s" in str(caught.value.why)
    deadline = time.monotonic() + 60  # the sleeps would run for 600 s; a kill takes effect when the kernel gets to it
    while any(_runs(pid) for pid in (tmp_path / "pids").read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("kind", ["slurm", "lsf"])
def test_without_the_command_the_way_out_is_named(kind: str, tmp_path: Path) -> None:
    """Pain 9: `scontrol` is missing in the container."""
    requeuer = (
        of(SLURM, {"PATH": str(tmp_path), "SLURM_JOB_ID": "17"})
        if kind == "slurm"
        else of(LSF, {"PATH": str(tmp_path), "LSB_JOBID": "17"})
    )
    with pytest.raises(RunFailedError, match="was not found") as caught:
        requeuer.requeue()
    assert "requeue: script" in str(caught.value.fix)


def test_outside_of_a_job_nothing_is_run(scontrol: Fake, brequeue: Fake) -> None:
    environ = scontrol.answers("exit 0") | brequeue.answers("exit 0")
    with pytest.raises(RunFailedError, match="no job of slurm"):
        of(SLURM, environ).requeue()
    with pytest.raises(RunFailedError, match="no job of lsf"):
        of(LSF, environ).requeue()
    assert scontrol.calls == brequeue.calls == []


def test_the_command_gets_the_environment_of_the_job_only(scontrol: Fake) -> None:
    environ = {**scontrol.answers('echo "$SLURM_CONF,$HOME,"'), "SLURM_JOB_ID": "17", "SLURM_CONF": "/etc/x.conf"}
    assert of(SLURM, environ).requeue() == "scontrol requeue 17: /etc/x.conf,,"


def test_a_command_of_the_users_runs_without_a_shell(tmp_path: Path) -> None:
    out = tmp_path / "o u t"
    code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    config = CommandRequeueConfig(argv=(sys.executable, "-c", code, str(out), "$HOME; false"))
    of(config, {"PATH": SYSTEM_PATH}).requeue()
    assert out.read_text() == "$HOME; false"
    with pytest.raises(RunFailedError, match="full path"):
        of(CommandRequeueConfig(argv=("no-such-program",)), {"PATH": SYSTEM_PATH}).requeue()


def test_a_program_that_cannot_be_executed_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    program = tmp_path / "bad"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    config = CommandRequeueConfig(argv=(str(program),), retries=0)
    with pytest.raises(RunFailedError, match="after 1 attempt") as caught:
        of(config, {"PATH": SYSTEM_PATH}).requeue()
    assert "No such file" in str(caught.value.why)


def test_exit_code_and_none_say_what_they_do() -> None:
    requeuer = of(ExitCodeRequeueConfig(code=200), {})
    assert requeuer.exit_code == 200
    assert requeuer.requeue() == "exit code 200 requests a restart"
    assert NoneRequeueConfig().max_requeues is None
    assert of(NoneRequeueConfig(), {}).requeue() == "not requeued (requeue: none)"


def test_a_requeue_that_ended_its_own_command(scontrol: Fake) -> None:
    """Seen on Slurm 22.05: `scontrol requeue` is ended with the job, and the next attempt finds it pending."""
    environ = scontrol.answers('[ $N = 1 ] && kill -TERM $$\necho "Job is pending execution for job 17" >&2; exit 1')
    config = SLURMRequeueConfig(retry_wait_s=0)
    answer = of(config, {**environ, "SLURM_JOB_ID": "17"}).requeue()
    assert "pending" in answer
    assert scontrol.calls == [["requeue", "17"]] * 2


@pytest.mark.parametrize(
    ("variables", "name", "command"),
    [
        (
            {"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"},
            "requeue_17_3.sh",
            ["requeue", "17_3"],
        ),
        ({"LSB_JOBID": "17", "LSB_JOBINDEX": "4"}, "requeue_17_4.sh", ["17[4]"]),
    ],
)
def test_script_is_run_once_by_the_job_script(
    variables: dict[str, str], name: str, command: list[str], scontrol: Fake, brequeue: Fake, tmp_path: Path
) -> None:
    """The job script runs what is in the directory after the step; here a real shell does."""
    directory = tmp_path / "exit scripts"
    answer = of(ScriptRequeueConfig(directory=str(directory)), variables).requeue()
    assert [path.name for path in directory.iterdir()] == [name]
    assert f"wrote {directory / name}" in answer
    assert stat.S_IMODE((directory / name).stat().st_mode) == 0o755
    environ = scontrol.answers("exit 0") | brequeue.answers("exit 0")
    loop = 'for script in "$DIR"/*.sh; do [ -e "$script" ] && "$script"; done; true'
    for _ in range(2):
        subprocess.run(["/bin/sh", "-c", loop], env={**environ, "DIR": str(directory)}, check=True)
    assert scontrol.calls + brequeue.calls == [command]
    assert os.listdir(directory) == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"NSHRUNNER_SUBMIT_EXIT_SCRIPT_DIR": "new", "NSHRUNNER_LSF_EXIT_SCRIPT_DIR": "old"}, "new"),
        ({"NSHRUNNER_LSF_EXIT_SCRIPT_DIR": "old"}, "old"),
        ({"NSHRUNNER_SUBMIT_EXIT_SCRIPT_DIR": "", "NSHRUNNER_LSF_EXIT_SCRIPT_DIR": "old"}, "old"),
    ],
)
def test_the_runners_variables_name_the_directory(environ: dict[str, str], expected: str, tmp_path: Path) -> None:
    """nshrunner's contract, its older name included; the config's own directory comes first."""
    places = {key: str(tmp_path / value) if value else "" for key, value in environ.items()}
    of(ScriptRequeueConfig(), {**places, "SLURM_JOB_ID": "17"}).requeue()
    assert os.listdir(tmp_path) == [expected]
    own = tmp_path / "own"
    of(ScriptRequeueConfig(directory=str(own)), {**places, "SLURM_JOB_ID": "17"}).requeue()
    assert os.listdir(own) == ["requeue_17.sh"]


def test_script_with_a_command_needs_no_scheduler(tmp_path: Path) -> None:
    argv = ("touch", str(tmp_path / "it's done"))
    of(ScriptRequeueConfig(directory=str(tmp_path / "d"), argv=argv), {}).requeue()
    subprocess.run([tmp_path / "d" / "requeue_job.sh"], check=True)
    assert (tmp_path / "it's done").exists()


def test_script_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="no directory") as caught:
        of(ScriptRequeueConfig(), {"SLURM_JOB_ID": "17"}).requeue()
    assert "NSHRUNNER_SUBMIT_EXIT_SCRIPT_DIR" in str(caught.value.why)
    with pytest.raises(RunFailedError, match="nothing for the script to run"):
        of(ScriptRequeueConfig(directory=str(tmp_path)), {}).requeue()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailedError, match="cannot be written") as caught:
        of(ScriptRequeueConfig(directory=str(tmp_path / "file")), {"SLURM_JOB_ID": "17"}).requeue()
    assert os.listdir(tmp_path) == ["file"]
