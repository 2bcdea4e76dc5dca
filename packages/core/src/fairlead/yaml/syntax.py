"""PyYAML's and libyaml's syntax errors, said so that one knows what to change."""

from __future__ import annotations

import re

import yaml
from yaml.composer import ComposerError

from fairlead.errors import ConfigError

_TAB_INDENT = re.compile(r" *\t")
_QUOTE_IT = "put the value in quotes"


def syntax_error(error: yaml.YAMLError, text: str, source: str) -> ConfigError:
    """The error for the user; `text` is what was parsed."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return _marked(error, text, source)
    # A ReaderError counts characters in PyYAML and bytes in libyaml: look for the character itself.
    bad = next((i for i, char in enumerate(text) if not (char.isprintable() or char in "\n\r\t\x85\ufeff")), None)
    if bad is None:
        return ConfigError("this is not YAML", where=source, why=str(error))
    return ConfigError(
        f"the character U+{ord(text[bad]):04X} is not allowed in YAML",
        where=f"{source}:{text.count(chr(10), 0, bad) + 1}",
        fix=f'remove it, or write it as an escape in double quotes: "\\u{ord(text[bad]):04x}"',
    )


def _marked(error: yaml.MarkedYAMLError, text: str, source: str) -> ConfigError:
    assert error.problem_mark is not None
    problem, context = str(error.problem or ""), str(error.context or "")
    line = int(error.problem_mark.line) + 1
    opened = line if error.context_mark is None else int(error.context_mark.line) + 1
    lines = text.splitlines()
    shown = lines[line - 1] if line <= len(lines) else ""
    if isinstance(error, ComposerError):
        return _composer_error(problem, context, line, shown[int(error.problem_mark.column) :], source)
    if _TAB_INDENT.match(shown):
        return ConfigError(
            "a tab indents this line",
            where=f"{source}:{line}",
            why="YAML allows only spaces for indentation",
            fix="replace the tab by spaces (editors: 'convert indentation to spaces')",
        )
    fix: str | None = None
    if "quoted scalar" in context and "end of stream" in problem:
        line, why, fix = opened, "a quote that is opened here is never closed", "close the quote"
    elif "flow" in context:
        bracket = "[" if "sequence" in context else "{" if "mapping" in context else "[ or {"
        why = f"a {bracket} that is opened on line {opened} is not closed, or a comma is missing"
        fix = "close the bracket, separate the entries by commas, and quote text that holds , [ ] { or }"
        line = opened if line > len(lines) else line
        if "${" in shown:
            fix = f"{fix}\na number with ${{env:...}} needs a line of its own, without brackets around it"
    elif "mapping values" in problem:
        why = "there is a ': ' where no key can be: an unquoted value with ': ' in it, or a wrong indentation"
        fix = f'{_QUOTE_IT} (key: "a: b"), or align this line with its neighbours'
    elif "cannot start any token" in problem:
        column = int(error.problem_mark.column)
        char = shown[column] if column < len(shown) else ""
        why, fix = f"an unquoted value cannot start with {char!r}", _QUOTE_IT
    elif "expected ':'" in problem:
        line = opened
        why, fix = "this line has no ':'", "write 'key: value', with a space after the colon"
    elif "block mapping" in context or "block collection" in context or "block sequence" in context:
        why = f"this line does not belong to what starts on line {opened}"
        fix = "align the keys of a mapping, and the dashes of a list, in one column"
    else:
        why = ", ".join(part for part in (context, problem) if part)
    return ConfigError("this is not YAML", where=f"{source}:{line}", why=why, fix=fix)


def _composer_error(problem: str, context: str, line: int, rest: str, source: str) -> ConfigError:
    """What is right in each line and wrong together; `rest` is the line from the place of the error on."""
    where = f"{source}:{line}"
    name = rest.split()[0].rstrip(",]}")[1:] if rest.split() else ""
    if "undefined alias" in problem:
        what = f"no anchor &{name} before the alias *{name}"
        return ConfigError(what, where=where, fix=f"define &{name}, or quote it if it is meant as text")
    if "duplicate anchor" in context:
        return ConfigError(f"the anchor &{name} is defined twice", where=where, fix="give one of the two another name")
    if "another document" in problem:
        return ConfigError(
            "a second YAML document starts here",
            where=where,
            why="a file holds one document; '---' starts another",
            fix="remove the '---' line, or move what follows into a file of its own",
        )
    return ConfigError(problem, where=where)
