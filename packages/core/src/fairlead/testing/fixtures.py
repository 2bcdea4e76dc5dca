"""The pytest fixtures; pytest loads this module by its entry point, so it imports nothing that costs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from fairlead.plugins import EntryPoint, PluginManager
    from fairlead.testing.fakes import FakeDist, FakeEnviron


@pytest.fixture
def fairlead_plugins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PluginManager]:
    """Makes a plugin manager of exactly the plugins that are given; what is installed is not seen.

    Give plugin instances, entry points, what `fake_dist` returned, or a mapping that names presets:
    `fairlead_plugins(ring, {"strategy.ring_small": Ring(bucket_cap_mb=1)})`. While the test runs it is also the manager
    that `TrainerConfig(strategy="ring")` asks.
    """
    from fairlead import plugins as module
    from fairlead.plugin_classes import CommandPlugin, Plugin
    from fairlead.testing.fakes import FakeEntryPoint

    def points_of(given: object) -> Iterator[EntryPoint]:
        if isinstance(given, Mapping):
            yield from (FakeEntryPoint(name, target) for name, target in given.items())
        elif hasattr(given, "entry_points"):
            yield from given.entry_points
        elif isinstance(given, (Plugin, CommandPlugin)):
            tag = given.name if isinstance(given, CommandPlugin) else given.tag
            value = f"{type(given).__module__}:{type(given).__qualname__}"
            yield FakeEntryPoint(f"{given.axis}.{tag}", given, value=value)
        else:
            yield cast("EntryPoint", given)

    def make(*given: object) -> PluginManager:
        manager = module.PluginManager([point for each in given for point in points_of(each)])
        monkeypatch.setattr(module, "_default", [manager])
        return manager

    make()
    return make


@pytest.fixture
def fake_dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeDist]]:
    """Makes an importable distribution from source text, for this test only, with the arguments of `write_dist`:
    `fake_dist("ring", entry_points={"strategy.ring": "ring:ring"}, files={"ring.py": SOURCE})`.
    """
    from fairlead.testing.fakes import write_dist

    folders: list[Path] = []

    def make(name: str, **parts: Any) -> FakeDist:
        folder = tmp_path / "fake-dists" / f"{len(folders)}-{name}"
        made = write_dist(folder, name, **parts)
        folders.append(folder)
        monkeypatch.syspath_prepend(folder)
        return made

    yield make
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if source and any(Path(source).is_relative_to(folder) for folder in folders):
            del sys.modules[name]


@pytest.fixture
def fake_environ() -> Iterator[Callable[..., FakeEnviron]]:
    """Makes read-only mappings of environment variables, `fake_environ(RANK="0")`; `os.environ` must stay as it is."""
    from fairlead.testing.fakes import FakeEnviron

    before = dict(os.environ)
    yield FakeEnviron
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    changed.discard("PYTEST_CURRENT_TEST")  # pytest's own, other in every phase
    if changed:
        pytest.fail(f"os.environ was changed: {', '.join(sorted(changed))}; read and pass a mapping instead")
