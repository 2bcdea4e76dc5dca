"""Lets mkdocstrings read this project's docstrings: `Example:` is a section of examples, `::` begins code."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Docstrings"]


class Docstrings(griffe.Extension):
    """Adapts each docstring as it is read; requirement numbers are left to the source."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of a module, class, function or attribute."""
        if obj.docstring is None:
            return
        text = re.sub(r"^(\s*)Example::?$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
        text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
        text = re.sub(r"\s*# doctest: \+\w+", "", text)
        obj.docstring.value = re.sub(r"\s*\(R\d+(?:(?:, | to | and )R\d+)*\)", "", text)
