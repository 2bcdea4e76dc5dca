"""What the hooks of one plugin give, checked: a wrong answer is an error that names its plugin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from fairlead.errors import PluginError
from fairlead.plugin_classes import Plugin
from fairlead.plugins import PluginManager

T = TypeVar("T")


def answer(plugins: PluginManager, plugin: Plugin, hook: str, kind: type[T], /, **arguments: Any) -> T | None:
    """What a hook gives, None where the plugin has none; `PluginError` where it raised or gave no `kind`."""
    return next((_checked(one, plugin, hook, kind) for one in plugins.call(plugin, hook, **arguments)), None)


def answers(plugins: PluginManager, plugin: Plugin, hook: str, kind: type[T], /, **arguments: Any) -> list[T] | None:
    """The same of a hook that gives several things."""
    results = plugins.call(plugin, hook, **arguments)
    if not results:
        return None
    many = results[0] if isinstance(results[0], Iterable) else [results[0]]
    return [_checked(one, plugin, hook, kind) for one in many]


def _checked(one: Any, plugin: Plugin, hook: str, kind: type[T]) -> T:
    if not isinstance(one, kind):
        raise PluginError(
            f"{hook} of {plugin.axis}.{plugin.tag} gave a {type(one).__name__}, not a {kind.__name__}",
            fix="report it to the plugin's authors; choosing another plugin avoids it",
        )
    return one
