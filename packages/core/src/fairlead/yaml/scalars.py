"""What an unquoted scalar means: the core schema of YAML 1.2.2, section 10.3.2."""

from __future__ import annotations

import math
import re

Scalar = str | int | float | bool | None

_CONSTANTS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **{sign + word: float(sign + "inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")},
}
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MAX_DIGITS = 4000  # int() itself refuses more than 4300 decimal digits


def resolve_plain(text: str) -> Scalar:
    """The value of an unquoted scalar; `ValueError`: a number that Python cannot hold (`1e999`, too many digits)."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _DECIMAL.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} digits")
        return int(text)
    if _OCTAL_OR_HEX.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if math.isinf(value):
            raise ValueError(f"{text[:40]} is beyond the largest float; infinity is written .inf")
        return value
    return text
