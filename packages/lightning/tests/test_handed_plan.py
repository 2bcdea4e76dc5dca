"""A rank that Fairlead starts takes over what was resolved and checked, and only finds out which rank it is."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from fairlead.cli.session import Session
from fairlead.plugins import default_plugins
from fairlead_launch.environment import PLAN, plan_to_inherit, rank_environment
from fairlead_lightning.commands.prepare import prepare

JOB = """
model: {class: "lightning.pytorch.demos.boring_classes:BoringModel"}
trainer: {accelerator: cpu, devices: 2, max_steps: 1}
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_no_job_and_knows_who_it_is(tmp_path: Path, rank: int) -> None:
    """The file may have been edited meanwhile."""
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    arguments = argparse.Namespace(job="job.yaml", overrides=[], resume=None, command="fit")
    before = prepare(arguments, Session(default_plugins(), {}, tmp_path), uses_run=True)
    file.write_text("edited: true")
    fd, variable = plan_to_inherit(before)
    try:
        environ = rank_environment(
            {PLAN: variable}, local_rank=rank, devices=2, num_nodes=1, node_rank=0, address="::1", port=1234, threads=1
        )
        after = prepare(arguments, Session(default_plugins(), environ, tmp_path), uses_run=True)
    finally:
        os.close(fd)
    assert after.loaded.job == before.loaded.job
    assert after.resolution is not None
    assert before.resolution is not None
    assert after.resolution.strategy == before.resolution.strategy
    assert after.resolution.topology.launched
    settings = {name: after.resolution.value(name) for name in ("global_rank", "local_rank", "main_port")}
    assert settings == {"global_rank": rank, "local_rank": rank, "main_port": 1234}
