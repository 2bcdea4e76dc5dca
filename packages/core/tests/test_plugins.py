"""The life of a plugin: discovered without an import, loaded when selected, broken as a record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from fairlead import (
    Claim,
    EnvironmentConfigBase,
    EnvironmentPlugin,
    PluginManager,
    StrategyConfigBase,
    StrategyPlugin,
    hookimpl,
)
from fairlead.configs import find_config
from fairlead.errors import ConfigError, MissingDependencyError, PluginError
from fairlead.install import collect, install_line
from fairlead.testing import FakeDist, FakeEntryPoint, write_dist

SOURCE = """
    from typing import Literal
    from fairlead import StrategyConfigBase, StrategyPlugin

    class RingStrategyConfig(StrategyConfigBase):
        '''A ring.'''
        name: Literal["ring"] = "ring"
        bucket_cap_mb: int = 25

    class Ring(StrategyPlugin):
        config = RingStrategyConfig
        runtime = "json:loads"
        aliases = ("RingPlugin",)

    ring = Ring()
    ring_small = Ring(bucket_cap_mb=1)
"""
ENTRY = {"strategy.ring": "ring_strategy.plugin:ring", "strategy.ring_small": "ring_strategy.plugin:ring_small"}


class RingStrategyConfig(StrategyConfigBase):
    """A ring."""

    name: Literal["ring"] = "ring"
    bucket_cap_mb: int = 25


class Ring(StrategyPlugin):
    """A ring."""

    config: ClassVar[type[StrategyConfigBase]] = RingStrategyConfig
    runtime = "json:loads"


def error_of(target: Any, name: str = "strategy.ring") -> str:
    """What the record says of an entry point that loads this."""
    (record,) = PluginManager([FakeEntryPoint(name, target)]).records(load=True)
    assert record.error is not None
    assert not record.available
    return record.error


def test_discovery_imports_nothing(fake_dist: Callable[..., FakeDist]) -> None:
    """Rule 3: names, dists and versions come from metadata; a plugin is imported when it is asked for."""
    fake_dist("ring-strategy", entry_points=ENTRY, files={"ring_strategy/plugin.py": SOURCE}, version="2.1")
    plugins = PluginManager()
    found = [r for r in plugins.records("strategy") if r.dist == "ring-strategy"]
    assert [(r.name, r.version, r.error, r.missing) for r in found] == [
        ("ring", "2.1", None, ()),
        ("ring_small", "2.1", None, ()),
    ]
    assert "ring_strategy" not in sys.modules
    assert plugins.get("strategy", "ring").tag == "ring"
    assert "ring_strategy.plugin" in sys.modules


def test_a_preset_is_a_second_name(fake_dist: Callable[..., FakeDist]) -> None:
    dist = fake_dist("ring-strategy", entry_points=ENTRY, files={"ring_strategy/plugin.py": SOURCE})
    plugins = PluginManager(dist.entry_points)
    config: Any = plugins.get("strategy", "ring").config
    assert plugins.label(config()) == "ring"
    assert plugins.label(config(bucket_cap_mb=1)) == "ring_small"
    assert plugins.label(config(bucket_cap_mb=2)) == "ring"
    assert list(plugins.distinct("strategy")) == ["ring"]


def test_a_second_name_that_sets_nothing_is_not_the_label(fairlead_plugins: Callable[..., PluginManager]) -> None:
    plugins = fairlead_plugins(Ring(), {"strategy.ring_native": Ring(name="ring")})
    assert plugins.label(RingStrategyConfig()) == "ring"


def test_config_classes_are_found_by_name_and_alias(fake_dist: Callable[..., FakeDist]) -> None:
    plugins = PluginManager(
        fake_dist("ring-strategy", entry_points=ENTRY, files={"ring_strategy/plugin.py": SOURCE}).entry_points
    )
    config = plugins.get("strategy", "ring").config
    assert find_config("RingStrategyConfig", plugins) is config
    assert find_config("FSDPStrategyConfig", plugins) is None


def test_an_alias_is_imported_from_fairlead_configs(fake_dist: Callable[..., FakeDist], fairlead_plugins: Any) -> None:
    dist = fake_dist("ring-strategy", entry_points=ENTRY, files={"ring_strategy/plugin.py": SOURCE})
    fairlead_plugins(dist)
    from fairlead.configs import RingPlugin

    assert RingPlugin.__name__ == "RingStrategyConfig"
    with pytest.raises(ImportError, match="RingPlugn"):
        from fairlead.configs import RingPlugn  # noqa: F401


def test_a_broken_module_is_a_record_until_it_is_selected(fake_dist: Callable[..., FakeDist]) -> None:
    """Rule 9."""
    dist = fake_dist("broken-dist", entry_points={"strategy.bad": "bad_plugin:x"}, files={"bad_plugin.py": "1 / 0"})
    plugins = PluginManager([*dist.entry_points, FakeEntryPoint("strategy.ring", Ring())])
    assert [(r.name, r.error) for r in plugins.records(load=True)] == [
        ("bad", "ZeroDivisionError: division by zero"),
        ("ring", None),
    ]
    assert list(plugins.loaded("strategy")) == ["ring"]
    with pytest.raises(PluginError, match="'bad' cannot be loaded") as caught:
        plugins.get("strategy", "bad", where="trainer.strategy")
    assert caught.value.where == "trainer.strategy"
    assert "broken-dist 1.0: ZeroDivisionError" in str(caught.value.why)
    assert "pip uninstall broken-dist" in str(caught.value.fix)


def test_a_module_that_exits_does_not_end_the_process(fake_dist: Callable[..., FakeDist]) -> None:
    dist = fake_dist("quits", entry_points={"strategy.bad": "quits:x"}, files={"quits.py": "raise SystemExit(3)"})
    (record,) = PluginManager(dist.entry_points).records(load=True)
    assert record.error == "SystemExit: 3"


def test_two_plugins_of_one_name_name_both_dists(fake_dist: Callable[..., FakeDist]) -> None:
    """Rule 9."""
    first = fake_dist("ring-one", entry_points={"strategy.ring": "ring_one:ring"}, files={"ring_one.py": SOURCE})
    second = fake_dist("ring-two", entry_points={"strategy.ring": "ring_two:ring"}, files={"ring_two.py": SOURCE})
    plugins = PluginManager([*first.entry_points, *second.entry_points])
    (record,) = plugins.records(load=True)
    assert record.error is not None
    assert "ring-one and ring-two" in record.error
    assert not {"ring_one", "ring_two"} & sys.modules.keys()


def test_one_dist_seen_twice_is_one_plugin(fake_dist: Callable[..., FakeDist]) -> None:
    dist = fake_dist("ring-strategy", entry_points=ENTRY, files={"ring_strategy/plugin.py": SOURCE})
    plugins = PluginManager([*dist.entry_points, *dist.entry_points])
    assert [r.error for r in plugins.records(load=True)] == [None, None]


@pytest.mark.parametrize("name", ["ring", "strategy.", ".ring", "stratgy.ring"])
def test_a_malformed_entry_point_name_is_a_record(name: str) -> None:
    assert "is not '<axis>.<tag>'" in error_of(Ring(), name)


def test_what_an_entry_point_must_not_be() -> None:
    class Closed(Ring):
        config = dict  # type: ignore[assignment]  # what is tested

    class Untagged(Ring):
        config = StrategyConfigBase

    class Later(Ring):
        api = 2

    class Nowhere(Ring):
        runtime = "ring_strategy.runtime"

    assert "is the class Ring, but the axis 'strategy' needs an instance" in error_of(Ring)
    assert "not a subclass of fairlead.StrategyConfigBase" in error_of(Closed())
    assert "Literal" in error_of(Untagged())
    assert "version 2 of the plugin contract" in error_of(Later())
    assert "not 'module:callable'" in error_of(Nowhere())
    assert "the entry point says 'rang'" in error_of(Ring(), "strategy.rang")
    assert "the preset sets ['bucket']" in error_of(Ring(bucket=1), "strategy.small")
    assert "needs an instance of fairlead.EnvironmentPlugin" in error_of(Ring(), "environment.ring")


def test_a_misspelt_hook_breaks_only_its_plugin() -> None:
    """pluggy keeps a refused plugin half registered, and would then refuse all others."""

    class Odd(Ring):
        @hookimpl
        def fairlead_chekc(self, resolution: Any) -> None: ...

    class Odder(Ring):
        @hookimpl
        def fairlead_check(self, resolutoin: Any) -> None: ...

    for bad, said in ((Odd(), "fairlead_chekc"), (Odder(), "resolutoin")):
        plugins = PluginManager(
            [FakeEntryPoint("strategy.ring", bad), FakeEntryPoint("strategy.small", Ring(bucket_cap_mb=1))]
        )
        ring, small = plugins.records(load=True)
        assert ring.error is not None
        assert said in ring.error
        assert small.error is None


def test_one_object_under_two_names_is_explained() -> None:
    ring = Ring(name="ring")
    records = PluginManager([FakeEntryPoint("strategy.ring", ring), FakeEntryPoint("strategy.ring2", ring)]).records(
        load=True
    )
    assert records[0].error is None
    assert "is the plugin 'strategy.ring' itself" in str(records[1].error)


def test_a_plugin_for_a_later_fairlead_is_not_imported(fake_dist: Callable[..., FakeDist]) -> None:
    dist = fake_dist(
        "ring-strategy",
        entry_points=ENTRY,
        files={"ring_strategy/plugin.py": SOURCE},
        requires=["fairlead>=99; python_version > '3'", "fairlead-lightning>=50", "numpy"],
    )
    (record, _) = PluginManager(dist.entry_points).records(load=True)
    assert record.error is not None
    assert record.error.startswith("needs fairlead>=99, but fairlead 0")
    assert "ring_strategy" not in sys.modules


def test_a_missing_engine_gives_the_pip_line() -> None:
    class Needy(Ring):
        engines = ("pluggy>=1", "no-such-engine>=3", "pluggy>=99", "no-such-engine; python_version < '3'")

    class Extra(Needy):
        extra = "deepspeed"

    for plugin, line in (
        (Needy(), "pip install 'pluggy>=1' 'no-such-engine>=3'"),
        (Extra(), install_line("deepspeed")),
    ):
        plugins = PluginManager([FakeEntryPoint("strategy.ring", plugin)])
        assert plugins.get("strategy", "ring") is plugin  # a config can be read without the engine
        (record,) = plugins.records(load=True)
        assert record.missing == ("no-such-engine>=3", "pluggy>=99")
        assert not record.available
        with pytest.raises(MissingDependencyError) as caught:
            plugins.require_engines("strategy", "ring", where="trainer.strategy")
        assert str(caught.value.fix).startswith(line)


def test_engines_that_are_no_requirements_are_an_error_record() -> None:
    class Odd(Ring):
        engines = ("torch >> 2",)

    assert "'torch >> 2' is not a requirement" in error_of(Odd())


def test_unknown_tags() -> None:
    """The list of valid names, the nearest one, and the pip line for one of Fairlead's own."""
    plugins = PluginManager([FakeEntryPoint("strategy.ring", Ring())])
    with pytest.raises(ConfigError) as caught:
        plugins.get("strategy", "rnig")
    assert (caught.value.why, caught.value.fix) == ("installed: ring", "did you mean 'ring'?")
    with pytest.raises(MissingDependencyError) as missing:
        plugins.get("strategy", "deepspeed")
    assert missing.value.fix == install_line("deepspeed")


