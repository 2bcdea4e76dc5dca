"""Keeps secrets out of what is written: by the name of a value, and by the look of a text; a number is none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fairlead.secret_names import is_secret_name

REDACTED = "<redacted>"

_URL_PASSWORD = re.compile(r"(\b[A-Za-z][\w+.-]{0,20}://[^/\s:@]{0,200}:)[^@\s/]{1,500}@")
_BEARER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_KNOWN_SHAPES = re.compile(
    r"\b(?:hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|AKIA[0-9A-Z]{12,}"
    r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END|\Z)", re.DOTALL)
# Blanks and prefixes are bounded: a diff may hold a megabyte without a line's end, and must not take quadratic time.
_ASSIGNMENT = re.compile(
    r"""(?<![\w.-])(?P<head>(?P<name>[A-Za-z_][\w.-]*)["']?\]?"""
    r"""(?:[ \t]{0,8}:[ \t]{0,8}[\w\[\].|][\w\[\].| ]{0,60}?)?[ \t]{0,8}[:=][ \t]{0,8}[rbuf]{0,2})"""
    r"""(?P<value>"[^"\n]*"|'[^'\n]*'|[\w+/.~-]{8,}=*(?![\w(\[.]))"""
)


def redact(value: Any) -> Any:
    """A copy of nested mappings and lists in which secret texts are `<redacted>`.

    Numbers, booleans and None stay, whatever their name; below a secret name all texts are secret.
    """
    return _redact(value, secret=False)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without secrets: `--token X`, `--token=X` and `--set model.args.api_key=X`."""
    found, secret_next = [], False
    for word in argv:
        if secret_next and not word.startswith("-"):
            found.append(REDACTED)
        else:
            found.append(_redact_word(word))
        secret_next = word.startswith("-") and "=" not in word and is_secret_name(word)
    return found


def redact_text(text: str) -> str:
    """Free text, such as a diff: assignments to secret names, passwords in URLs, well-known shapes of tokens."""
    text = _PRIVATE_KEY.sub(rf"\1 {REDACTED} \2", text)
    text = _ASSIGNMENT.sub(_assignment, text)
    text = _URL_PASSWORD.sub(rf"\1{REDACTED}@", text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    return _KNOWN_SHAPES.sub(REDACTED, text)


def _redact(value: Any, *, secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _redact(item, secret=secret or is_secret_name(str(key))) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(item, secret=secret) for item in value]
    if isinstance(value, str):
        if secret:
            return REDACTED
        return _KNOWN_SHAPES.sub(REDACTED, _URL_PASSWORD.sub(rf"\1{REDACTED}@", value))
    return value


def _redact_word(word: str) -> str:
    """One word of a command line; `--set=a.token=x` has two names in it."""
    parts = word.split("=")
    for count in range(1, len(parts)):
        if _path_is_secret(parts[count - 1]) and not _is_number("=".join(parts[count:])):
            return "=".join([*parts[:count], REDACTED])
    return redact_text(word)


def _assignment(match: re.Match[str]) -> str:
    value = match["value"]
    quoted = value[0] in "\"'"
    if not _path_is_secret(match["name"]) or value.strip("\"'") == "":
        return match[0]
    # Unquoted, in code, it is mostly an expression; a token has letters and digits.
    if not quoted and not (re.search(r"\d", value) and re.search(r"[A-Za-z]", value)):
        return match[0]
    quote = value[0] if quoted else ""
    return f"{match['head']}{quote}{REDACTED}{quote}"


def _path_is_secret(path: str) -> bool:
    return any(is_secret_name(part) for part in path.split("."))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
