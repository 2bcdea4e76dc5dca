"""YAML as users expect it: YAML 1.2 scalars, a line for every value, errors that name the line.

PyYAML reads YAML 1.1: `1e-3` is a string there, `24:00:00` is 86400, `off` is False and `010` is 8.
Here they are 0.001, "24:00:00", "off" and 10. Dates and `1_000` stay strings.

ruamel.yaml 0.19 was tried instead. It reads `1_000` and `0b11` as numbers, `2020-01-01` as a date and `1e999` as
infinity, lets unknown tags and a list that holds itself pass, and needs 1.4 s for a file that libyaml reads into nodes
in 0.05 s. The scalars, the bounds and the messages of this package would stay beside it.
"""

from __future__ import annotations

from fairlead.yaml.files import load_file
from fairlead.yaml.reader import Document, Unquoted, load, parse_scalar_or_flow
from fairlead.yaml.writer import dump

__all__ = ["Document", "Unquoted", "dump", "load", "load_file", "parse_scalar_or_flow"]
