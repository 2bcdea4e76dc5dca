"""Some of the jobs that people write (`nox -s matrix` has all pairs): killed, they end the same, or it was told."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.exact.matrix import AXES, pairs, possible, tried

pytestmark = pytest.mark.slow

PLAIN = {name: next(iter(values)) for name, values in AXES.items()}

EXACT = {
    "one-cycle, batch-size finder": {"schedule": "one_cycle", "keeps": "counter", "callback": "batch finder"},
    "warm-up, averaged weights": {
        "schedule": "warmup",
        "callback": "moving average",
        "validation": "half",
        "loader": "augmented",
        "keeps": "running mean",
    },
    "own generator": {"loader": "stateful_generator", "schedule": "plateau", "keeps": "list in a dict"},
    "own batch sampler": {"loader": "buckets", "callback": "accumulation schedule", "keeps": "replay", "workers": "2"},
    "state in collate_fn": {"loader": "collating", "accumulation": "manual", "keeps": "generators"},
    "pruned": {"callback": "pruning", "accumulation": "3", "validation": "in a window", "keeps": "outputs"},
    "learning-rate finder": {"callback": "rate finder", "schedule": "cosine", "loader": "max_size"},
    "reloaded, a compiled part": {"reloading": "every 2 epochs", "module": "compiled part", "evaluation": "validate"},
    "unfrozen in a hook, steps uncounted": {"module": "unfrozen in a hook", "accumulation": "uncounted"},
    "stochastic weight averaging": {"callback": "averaging", "keeps": "hidden state", "loader": "weighted"},
}
TOLD = {
    "state in workers": ({"loader": "collating", "workers": "2"}, "what a loader's workers keep in attributes"),
    "a stream without a state": ({"loader": "plain_stream"}, "the IterableDataset Stream"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", EXACT)
def test_ends_the_same_and_is_called_exact(name: str, tmp_path: Path) -> None:
    outcome = tried({**PLAIN, **EXACT[name]}, tmp_path, kills=1, seed=1)
    assert not outcome.found, "\n".join(outcome.found)
    assert outcome.said == "exact"


@pytest.mark.full
@pytest.mark.parametrize("name", TOLD)
def test_what_is_not_the_same_is_not_called_exact(name: str, tmp_path: Path) -> None:
    chosen, said = TOLD[name]
    assert said in tried({**PLAIN, **chosen}, tmp_path, kills=1, seed=1).said


@pytest.mark.full
def test_a_sampler_without_a_length_can_be_trained_with(tmp_path: Path) -> None:
    """It is not called exact, since nobody knows what it depends on; this one ends the same."""
    assert not tried({**PLAIN, "loader": "sizeless", "keeps": "hidden state"}, tmp_path, kills=1, seed=1).found


@pytest.mark.full
def test_the_matrix_has_every_pair() -> None:
    jobs = list(pairs(3))
    *_, second, most = sorted(map(len, AXES.values()))
    assert len(jobs) < 1.1 * second * most  # fewer than their product cannot have every pair of the two longest axes
    for one, its in AXES.items():
        for other, theirs in AXES.items():
            if one < other:
                wanted = {(a, b) for a in its for b in theirs if possible({one: a, other: b})}
                assert wanted == {(job[one], job[other]) for job in jobs}
