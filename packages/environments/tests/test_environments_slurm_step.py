"""What is a task of a SLURM step, and what only looks like one (FIELD.md, pain 6)."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fairlead.detect import ChosenEnvironment
from fairlead_environments.slurm.step import find_step

Choose = Callable[[Mapping[str, str]], ChosenEnvironment]
Recorded = Callable[[str], dict[str, str]]


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_PROCID", "SLURM_JOB_ID"])
def test_leaked_variables_are_no_step(missing: str, recorded: Recorded) -> None:
    """Part of a task's variables, as in an ssh session or a container: no claim."""
    environ = recorded("slurm/srun.direct.1")
    environ[missing] = ""
    environ.pop("SLURM_STEPID")
    assert find_step(environ) is None


def test_a_job_submitted_from_a_step_does_not_inherit_the_claim(recorded: Recorded) -> None:
    """`sbatch` inside a step hands on the step's variables; the node tells that they are another job's."""
    environ = {**recorded("slurm/srun.direct.3"), **recorded("slurm/sbatch.batch"), "SLURMD_NODENAME": "n7"}
    assert find_step(environ) is None


def test_the_interactive_step_of_salloc_is_no_step(recorded: Recorded) -> None:
    """With `LaunchParameters=use_interactive_step`, salloc's shell is step 4294967290."""
    environ = {**recorded("slurm/srun.direct.0"), "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_PTY_PORT": "1"}
    assert find_step(environ) is None


def test_srun_typed_in_a_pty_shell_is_a_step(recorded: Recorded) -> None:
    """It inherits SLURM_PTY_PORT; srun adds variables of its own inside an existing allocation."""
    environ = {**recorded("slurm/sbatch.srun.1"), "SLURM_PTY_PORT": "38717"}
    assert find_step(environ) is not None


def test_python_as_the_task_of_srun_pty_is_a_step(recorded: Recorded) -> None:
    """`srun --pty python train.py`: the process itself is the task, not a shell around it."""
    environ = recorded("slurm/srun.pty")
    assert find_step({**environ, "SLURM_TASK_PID": str(os.getpid())}) is not None
    assert find_step(environ) is None


PROBE = "import os; from fairlead_environments.slurm.step import find_step; print(find_step(os.environ))"


def run_in_task(recorded: Recorded, *, terminal: bool, name: str = "slurm/srun.pty") -> str:
    """Runs the probe as a command of a shell that is a task of a step, with a terminal or without."""
    environ = {**os.environ, **recorded(name), "SLURM_PTY_PORT": "38717", "PROBE": PROBE, "PYTHON": sys.executable}
    # The first shell sets the variable, as slurmstepd would; the second is the task; Python is its child.
    script = 'SLURM_TASK_PID=$$ exec sh -c \'"$PYTHON" -c "$PROBE"; true\''
    if not terminal:
        return subprocess.run(
            ["sh", "-c", script], env=environ, capture_output=True, text=True, check=True, start_new_session=True
        ).stdout.strip()
    pid, master = pty.fork()
    if pid == 0:  # pragma: no cover - the child
        os.execve("/bin/sh", ["sh", "-c", script], environ)
    output = b""
    try:
        while chunk := os.read(master, 4096):
            output += chunk
    except OSError:  # the terminal is gone when its last process ends
        pass
    os.close(master)
    assert os.waitpid(pid, 0)[1] == 0, output.decode()
    return output.decode().strip()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_shell_with_a_terminal_is_not_a_step_even_inside_an_allocation(recorded: Recorded) -> None:
    """Real processes: `salloc`, then `srun --pty bash` in it, where the variables alone cannot tell."""
    assert run_in_task(recorded, terminal=True, name="slurm/salloc.srun.0") == "None"
    assert run_in_task(recorded, terminal=True) == "None"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_script_without_a_terminal_is_a_step(recorded: Recorded) -> None:
    """Real processes: `srun ./train.sh` typed in a --pty shell; the task is a shell, Python its child."""
    assert run_in_task(recorded, terminal=False, name="slurm/salloc.srun.0") == "SLURM_STEP_ID=0, SLURM_PROCID=0"
    assert run_in_task(recorded, terminal=False) == "SLURM_STEP_ID=0, SLURM_PROCID=0"


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29400",
}


def test_torchrun_in_a_step_is_torchrun(recorded: Recorded, choose: Choose) -> None:
    """One torchrun per node, started by srun; the agent is the nearer parent."""
    chosen = choose({**recorded("slurm/srun.direct.3"), **TORCHRUN})
    assert chosen.setting.value == "torchelastic"
    assert "slurm" in chosen.setting.reason
    assert not chosen.findings
    assert chosen.topology is not None
    assert chosen.topology.global_rank is not None
    assert chosen.topology.global_rank.value == 3


def test_mpirun_in_an_allocation_is_mpi(recorded: Recorded, choose: Choose) -> None:
    """Open MPI starts its daemons with srun, so its ranks see a step too."""
    mpirun = {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
    }
    chosen = choose({**recorded("slurm/srun.direct.3"), **mpirun})
    assert chosen.setting.value == "mpi"
    assert chosen.topology is not None
    assert chosen.topology.main_address is not None
    assert chosen.topology.main_address.value == "n1"


def test_an_environment_can_be_named_by_variable(recorded: Recorded, choose: Choose) -> None:
    chosen = choose({**recorded("slurm/srun.direct.3"), "FAIRLEAD_ENVIRONMENT": "lightning"})
    assert (chosen.setting.value, chosen.setting.reason) == ("lightning", "FAIRLEAD_ENVIRONMENT")
