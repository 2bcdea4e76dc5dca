"""What `fairlead check` says of a run directory before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fairlead import PluginManager
from fairlead.cli import commands, main
from fairlead.testing import stand_ins
from fairlead_runs.checks import run_directory


@pytest.mark.parametrize(
    ("run", "code"),
    [
        ("{name: 'a-{model.args.lr}'}", "name-invalid"),
        ("{resume: no.ckpt}", "resume-path"),
        ("{ckpt_path: no.ckpt}", "resume-path"),
    ],
)
def test_a_bad_run_is_2_and_named(
    tmp_path: Path,
    fairlead_plugins: Callable[..., PluginManager],
    capsys: pytest.CaptureFixture[str],
    run: str,
    code: str,
) -> None:
    own = {"command.check": commands.check, "check.run_directory": run_directory}
    (tmp_path / "net.py").write_text("class Net: pass\n")
    (tmp_path / "job.yaml").write_text(f"model: net:Net\nrun: {run}\n")
    plugins = fairlead_plugins(own, stand_ins())
    assert main(["check", "job.yaml"], plugins=plugins, environ={}, cwd=tmp_path) == 2
    said = capsys.readouterr().err
    assert code in said
    assert "job.yaml:2" in said
