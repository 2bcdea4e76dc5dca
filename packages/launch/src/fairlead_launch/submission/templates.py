"""Fills templates of job scripts: every value is quoted for the shell, and a name that nothing sets is an error."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fairlead.errors import ConfigError, did_you_mean


class Raw(str):
    """Text that goes into a script as it is: shell that is meant to be shell."""

    __slots__ = ()


def words(values: Iterable[object]) -> Raw:
    """A command line, each of its words quoted."""
    return Raw(shlex.join(str(value) for value in values))


def option(name: str, value: object = True) -> Raw:
    """One option of a scheduler's line: `--nodes=2`, `--exclusive` where it is true, `-q 'my queue'` with one dash.

    Raises:
        ConfigError: A line break, which would end the line and begin one of the value's own.
    """
    dashed = name if name.startswith("-") else f"--{name}"
    if value is True and dashed.isprintable():
        return Raw(dashed)
    text = str(value)
    if any(ord(char) < 32 for char in f"{name}{text}") or not dashed.isprintable() or " " in dashed:
        raise ConfigError(
            f"the value of {name!r} has a line break, or another character that no option of a script can hold",
            where="submit",
            why=repr(text),
            fix="write it on one line",
        )
    return Raw(f"{dashed}{'=' if dashed.startswith('--') else ' '}{shlex.quote(text)}")


def render_template(name: str, values: Mapping[str, Any], *, own: str | None = None, cwd: Path | None = None) -> str:
    """A template of this package, or the user's `own`, with these values.

    `{{ x }}` is quoted for the shell, unless it is `Raw`; a list is a list of words. A template writes `{{ x | raw }}`
    for what is shell already.

    Raises:
        ConfigError: The user's template is not there, is no template, or asks for what there is not.
    """
    import jinja2  # a plugin is loaded without it

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        finalize=_quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(raw=Raw, words=words)
    path = Path(__file__).with_name("templates") / name if own is None else (cwd or Path.cwd()) / own
    where = "submit.template" if own is not None else str(path)
    wrong = partial(ConfigError, where=f"{where}: {path}")
    try:
        return environment.from_string(path.read_text(encoding="utf-8")).render(values)
    except OSError as error:
        raise wrong("the template cannot be read", why=error.strerror) from error
    except UnicodeDecodeError as error:
        raise wrong("the template is not text in UTF-8", why=str(error)) from error
    except jinja2.UndefinedError as error:
        name_given = str(error).split("'")[1] if "'" in str(error) else ""
        near = did_you_mean(name_given, values)
        fix = f"did you mean {near!r}?" if near else f"it may use: {', '.join(sorted(values))}"
        raise wrong("the template asks for what there is not", why=str(error), fix=fix) from error
    except jinja2.TemplateSyntaxError as error:
        raise wrong("the template is not valid", why=f"line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise wrong("the template cannot be filled", why=str(error)) from error


def _quoted(value: object) -> object:
    from jinja2 import Undefined

    if isinstance(value, Raw | Undefined):
        return value
    if isinstance(value, list | tuple):
        return words(value)
    return shlex.quote(str(value))
