"""What `fairlead submit` writes for SLURM and LSF: run by bash, with stand-ins of the schedulers' commands."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fairlead.errors import ConfigError, RunFailedError
from fairlead_launch.submission import Request, Submitter
from fairlead_launch.submission.lsf import LSFSubmitter, LSFSubmitterConfig
from fairlead_launch.submission.requests import NETWORKS, variables
from fairlead_launch.submission.slurm import SLURMSubmitter, SLURMSubmitterConfig

NASTY = 'it\'s a "run"; $(touch owned) `touch owned`'


def request(folder: Path, **settings: Any) -> Request:
    """A run on two nodes with two devices each."""
    given = {"nodes": 2, "devices_per_node": 2, "cwd": folder, "logs": folder / "logs", **settings}
    return Request("sine", folder / "1", (folder / "1/job.yaml",), (folder / "runs/sine",), **given)


def slurm(**settings: Any) -> SLURMSubmitter:
    return SLURMSubmitter(SLURMSubmitterConfig(**settings), os.environ)


def lsf(**settings: Any) -> LSFSubmitter:
    return LSFSubmitter(LSFSubmitterConfig(**settings), os.environ)


def options(submitter: Submitter, asked: Request) -> list[str]:
    """The options in the script."""
    (text,) = submitter.render(asked).values()
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True).stderr == ""
    return [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith(("#SBATCH ", "#BSUB "))]


def programs(folder: Path, **bodies: str) -> dict[str, str]:
    """Stand-ins of commands on a PATH of their own; each notes its words in NAME.calls."""
    folder.mkdir(exist_ok=True)
    for name, body in bodies.items():
        file = folder / name
        file.write_text(f'#!/bin/bash\necho "$*" >> "$0.calls"\n{body}\n')
        file.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder)}


def calls(folder: Path, name: str) -> list[str]:
    file = folder / f"{name}.calls"
    return file.read_text().splitlines() if file.exists() else []


# -- what is asked for


def test_a_task_for_each_gpu_of_several_nodes(tmp_path: Path) -> None:
    """Four nodes of eight GPUs, as the documents have it."""
    script = options(slurm(time="24:00:00", account="x"), request(tmp_path, nodes=4, devices_per_node=8, gpus=True))
    assert {"--nodes=4", "--gpus-per-node=8", "--ntasks-per-node=8", "--time=1-00:00:00", "--account=x"} <= set(script)
    assert {"--signal=USR1@120", "--open-mode=append", "--requeue", "--job-name=sine"} <= set(script)
    by_task = options(slurm(gpus="task"), request(tmp_path, gpus=True))
    assert "--gpus-per-task=1" in by_task
    assert not [one for one in by_task if "gpus-per-node" in one]
    by_gres = options(slurm(gpus="none", extra={"gres": "gpu:a100:2"}), request(tmp_path, gpus=True))
    assert "--gres=gpu:a100:2" in by_gres


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_cpus_with_threads(tmp_path: Path, nodes: int) -> None:
    """One task for each node, with so many CPUs; no GPUs."""
    asked = request(tmp_path, nodes=nodes, devices_per_node=1, cpus_per_device=16, host_memory_gib=64.0)
    (text,) = slurm().render(asked).values()
    assert {f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=16", "--mem=65536M"} <= set(
        options(slurm(), asked)
    )
    assert "gpu" not in text
    assert "export SRUN_CPUS_PER_TASK=16" in text
    on_lsf = options(lsf(time="24:00:00"), asked)
    assert {f"-n {nodes}", "-R 'span[ptile=1] affinity[core(16)] rusage[mem=64GB]'", "-W 1440"} <= set(on_lsf)


def test_lsf_gets_what_slurm_gets(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"partition": "gpu", "account": "x", "dependency": "done(7)", "constraint": "select[ib]"}
    script = options(lsf(**settings), request(tmp_path, gpus=True, indices=(1, 2), max_parallel=1))
    assert {"-J 'sine[1-2]%1'", "-n 4", "-gpu num=2", "-q gpu", "-P x", "-w 'done(7)'", "-r", "-Q 75"} <= set(script)
    assert "-R 'span[ptile=2] select[ib]'" in script
    assert "-wt 2" not in options(lsf(time="00:02:00"), request(tmp_path))  # bsub refuses it


def test_further_options_take_the_place_of_our_own(tmp_path: Path) -> None:
    script = options(
        slurm(extra={"open_mode": None, "nice": 100, "exclusive": True, "nodes": "2-4"}), request(tmp_path)
    )
    assert {"--nice=100", "--exclusive", "--nodes=2-4"} <= set(script)
    assert not [one for one in script if "open-mode" in one or one == "--nodes=2"]


def test_a_value_is_a_value_whatever_it_holds(tmp_path: Path) -> None:
    """Nothing of it is run, and no option is added by it."""
    bin = tmp_path / "bin"
    environ = programs(bin, srun='printf "%s\\n" "$SAID" "${@: -1}"', scontrol="")
    config: dict[str, Any] = {"setup": ["true"], "env": {"SAID": f"{NASTY}\nline"}, "extra": {"comment": NASTY}}
    asked = request(tmp_path, variables=variables(SLURMSubmitterConfig(**config)))
    (text,) = slurm(**config).render(asked).values()
    done = subprocess.run(["bash", "-c", text], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert done.stdout == f"{NASTY}\nline\n{tmp_path}/1/job.yaml\n", done.stderr
    assert not (tmp_path / "owned").exists()
    with pytest.raises(ConfigError, match="line break"):
        slurm(extra={"comment": "a\n#SBATCH --account=other"}).render(request(tmp_path))


def test_containers_modules_and_one_task_a_node(tmp_path: Path) -> None:
    image: dict[str, Any] = {"image": "a b.sif", "mounts": ["/data"]}
    (text,) = slurm(container=image, modules=["cuda/12.4"]).render(request(tmp_path, gpus=True)).values()
    assert "module load cuda/12.4" in text
    assert f"srun apptainer exec --nv --bind {tmp_path}" in text
    assert f"--bind /data --pwd {tmp_path} 'a b.sif' fairlead fit {tmp_path}/1/job.yaml" in text
    (text,) = slurm(container={**image, "runtime": "pyxis"}).render(request(tmp_path)).values()
    assert "srun '--container-image=a b.sif' --container-mounts=" in text
    node = slurm(tasks="node").render(request(tmp_path, gpus=True, cpus_per_device=4, command=["python", "-m", "x"]))
    assert "#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=8\n#SBATCH --gpus-per-node=2" in node["job.sh"]
    assert "srun python -m x launch --nproc=2 -m fairlead fit " in node["job.sh"]


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.j2"
    own.write_text("#!/bin/bash\n#SBATCH --nodes={{ request.nodes }}\nsrun {{ command }} {{ submit.account }}\n")
    (text,) = slurm(template="own.j2", account="a b").render(request(tmp_path)).values()
    assert text == f"#!/bin/bash\n#SBATCH --nodes=2\nsrun fairlead fit {tmp_path}/1/job.yaml 'a b'\n"
    own.write_text("{{ comand }}")
    with pytest.raises(ConfigError) as wrong:
        slurm(template="own.j2").render(request(tmp_path))
    assert "it may use: command" in str(wrong.value.fix)
    with pytest.raises(ConfigError, match="cannot be read"):
        slurm(template="no.j2").render(request(tmp_path))


@pytest.mark.parametrize(
    ("doctor", "restarts", "started", "code"),
    [(0, 0, True, 0), (75, 1, False, 0), (143, 1, False, 0), (1, 0, False, 1), (2, 0, False, 2)],
)
def test_nodes_are_looked_at_before_a_rank_starts(
    tmp_path: Path, doctor: int, restarts: int, started: bool, code: int
) -> None:
    """Requeued without a bad node the script ends with 0, also where the requeue has killed the doctor."""
    bin = tmp_path / "bin"
    shown = f'echo "JobId=7 UserId=me Restarts={restarts} JobState=RUNNING X=1"'
    environ = programs(bin, srun=f'case "$*" in *doctor*) exit {doctor};; esac', scontrol=shown)
    asked = request(tmp_path, nodes=3, gpus=True, excluded=("n4",))
    submitter = slurm(screen=True, gpus="task", exclude="n[7-8]", requeue="expedite")
    assert "--exclude='n[7-8],n4'" in options(submitter, asked)
    (text,) = submitter.render(asked).values()
    environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    done = subprocess.run(["bash", "-c", text], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    first, *rest = calls(bin, "srun")
    own = "--ntasks=3 --ntasks-per-node=1 --kill-on-bad-exit=0 --gpus-per-task=2"
    assert first == f"{own} fairlead doctor --nodes {tmp_path}/1/job.yaml"
    assert rest == ([f"fairlead fit {tmp_path}/1/job.yaml"] if started else [])
    assert done.returncode == code, done.stderr


def test_a_template_that_leaves_the_screen_out_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.j2"
    own.write_text("#!/bin/bash\nsrun {{ command }}\n")
    with pytest.raises(ConfigError, match="does not have the nodes looked at"):
        slurm(template="own.j2", screen=True).render(request(tmp_path))
    own.write_text("#!/bin/bash\nsrun {{ screen }} || exit\nsrun {{ command }}\n")
    assert "doctor --nodes" in slurm(template="own.j2", screen=True).render(request(tmp_path))["job.sh"]


def test_a_network_is_its_variables_and_the_jobs_own_come_before_them() -> None:
    for name, network in NETWORKS.items():
        given: dict[str, Any] = {"network": name, "env": {"NCCL_SOCKET_IFNAME": "ib0", "DEBUG": True}}
        assert variables(SLURMSubmitterConfig(**given)) == {
            **network,
            "NCCL_SOCKET_IFNAME": "ib0",
            "DEBUG": "1",
        }
    with pytest.raises(ConfigError, match="the secret WANDB_API_KEY would be written"):
        variables(SLURMSubmitterConfig(env={"WANDB_API_KEY": "x"}))


# -- what the scripts do


@pytest.mark.parametrize(
    ("ranks", "restarts", "state", "refused", "requeue", "code", "asked"),
    [
        (0, 0, "RUNNING", 0, True, 0, False),
        (1, 0, "RUNNING", 0, True, 1, False),
        (75, 1, "PENDING", 0, True, 0, False),  # the ranks have requeued it
        (137, 1, "COMPLETING", 0, "expedite", 0, False),  # SLURM has killed them while it requeued
        (75, 0, "RUNNING", 0, True, 0, True),  # they could not: a container
        (75, 0, "RUNNING", 1, True, 75, True),  # nobody may
        (75, 0, "RUNNING", 1, "expedite", 1, True),  # 75 never reaches SLURM there
        (75, 0, "COMPLETING", 0, True, 75, False),  # a person has cancelled it
        (143, 0, "COMPLETING", 0, "expedite", 143, False),
        (75, 0, "RUNNING", 0, False, 75, False),
    ],
)
def test_what_slurm_hears_of_a_stop(
    tmp_path: Path, ranks: int, restarts: int, state: str, refused: int, requeue: Any, code: int, asked: bool
) -> None:
    """0 wherever the job starts again, so that no other code of the script parks it."""
    shown = f"JobId=7 JobName=a JobState=RUNNING b UserId=x(0) JobState={state} Restarts={restarts} BatchFlag=1"
    scontrol = f'if [ "$1" = requeue ]; then exit {refused}; fi; echo "{shown}"'
    environ = programs(tmp_path / "bin", srun=f"exit {ranks}", scontrol=scontrol)
    (text,) = slurm(requeue=requeue).render(request(tmp_path)).values()
    done = subprocess.run(
        ["bash", "-c", text], env={**environ, "SLURM_JOB_ID": "7"}, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == code, done.stderr
    assert ("requeue 7" in calls(tmp_path / "bin", "scontrol")) == asked


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_signal_to_the_script_reaches_the_ranks(tmp_path: Path, name: str) -> None:
    """As USR1: srun kills its tasks on SIGTERM. The script waits for the step to end, however long it saves."""
    srun = "trap 'sleep 0.3; exit 75' USR1; touch up; while :; do sleep 0.05; done"
    environ = programs(
        tmp_path / "bin", srun=srun, scontrol='[ "$1" = requeue ] || echo " JobState=RUNNING Restarts=0"'
    )
    (text,) = slurm().render(request(tmp_path)).values()
    environ |= {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    process = subprocess.Popen(["bash", "-c", text], env=environ, cwd=tmp_path)
    until = time.monotonic() + 20
    while not (tmp_path / "up").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.Signals[name])
    assert process.wait(20) == 0
    assert "requeue 5_2" in calls(tmp_path / "bin", "scontrol")


def test_lsf_hears_75_of_a_stop(tmp_path: Path) -> None:
    environ = programs(tmp_path / "bin", blaunch="trap 'exit 75' USR2; touch up; while :; do sleep 0.05; done")
    (text,) = lsf().render(request(tmp_path)).values()
    process = subprocess.Popen(["bash", "-c", text], env=environ, cwd=tmp_path, start_new_session=True)
    until = time.monotonic() + 20
    while not (tmp_path / "up").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGUSR2)  # as LSF does: to all processes of the job
    assert process.wait(20) == 75


# -- the schedulers' commands


def test_sbatch_takes_it_or_says_why_not(tmp_path: Path) -> None:
    bin = tmp_path / "bin"
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n")
    submitter = SLURMSubmitter(
        SLURMSubmitterConfig(), programs(bin, sbatch='echo "a word of the site"; echo "17;main"')
    )
    assert submitter.submit(request(tmp_path), [script]) == "17"
    assert calls(bin, "sbatch") == [f"--parsable {script}"]
    programs(bin, sbatch='echo "sbatch: error: Invalid account" >&2; exit 1')
    with pytest.raises(RunFailedError) as refused:
        submitter.submit(request(tmp_path), [script])
    assert "Invalid account" in str(refused.value.why)
    on_lsf = LSFSubmitter(
        LSFSubmitterConfig(), programs(bin, bsub='cat > "$0.in"; echo "Job <18> is submitted to queue."')
    )
    assert on_lsf.submit(request(tmp_path), [script]) == "18"
    assert (bin / "bsub.in").read_text() == "#!/bin/bash\n"
    with pytest.raises(RunFailedError, match="not on the PATH"):
        SLURMSubmitter(SLURMSubmitterConfig(), {"PATH": ""}).submit(request(tmp_path), [script])


@pytest.mark.parametrize(
    ("squeue", "sacct", "phase", "reason"),
    [
        ("PENDING|BeginTime|N/A|1:00|1|", "", "queued", "BeginTime"),
        ("PENDING|JobHeldUser|N/A|1:00|1|", "", "queued", "JobHeldUser: `scontrol release` lets it start"),
        ("COMPLETED|None|N/A|1:00|0|n1\\nRUNNING|None|N/A|1:00|0|n2\\n", "", "running", ""),
        ("", "COMPLETED|0:0|a|b|n1\\nCANCELLED by 0|0:0|a|b|n1\\n", "cancelled", ""),
        ("", "OUT_OF_MEMORY|0:125|a|b|n1\\n", "failed", ""),
        ("", "", "unknown", "SLURM has forgotten the job"),
    ],
)
def test_what_slurm_says_of_a_job(tmp_path: Path, squeue: str, sacct: str, phase: str, reason: str) -> None:
    environ = programs(tmp_path / "bin", squeue=f"printf '{squeue}'", sacct=f"printf '{sacct}'")
    state = SLURMSubmitter(SLURMSubmitterConfig(), environ).state("17")
    assert (state.phase, state.reason) == (phase, reason)


@pytest.mark.parametrize(
    ("said", "phase"),
    [("RUN|-|-", "running"), ("PEND|-|New job", "queued"), ("EXIT|TERM_OWNER: killed|-", "cancelled"), ("", "unknown")],
)
def test_what_lsf_says_of_a_job(tmp_path: Path, said: str, phase: str) -> None:
    environ = programs(tmp_path / "bin", bjobs=f"echo '{said}'", bkill="true")
    submitter = LSFSubmitter(LSFSubmitterConfig(), environ)
    assert submitter.state("17").phase == phase
    submitter.cancel(submitter.member("17", 2))
    assert calls(tmp_path / "bin", "bkill") == ["17[2]"]
