"""Is this process a task of a SLURM job step, or does it merely live inside an allocation?

An allocation's variables are also in the batch script, in the shell of `salloc` (on the login node!) and in notebooks.
Only a task that `srun` started has SLURM_STEP_ID and SLURM_PROCID; those that are an interactive shell are sorted out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fairlead import Unused
from fairlead.hostlist import expand
from fairlead.variables import present, text

_EVIDENCE = ("SLURM_JOB_ID", "SLURM_PROCID")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Ids from here on are no steps of tasks: the batch script, the interactive step of `salloc`, `extern`."""


def find_step(environ: Mapping[str, str]) -> str | None:
    """The evidence that this process is a task of a step; None when it is not."""
    step = text(environ, *_STEP)
    if step is None or not present(environ, _EVIDENCE):
        return None
    if step.value.isdigit() and int(step.value) >= _FIRST_SPECIAL_STEP:
        return None
    if not _on_a_node_of_the_step(environ) or _is_interactive(environ):
        return None
    return f"{step.reason}={step.value}, SLURM_PROCID={environ['SLURM_PROCID'].strip()}"


def _on_a_node_of_the_step(environ: Mapping[str, str]) -> bool:
    """False when the step's variables were inherited from another job, as through `sbatch` inside a step."""
    node = text(environ, "SLURMD_NODENAME")
    nodes = text(environ, "SLURM_STEP_NODELIST")
    if node is None or nodes is None:
        return True
    try:
        return node.value in expand(nodes.value)
    except ValueError:  # fairlead_topology names the malformed variable
        return True


def _is_interactive(environ: Mapping[str, str]) -> bool:
    """Whether the task is a shell of `srun --pty`, in which this process was typed.

    An `srun` typed there starts a real step, whose tasks inherit SLURM_PTY_PORT, but have no terminal. Where the task
    cannot be looked at, what srun adds only inside an existing allocation has to do.
    """
    if text(environ, "SLURM_PTY_PORT") is None:
        return False
    task = text(environ, "SLURM_TASK_PID")
    if task is not None and task.value == str(os.getpid()):  # `srun --pty python train.py`
        return False
    terminal = _task_has_terminal(environ)
    if terminal is not None:
        return terminal
    return text(environ, "SLURM_DISTRIBUTION", "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0") is None


def _task_has_terminal(environ: Mapping[str, str]) -> bool | None:
    """Whether the process that SLURM started for this task has a controlling terminal.

    None when that process is not to be seen here: another PID namespace, another machine (a recorded environment),
    another user, or a PID that now belongs to something else.
    """
    task = text(environ, "SLURM_TASK_PID")
    if task is None or not task.value.isdigit():
        return None
    try:
        started_with = Path("/proc", task.value, "environ").read_bytes().split(b"\0")
        stat = Path("/proc", task.value, "stat").read_text()
    except OSError:
        return None
    same = ("SLURM_TASK_PID", "SLURM_JOB_ID", *_STEP)
    if not all(f"{name}={environ[name]}".encode() in started_with for name in same if name in environ):
        return None
    # Field 7 is the terminal's device, 0 for none; the name in field 2 may hold blanks and parentheses.
    terminal: str = stat.rpartition(")")[2].split()[4]
    return terminal != "0"


def idle_allocation(environ: Mapping[str, str]) -> Unused | None:
    """What an allocation holds that this process, which is no task of a step, leaves unused; None: nothing."""
    if text(environ, "SLURM_JOB_ID") is None or find_step(environ) is not None:
        return None
    nodes = text(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    tasks = text(environ, "SLURM_NTASKS", "SLURM_NPROCS")
    parts = [
        f"{found.value} {noun} ({found.reason})"
        for found, noun in ((nodes, "nodes"), (tasks, "tasks"))
        if found is not None and found.value.isdigit() and int(found.value) > 1
    ]
    if not parts:
        return None
    why = "this process is no task of a step: srun did not start it"
    return Unused(f"SLURM allocated {' and '.join(parts)}", why, "srun")
