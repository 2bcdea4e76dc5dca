"""Where the ranks come from and who starts the job again are two questions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fairlead import TrainerConfig
from fairlead.plugins import PluginManager
from fairlead.resolve import resolve
from fairlead_hpc_signals import LSFRequeueConfig, NoneRequeueConfig, PreemptionGuard, SLURMRequeueConfig
from fairlead_hpc_signals.stopping import build, stop_signals

BATCH = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n1", "SLURM_NNODES": "1"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({}, ("none", "no scheduler to ask")),
        (BATCH, ("slurm", "this is the job slurm:17")),
        ({**BATCH, "SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "3"}, ("slurm", "this is the job slurm:17")),
        ({**BATCH, **TORCHRUN}, ("slurm", "this is the job slurm:17")),
        ({**BATCH, "SLURM_PTY_PORT": "4711"}, ("none", "no scheduler to ask")),
        ({"LSB_JOBID": "5", "LSB_JOBINDEX": "0"}, ("lsf", "this is the job lsf:5")),
        (
            {**BATCH, "NSHRUNNER_SUBMIT_EXIT_SCRIPT_DIR": "/x"},
            ("script", "NSHRUNNER_SUBMIT_EXIT_SCRIPT_DIR is set"),
        ),
    ],
)
def test_the_requeuer_is_found_apart_from_the_launcher(environ: dict[str, str], chosen: tuple[str, str]) -> None:
    """A plain `python train.py` in a batch script, torchrun inside one, a job runner's own way."""
    resolution = resolve(TrainerConfig(accelerator="cpu"), environ=environ, plugins=PluginManager())
    setting = resolution.settings["requeue"]
    assert (setting.value, setting.reason) == chosen


def test_the_signals_that_ask_for_a_stop() -> None:
    usual = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
    assert stop_signals(SLURMRequeueConfig(), {}) == usual
    named = {"NSHRUNNER_SUBMIT_TIMEOUT_SIGNAL": "SIGURG", "NSHRUNNER_SUBMIT_PREEMPT_SIGNAL": "USR2"}
    assert set(stop_signals(LSFRequeueConfig(), named)) == {*usual, "SIGURG", "USR2"}
    assert stop_signals(SLURMRequeueConfig(signals=("SIGUSR1",)), named) == ("SIGUSR1", "SIGTERM", "SIGINT")


def test_the_guard_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the config says of stops is what the guard does; torch is not needed for it."""
    context: Any = SimpleNamespace(environ={})
    config = SLURMRequeueConfig(when_unknown="stop", limit_window_s=1800.0, short_s=5.0)
    guard = build(config, context)
    assert isinstance(guard, PreemptionGuard)
    policy = guard.policy
    assert (policy.auto_requeue, policy.requeue_unknown) == (True, False)
    assert (policy.limit_window_s, policy.short_s) == (1800.0, 5.0)
    assert not build(NoneRequeueConfig(), context).policy.auto_requeue
    assert build(config, context, guard.flags).flags is guard.flags