def test_our_own_plugins_are_collected_with_the_extra_that_each_names(tmp_path: Path) -> None:
    """What is not installed is known by the source of the packages, not by a list that somebody keeps."""
    core = '[project]\nname = "fairlead"\n[project.optional-dependencies]\nring = []\n'
    entries = '"strategy.ring" = "rings.ring:ring"\n"strategy.plain" = "rings.plain:plain"\n'
    rings = f'[project]\nname = "fairlead-rings"\n[project.entry-points.fairlead]\n{entries}'
    for name, text in (("core", core), ("rings", rings)):
        (tmp_path / name / "src" / "rings" / "plain").mkdir(parents=True)
        (tmp_path / name / "pyproject.toml").write_text(text)
    source = tmp_path / "rings" / "src" / "rings"
    (source / "ring.py").write_text('ConfigDict(extra="forbid")\nclass Ring:\n    extra = "ring"\n')
    (source / "plain" / "__init__.py").touch()
    assert collect(tmp_path) == {"strategy.plain": "lightning", "strategy.ring": "ring"}
    assert collect(tmp_path / "core") == {}


class HereConfig(EnvironmentConfigBase):
    """Here."""

    name: Literal["here"] = "here"


class Here(EnvironmentPlugin):
    """Here."""

    config = HereConfig

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims, gives nothing, or fails, as it is told."""
        if environ["WHAT"] == "fail":
            raise KeyError("SLURM_PROCID")
        return Claim("WHAT") if environ["WHAT"] == "claim" else None


def test_a_hook_of_one_plugin_is_called_and_its_failure_named() -> None:
    here = Here()
    plugins = PluginManager([FakeEntryPoint("environment.here", here), FakeEntryPoint("strategy.ring", Ring())])
    plugins.get("environment", "here")
    ring = plugins.get("strategy", "ring")
    assert plugins.call(here, "fairlead_detect", environ={"WHAT": "claim"}) == [Claim("WHAT")]
    assert plugins.call(here, "fairlead_detect", environ={"WHAT": ""}) == []
    assert plugins.call(ring, "fairlead_detect", environ={}) == []
    with pytest.raises(PluginError, match=r"fairlead_detect of environment\.here raised KeyError"):
        plugins.call(here, "fairlead_detect", environ={"WHAT": "fail"})


def test_written_metadata_is_read_as_an_installed_packages(tmp_path: Any) -> None:
    dist = write_dist(tmp_path, "a-b", entry_points={"strategy.x": "m:x"}, files={}, requires=["fairlead"])
    (point,) = dist.entry_points
    assert point.dist is not None
    assert (point.name, point.value, point.dist.name, point.dist.requires) == ("strategy.x", "m:x", "a-b", ["fairlead"])
