"""Which names belong to secrets: their values are written nowhere.

A name is secret by one of its words, `wandb_api_key`, `apiKey`, `HF-TOKEN`, not by its letters: `tokenizer` and
`num_keys` are none, nor is what machine learning calls tokens and keys (`pad_token`).
"""

from __future__ import annotations

import re
from typing import Final

_SECRET: Final = frozenset(
    (
        *("key", "apikey", "token", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd"),
        *("credential", "credentials", "auth", "authorization", "oauth"),
    )
)
# The only word beside `token` or `key`.
_HARMLESS: Final = {
    "token": frozenset(
        ("pad", "bos", "eos", "unk", "mask", "cls", "sep", "start", "end", "stop", "special", "image", "text", "prompt")
    ),
    "key": frozenset(
        (
            "sort",
            "label",
            "target",
            "input",
            "output",
            "metric",
            "monitor",
            "feature",
            "data",
            "batch",
            "image",
            "text",
            "column",
            "dict",
        )
    ),
}
_WORDS: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def is_secret_name(name: str) -> bool:
    """Whether a value of this name must not be written: `WANDB_API_KEY`, `accessToken`, but not `pad_token`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if len(words) == 2 and words[0] in _HARMLESS.get(words[1], ()):
        return False
    return not _SECRET.isdisjoint(words)
