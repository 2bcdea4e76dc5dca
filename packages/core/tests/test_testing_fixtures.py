"""The fixtures and fakes for plugin authors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest

from fairlead import PluginManager, StrategyConfigBase, StrategyPlugin, TrainerConfig
from fairlead.testing import FakeDist, FakeEnviron, minimal_resolution

pytest_plugins = ["pytester"]

GOOD = """
    from typing import Literal
    from fairlead import StrategyConfigBase, StrategyPlugin

    class RingStrategyConfig(StrategyConfigBase):
        '''A ring.'''
        name: Literal["ring"] = "ring"
        bucket_cap_mb: int = 25
        '''Mebibytes.'''

    class Ring(StrategyPlugin):
        config = RingStrategyConfig
        runtime = "ring_strategy.runtime:build"

    ring = Ring()
    ring_small = Ring(bucket_cap_mb=1)
"""
POINTS = {"strategy.ring": "ring_strategy.plugin:ring", "strategy.ring_small": "ring_strategy.plugin:ring_small"}


class RingStrategyConfig(StrategyConfigBase):
    """A ring."""

    name: Literal["ring"] = "ring"
    bucket_cap_mb: int = 25
    """Mebibytes."""


class Ring(StrategyPlugin):
    """A ring."""

    config = RingStrategyConfig
    runtime = "json:loads"


def test_the_manager_sees_only_what_it_is_given(fairlead_plugins: Callable[..., PluginManager], fake_dist: Any) -> None:
    """It refuses ambient discovery, also for the configs that a test makes."""
    fake_dist("ring-strategy", entry_points=POINTS, files={"ring_strategy/plugin.py": GOOD})
    assert fairlead_plugins().records() == []
    with pytest.raises(ValueError, match="unknown strategy 'ring'"):
        TrainerConfig(strategy="ring")
    plugins = fairlead_plugins(Ring(), {"strategy.small": Ring(bucket_cap_mb=1)})
    assert plugins.names("strategy") == ["ring", "small"]
    assert TrainerConfig(strategy="small").strategy == RingStrategyConfig(bucket_cap_mb=1)


def test_without_the_fixture_installed_plugins_are_seen(fake_dist: Callable[..., FakeDist]) -> None:
    dist = fake_dist("ring-strategy", entry_points=POINTS, files={"ring_strategy/plugin.py": GOOD}, version="3.2")
    assert dist.version == "3.2"
    found = {record.key: record for record in PluginManager().records("strategy")}
    assert found["strategy.ring"].dist == "ring-strategy"


def test_a_fake_dist_leaves_nothing_behind(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_one(fake_dist):
            fake_dist("gone", entry_points={}, files={"gone_tomorrow.py": "x = 1"})
            import gone_tomorrow

        def test_two():
            assert "gone_tomorrow" not in sys.modules
            assert not [entry for entry in sys.path if "fake-dists" in entry]
        """
    )
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_a_changed_environment_fails_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os

        def test_reads(fake_environ):
            environ = fake_environ({"A": "1"}, B="2")
            assert dict(environ) == {"A": "1", "B": "2"}

        def test_writes(fake_environ):
            os.environ["FAIRLEAD_LEFT_BEHIND"] = "1"
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*os.environ was changed: FAIRLEAD_LEFT_BEHIND*"])


def test_a_fake_environment_is_text_only() -> None:
    environ = FakeEnviron(RANK="0")
    with pytest.raises(TypeError, match="item assignment"):
        environ["RANK"] = "1"  # type: ignore[index]  # what is tested
    with pytest.raises(TypeError, match="RANK=0"):
        FakeEnviron(RANK=0)  # type: ignore[arg-type]  # what is tested


def test_a_minimal_resolution_stands_in_for_what_is_not_installed() -> None:
    resolution = minimal_resolution(PluginManager([]), max_steps=3)
    parts: Sequence[Any] = (resolution.strategy, resolution.precision, resolution.environment, resolution.requeue)
    assert [part.name for part in parts] == ["single_device", "32-true", "lightning", "none"]
    assert resolution.trainer.max_steps == 3
