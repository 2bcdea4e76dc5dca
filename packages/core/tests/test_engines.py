"""The versions of engines: what a plugin accepts, and what is said of those that were not tested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from fairlead import PluginManager, StrategyConfigBase, StrategyPlugin, TrainerConfig
from fairlead.engines import ENGINES, LIGHTNING, requirement
from fairlead.errors import MissingDependencyError
from fairlead.findings import CODES, Finding
from fairlead.resolve import resolve
from fairlead.testing import stand_ins, write_dist


class EngineStrategyConfig(StrategyConfigBase):
    """On an engine."""

    name: Literal["engine"] = "engine"


class EngineStrategy(StrategyPlugin):
    """On an engine."""

    config: ClassVar[type[StrategyConfigBase]] = EngineStrategyConfig
    engines: ClassVar[tuple[str, ...]] = ("torch", "deepspeed", "torch-xla")
    extra = "deepspeed"


@pytest.fixture
def findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fairlead_plugins: Callable[..., PluginManager]
) -> Callable[..., list[Finding]]:
    """What a check says of a job on these engines, with installed versions by distribution."""

    def check(**versions: str) -> list[Finding]:
        for name, version in {"torch": "2.9.1", "deepspeed": "0.19.8", "torch_xla": "2.9.0", **versions}.items():
            write_dist(tmp_path, name.replace("_", "-"), version=version, entry_points={}, files={})
        monkeypatch.syspath_prepend(tmp_path)
        plugins = fairlead_plugins(stand_ins(), EngineStrategy())
        resolution = resolve(TrainerConfig(strategy="engine"), environ={}, plugins=plugins)
        return [finding for finding in resolution.findings if finding.where == "trainer.strategy"]

    return check


def test_tested_versions_are_not_worth_a_word(findings: Callable[..., list[Finding]]) -> None:
    assert findings() == []


@pytest.mark.parametrize(("version", "which"), [("0.20.0", "newer"), ("0.99", "newer")])
def test_an_untested_version_is_a_finding_and_the_job_runs(
    findings: Callable[..., list[Finding]], version: str, which: str
) -> None:
    [found] = findings(deepspeed=version)
    assert (found.severity, found.code) == ("info", "engine-untested")
    assert found.what == f"deepspeed {version} is {which} than Fairlead was tested with"
    assert found.why == "tested: 0.19.8"


def test_a_patch_release_counts_as_tested(findings: Callable[..., list[Finding]]) -> None:
    assert findings(deepspeed="0.19.99") == []


def test_engines_that_do_not_go_together_are_an_error(findings: Callable[..., list[Finding]]) -> None:
    """torch-xla with another torch ends in an undefined symbol."""
    [found] = findings(torch="2.13.0+cpu")
    assert (found.severity, found.code) == ("error", "engine-mismatch")
    assert found.what == "torch-xla 2.9.0 needs torch 2.9, but torch 2.13.0+cpu is installed"
    assert found.fix == "pip install 'torch==2.9.*'"


def test_a_version_that_is_not_accepted_is_refused_with_the_reason(findings: Callable[..., list[Finding]]) -> None:
    [found] = findings(deepspeed="0.16.2")
    assert (found.severity, found.code) == ("error", "plugin-missing")
    assert found.what == "the strategy 'engine' needs deepspeed>=0.19.8,<1"
    assert found.why == f"deepspeed 0.16.2 is installed. {ENGINES['deepspeed'].why}"


def test_lightning_before_its_security_fix_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fairlead_plugins: Callable[..., PluginManager]
) -> None:
    class OnLightning(EngineStrategy):
        engines = ("lightning",)

    write_dist(tmp_path, "lightning", version="2.6.3", entry_points={}, files={})
    monkeypatch.syspath_prepend(tmp_path)
    plugins = fairlead_plugins(OnLightning())
    with pytest.raises(MissingDependencyError) as raised:
        plugins.require_engines("strategy", "engine")
    assert "lightning 2.6.3 is installed. 2.6.2 and 2.6.3 were malicious" in str(raised.value.why)


def test_a_plugin_of_others_states_its_own_range() -> None:
    assert requirement("horovod>=0.28") == "horovod>=0.28"
    assert requirement("deepspeed>=0.10") == "deepspeed>=0.10"
    assert [requirement(name) for name in LIGHTNING] == ["torch>=2.9,<3", "lightning>=2.6.6,<3"]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: engine.name)
def test_tested_versions_are_accepted_and_in_order(engine: object) -> None:
    entry = ENGINES[engine.name]  # type: ignore[attr-defined]
    assert entry.tested
    assert sorted(entry.tested, key=Version) == list(entry.tested)
    assert all(Requirement(entry.requirement).specifier.contains(version) for version in entry.tested)
    assert entry.paired is None or entry.paired in ENGINES


def test_the_codes_are_documented() -> None:
    assert {"engine-untested", "engine-mismatch"} <= CODES.keys()
