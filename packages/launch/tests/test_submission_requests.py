"""What follows for a job from how it is submitted, and what is known of code that was."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from fairlead import JobConfig, PluginManager
from fairlead.errors import ConfigError
from fairlead.jobs import load_config
from fairlead.testing import FakeEntryPoint, stand_ins
from fairlead_launch.submission import slurm
from fairlead_launch.submission.plan import job_of
from fairlead_launch.submission.requests import frozen, hardware, with_requeuer
from fairlead_runs import code_change

PLUGINS = PluginManager(
    [FakeEntryPoint(name, target) for name, target in {**stand_ins(), "submitter.slurm": slurm.slurm}.items()]
)
CONTAINER = {"container": {"image": "a.sif"}}


def job(submit: dict[str, Any], **trainer: Any) -> JobConfig:
    data = {"run": {"name": "a"}, "model": "m:Net", "trainer": trainer, "submit": {"to": "slurm", **submit}}
    return JobConfig.model_validate(data, context={"plugins": PLUGINS})


@pytest.mark.parametrize(
    ("submit", "trainer", "warn_s", "requeue"),
    [
        ({}, {}, 120, None),
        # A warning that comes earlier than a time limit is near: else the stop would have another reason.
        ({}, {}, 1800, {"name": "slurm", "limit_window_s": 1920.0}),
        ({}, {"requeue": {"name": "none"}}, 1800, {"name": "none", "limit_window_s": 1920.0}),
        ({}, {"requeue": {"name": "none", "limit_window_s": 3600}}, 1800, {"name": "none", "limit_window_s": 3600.0}),
        # `scontrol` is not in the image: the script outside of it asks.
        (CONTAINER, {}, 120, {"name": "exit_code"}),
        (CONTAINER, {}, 1800, {"name": "exit_code", "limit_window_s": 1920.0}),
        ({**CONTAINER, "requeue": False}, {}, 120, None),
    ],
)
def test_how_a_submitted_job_is_started_again(
    tmp_path: Path, submit: dict[str, Any], trainer: dict[str, Any], warn_s: int, requeue: dict[str, Any] | None
) -> None:
    loaded = load_config(job(submit, **trainer), "the job", PLUGINS, tmp_path, {}, default_name="a")
    known = ["slurm", "exit_code", "none"]
    data = with_requeuer(frozen(loaded, ["/code"], tmp_path), job_of(loaded), warn_s, known)
    given = data["trainer"]["requeue"]
    assert (given if requeue is None else {name: given[name] for name in requeue}) == (requeue or "auto")
    assert (data["run"]["code"], data["run"]["dir"]) == (["/code"], str(tmp_path / "runs"))


def test_the_hardware_is_that_of_the_trainer_where_there_are_no_resources() -> None:
    found = hardware(job({}, accelerator="cpu", devices=3, num_nodes=2))
    assert (found.nodes, found.devices_per_node, found.device) == (2, 3, "cpu")
    assert hardware(job({}, accelerator="cpu")).devices_per_node == 1
    with pytest.raises(ConfigError, match="does not say on what"):
        hardware(job({}))


def test_copies_are_compared_by_what_is_in_them() -> None:
    """Two submissions of one commit may differ in files that git does not track."""

    def copied(digest: str, diff: str = "") -> dict[str, Any]:
        return {"commit": "abc", "diff": diff, "untracked": ["new.py"], "snapshot": {"digest": digest}}

    assert code_change(copied("1"), copied("1")).changed is False
    assert code_change(copied("1"), copied("2")).changed is True
    assert code_change(copied("1"), copied("2", "diff --git a/x b/x")).summary == "uncommitted changes differ: x"


def test_a_login_node_needs_no_torch() -> None:
    """The command needs neither torch nor a scheduler to say what is wrong."""
    script = textwrap.dedent(
        """
        import sys
        import fairlead_launch.submission.command
        assert not {"torch", "lightning", "numpy"} & sys.modules.keys()
        """
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
