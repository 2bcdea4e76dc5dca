"""The page that `fairlead verify` prints."""

from __future__ import annotations

from typing import Any

from fairlead_lightning.verify.text import page

FOUND: dict[str, Any] = {
    "layout": {"ranks": 2, "replicas": 2, "mesh": {}, "expert": 1},
    "strategy": "ddp",
    "scaled": [],
    "steps": 3,
    "noise": {"repeats": 4, "multiple": 10},
    "compared": {},
    "alive": {"losses": [1.0, 0.5], "still": [], "gradient_norm": 1.0, "moved": 2},
    "remarks": [],
    "ok": False,
    "first": None,
    "red": [],
    "wrong": ["no gradient at all in the layout", "no weight moves in the layout"],
    "causes": [],
    "ranks": [2],
    "not_compared": ["later steps than 3"],
}
FIRST = {"what": "gradient", "name": "a", "rank": 0, "relative": 1.0, "noise": 1e-7, "ratio": 1e7, "held": None}


def test_each_sentence_is_printed_once() -> None:
    lines = list(page(FOUND))
    assert lines[-2:] == ["WRONG: no gradient at all in the layout", "and      no weight moves in the layout"]
    assert list(page({**FOUND, "wrong": FOUND["wrong"][:1]}))[-1] == "WRONG: no gradient at all in the layout"


def test_beside_a_difference_all_of_them_are_rows() -> None:
    text = "\n".join(page({**FOUND, "first": FIRST, "red": ["a"], "causes": ["not known"]}))
    assert "DIFFERENT: gradient a is the first of 1 that differ" in text
    assert "wrong    no gradient at all in the layout\n         no weight moves in the layout" in text
    assert text.endswith("cause    not known")
