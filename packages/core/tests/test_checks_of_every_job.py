"""Entry points `check.<name>`: what a plugin may add to the check of every job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fairlead import CheckPlugin, CheckResult, Finding, PluginManager, Setting
from fairlead.checks import CheckedJob, check_job
from fairlead.jobs import LoadedJob, load_job
from fairlead.resolution import Resolution
from fairlead.testing import FakeEntryPoint, stand_ins


def quota(loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path) -> CheckResult:
    assert loaded.job is not None
    assert cwd.is_dir()
    hours = int(environ["HOURS"])
    what = f"{hours} GPU hours are left for {resolution.world_size} ranks"
    found = Finding("error", "quota", what, where="trainer.devices") if hours < resolution.world_size else None
    return CheckResult((found,) if found else (), {"gpu_hours": Setting(hours, "HOURS")})


def wrong(*arguments: object) -> Any:
    return ["not a result"]


def checked(check: CheckPlugin | Exception, tmp_path: Path, *, uses_run: bool = True, **environ: str) -> CheckedJob:
    (tmp_path / "job.yaml").write_text("model: net:Net\ntrainer: {devices: 4}\n")
    targets = {**stand_ins(), "check.quota": check}
    plugins = PluginManager([FakeEntryPoint(name, target) for name, target in targets.items()])
    loaded = load_job("job.yaml", plugins=plugins, cwd=tmp_path, environ={})
    return check_job(loaded, environ=environ, plugins=plugins, cwd=tmp_path, uses_run=uses_run)


def of_the_check(job: CheckedJob) -> list[Finding]:
    return [finding for finding in job.findings if finding.code == "quota" or "check.quota" in str(finding.where)]


def test_a_check_of_a_plugin_gives_findings_and_settings(tmp_path: Path) -> None:
    plugin = CheckPlugin(f"{__name__}:quota", codes={"quota": "The project has too few GPU hours."})
    job = checked(plugin, tmp_path, HOURS="2")
    (finding,) = of_the_check(job)
    assert (finding.code, finding.where) == ("quota", "job.yaml:2, trainer.devices")
    assert job.resolution is not None
    assert job.resolution.settings["gpu_hours"] == Setting(2, "HOURS")
    assert of_the_check(checked(CheckPlugin(f"{__name__}:quota"), tmp_path, HOURS="8")) == []


def test_a_check_of_the_run_directory_is_left_out_where_none_is_used(tmp_path: Path) -> None:
    plugin = CheckPlugin(f"{__name__}:quota", reads_run=True)
    assert [f.code for f in of_the_check(checked(plugin, tmp_path, HOURS="2"))] == ["quota"]
    assert of_the_check(checked(plugin, tmp_path, HOURS="2", uses_run=False)) == []


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (CheckPlugin(f"{__name__}:quota"), "the check 'quota' raised KeyError"),
        (CheckPlugin(f"{__name__}:wrong"), "gave a list, not a CheckResult"),
        (CheckPlugin("no_such_module:check"), "the check 'quota' raised ModuleNotFoundError"),
        (ImportError("no"), "the check 'quota' cannot be loaded"),
    ],
)
def test_a_check_that_fails_is_a_warning_and_stops_no_job(check: Any, said: str, tmp_path: Path) -> None:
    (finding,) = of_the_check(checked(check, tmp_path))
    assert (finding.severity, finding.code) == ("warning", "plugin-broken")
    assert said in finding.what
    assert str(finding.where) == "the plugin check.quota"
