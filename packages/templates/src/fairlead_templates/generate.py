"""`fairlead new`: files of a template under the names that were given."""

from __future__ import annotations

import argparse
import keyword
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import copier

from fairlead.cli.session import Session
from fairlead.errors import ConfigError
from fairlead.testing import CONFORMANCE
from fairlead_templates.axes import AXES

_HERE: Final = Path(__file__).parent
_NAME: Final = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_CLASS: Final = re.compile(r"[A-Z][A-Za-z0-9]*")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Writes the files into a new folder, and says what to do next."""
    name, plugin = arguments.name, arguments.kind == "plugin"
    tag = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(tag):
        near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        fix = f"as `{near}`" if _NAME.fullmatch(near) and not keyword.iskeyword(near) else "as `local_sgd`"
        why = "it is a Python keyword" if keyword.iskeyword(tag) else None
        raise ConfigError(f"{name!r} is no name", where="NAME", why=why, fix=f"small letters, digits and _, {fix}")
    folder = Path(session.cwd, arguments.output or (f"fairlead-{tag.replace('_', '-')}" if plugin else name))
    if os.path.lexists(folder):
        raise ConfigError("it exists already", where=str(folder), fix="give another name, or another folder: -o FOLDER")
    shown = os.path.relpath(folder, session.cwd)
    if plugin:
        _plugin(arguments.axis, tag, arguments.class_name, folder, session)
        session.print(f"{shown}: a plugin of the axis {arguments.axis}\nnext: pip install -e {shown}; pytest {shown}")
    else:
        _copy("job", folder, {"name": name})
        session.print(f"{shown}: a job\nnext: fairlead fit {os.path.join(shown, 'job.yaml')}")
    return 0


def _plugin(axis: str, tag: str, given: str | None, folder: Path, session: Session) -> None:
    name = given or "".join(part.capitalize() for part in tag.split("_"))
    if not _CLASS.fullmatch(name):
        raise ConfigError(f"{name!r} is no class's name", where="--class-name", fix="as `LocalSGD`")
    about, package = AXES[axis], f"fairlead_{tag}"
    points = {axis: tag} | ({about.also[0]: about.also[1]} if about.also is not None else {})
    for one in points:
        if tag in session.plugins.names(one):
            why = f"{session.plugins.record(one, tag).dist} has it; two of one name are an error"
            raise ConfigError(f"there is a plugin {one}.{tag}", where="NAME", why=why, fix="choose another name")
    if find_spec(package) is not None:
        why = f"a module {package} can be imported here already"
        raise ConfigError(f"the plugin's package would be in the way of {package}", where="NAME", why=why)
    values = {
        "tag": tag,
        "name": name,
        "package": package,
        "project": package.replace("_", "-"),
        "title": ("An " if axis[0] in "ae" else "A ") + axis.replace("_", " "),
        "about": about.about,
        "requires": ["fairlead", *about.requires],
        "run": about.run,
        "points": {f"{key}.{tag}": f"{package}.{tag}:{value}" for key, value in points.items()},
        "suites": [CONFORMANCE[key].__name__ for key in points],
    }
    _copy("project", folder, values)
    _copy(f"plugin/{axis}", folder, values)


def _copy(template: str, folder: Path, values: dict[str, Any]) -> None:
    try:
        copier.run_copy(str(_HERE / template), folder, data=values, defaults=True, overwrite=True, quiet=True)
    except OSError as error:
        fix = "name another folder: -o FOLDER"
        raise ConfigError("the folder cannot be written", where=str(folder), why=str(error), fix=fix) from error
