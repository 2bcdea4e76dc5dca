"""A job of several files and variables: what its run keeps, and what a later change of a file or a variable does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fairlead import yaml
from integration_tests.jobs import JOB, changed, events, fairlead, repository

pytestmark = pytest.mark.slow

BIG = """
extends: job.yaml
run: {name: null}
model: {args: {width: 8}}
data: {class: "mine.model:Data"}
"""
SITE = """
run: {dir: "${env:PLACE}/runs"}
trainer:
  max_steps: ${env:STEPS,4}
  devices: 1
  strategy: auto
model:
  args:
    lr: ${env:LR:-0.1}
"""


def test_a_run_keeps_the_whole_job(tmp_path: Path) -> None:
    """It resumes with the same variables; another value is a changed setting; its own `job.yaml` is the job."""
    base = repository(tmp_path / "repo", job=changed(JOB, model={"args": {"width": 4}}))
    (base.parent / "big.yaml").write_text(BIG)
    (base.parent / "site.yaml").write_text(SITE)
    files = ("repo/jobs/big.yaml", "repo/jobs/site.yaml")
    place = {"PLACE": str(tmp_path / "place")}
    first = fairlead("fit", *files, cwd=tmp_path, environ=place)
    assert first.code == 0, first.text
    run = tmp_path / "place/runs/big-site"
    kept = yaml.load_file(run / "job.yaml").data
    assert isinstance(kept, dict)
    assert "extends" not in kept
    assert kept["run"]["dir"] == str(tmp_path / "place/runs")
    assert kept["model"]["args"] == {"width": 8, "lr": 0.1}
    assert (kept["trainer"]["max_steps"], kept["trainer"]["devices"]) == (4, 1)

    more = fairlead("fit", *files, cwd=tmp_path, environ={**place, "STEPS": "6"})
    assert more.code == 0, more.text
    assert "2 of them in this start" in more.out
    other = fairlead("fit", *files, cwd=tmp_path, environ={**place, "LR": "0.2"})
    assert other.code == 2
    assert "model.args.lr: 0.1 -> 0.2" in other.err

    base.write_text(json.dumps(changed(JOB, model={"args": {"width": 9}}, trainer={"max_steps": 1})))
    (base.parent / "site.yaml").unlink()
    alone = ("repo/jobs/copy.yaml", "--set", "trainer.max_steps=8")
    (base.parent / "copy.yaml").write_text((run / "job.yaml").read_text())
    again = fairlead("fit", *alone, cwd=tmp_path)
    assert again.code == 0, again.text
    assert "2 of them in this start" in again.out
    assert [event["step"] for event in events(run) if event["event"] == "finished"] == [4, 6, 8]


def test_an_absent_variable_is_named_before_anything_starts(tmp_path: Path) -> None:
    base = repository(tmp_path / "repo")
    (base.parent / "site.yaml").write_text(SITE)
    for command in ("check", "fit", "submit"):
        call = fairlead(command, "repo/jobs/job.yaml", "repo/jobs/site.yaml", cwd=tmp_path)
        assert call.code == 2, call.text
        said = r"^error(\[variable-missing\])?: the environment variable PLACE is not set$"
        assert re.search(said, call.err, re.MULTILINE), call.text
        assert "where: repo/jobs/site.yaml:2, run.dir" in call.err
    assert not (tmp_path / "runs").exists()
