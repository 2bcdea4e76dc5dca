"""Jobs as people write them, killed at random steps: was each the same in the end, and what had been said of it?

`nox -s matrix -- --seed 1 --kills 2`. Every pair of choices of two axes
stands in one of the jobs at least. A run that was called exact and was not the same is a failure; one that was called
otherwise is not.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from integration_tests.exact.cases import Case, run, warm
from integration_tests.exact.compare import differences
from integration_tests.exact.jobs.probe import KILL

__all__ = ["AXES", "Outcome", "choices", "pairs", "tried"]

_HERE = "integration_tests.exact.jobs.written"
_LIGHTNING = "lightning.pytorch.callbacks"
_EPOCHS_MEAN = "monitor: train/loss_epoch, patience: 1, check_on_train_epoch_end: true"
_KEEPING_WEIGHTS = "amount: 0.1, use_lottery_ticket_hypothesis: false"
_AFTERWARDS = "afterwards:validate"

# Where it is installed.
_HUGGING_FACE = ["hf", "hf_map", "hf_batched", "hf_shuffled"] if importlib.util.find_spec("datasets") else []

AXES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "loader": {
        name: (f"data.args.loader={name}",)
        for name in [
            "shuffled",
            "generator",
            "weighted",
            "subset",
            "sizeless",
            "buckets",
            "augmented",
            "collating",
            "stateful",
            "stateful_generator",
            "stream",
            "plain_stream",
            "stream_buffered",
            "nodes",
            *_HUGGING_FACE,
            "max_size",
            "max_size_cycle",
            "min_size",
        ]
    },
    "workers": {
        "0": (),
        "2": ("data.args.workers=2",),
        "2 persistent": ("data.args.workers=2", "data.args.persistent=true"),
    },
    "accumulation": {
        "1": (),
        "3": ("trainer.accumulate_grad_batches=3",),
        "manual": (f"model.class={_HERE}.model:Manual",),
        "manual, over epochs": (f"model.class={_HERE}.model:Seldom",),
        "uncounted": (f"model.class={_HERE}.model:Uncounted",),
    },
    "validation": {
        "epoch": (),
        "half": ("trainer.val_check_interval=0.5",),
        "in a window": ("trainer.val_check_interval=2",),
        "none": ("trainer.limit_val_batches=0",),
    },
    "callback": {
        "none": (),
        "early stopping": (f"callback:{_LIGHTNING}:EarlyStopping {{{_EPOCHS_MEAN}}}",),
        "averaging": (f"callback:{_LIGHTNING}:StochasticWeightAveraging {{swa_lrs: 0.01, swa_epoch_start: 1}}",),
        "pruning": (f"callback:{_LIGHTNING}:ModelPruning {{pruning_fn: l1_unstructured, {_KEEPING_WEIGHTS}}}",),
        "rate finder": (f"callback:{_LIGHTNING}:LearningRateFinder {{num_training_steps: 5}}",),
        "batch finder": (f"callback:{_LIGHTNING}:BatchSizeFinder {{max_trials: 3, steps_per_trial: 1}}",),
        "finetuning": (f"callback:{_HERE}.model:Unfreezing {{}}",),
        "accumulation schedule": (
            f"callback:{_LIGHTNING}:GradientAccumulationScheduler {{scheduling: {{0: 1, 1: 3}}}}",
        ),
        "moving average": (f"callback:{_HERE}.model:Ema {{}}",),
    },
    "module": {
        "plain": (),
        "compiled part": ("model.args.part=compiled",),
        "unfrozen in a hook": ("model.args.part=unfrozen",),
    },
    "reloading": {
        "never": (),
        "every 2 epochs": ("trainer.reload_dataloaders_every_n_epochs=2", "data.args.reloaded=true"),
    },
    "evaluation": {"none": (), "validate": (_AFTERWARDS,)},
    "schedule": {
        name: (f"model.args.schedule={name}",) for name in ["none", "one_cycle", "warmup", "plateau", "cosine"]
    },
    "keeps": {
        name: (f"model.args.keeps={name}",)
        for name in (
            "nothing",
            "counter",
            "running mean",
            "list in a dict",
            "hidden state",
            "outputs",
            "replay",
            "generators",
        )
    },
}

PLACES = ("train_batch_start", "train_batch_end", "validation_batch_start")
Choice = Mapping[str, str]

# Without a length, Lightning takes no fraction of an epoch, can estimate no steps, and averages no batch norm.
_ENDLESS = {"sizeless", "stream", "plain_stream", "stream_buffered", "nodes", *_HUGGING_FACE}
_OF_A_LENGTH = {"validation": {"half"}, "schedule": {"one_cycle", "warmup"}, "callback": {"averaging"}}


_MANUAL = ("manual", "manual, over epochs", "uncounted")
# Lightning refuses two ways to accumulate, and torch's schedules a group of parameters that finetuning adds; nothing is
# evaluated without a loader.
_REFUSED = [
    {"callback": "accumulation schedule", "accumulation": "3"},
    *({"callback": "accumulation schedule", "accumulation": one} for one in _MANUAL),
    {"callback": "finetuning", "schedule": "one_cycle"},
    {"callback": "finetuning", "schedule": "warmup"},
    {"callback": "finetuning", "module": "unfrozen in a hook"},
    {"validation": "none", "evaluation": "validate"},
]


def possible(choice: Choice) -> bool:
    """Whether Lightning trains it."""
    if any(refused.items() <= choice.items() for refused in _REFUSED):
        return False
    return choice.get("loader") not in _ENDLESS or all(choice.get(k) not in v for k, v in _OF_A_LENGTH.items())


def pairs(seed: int) -> Iterator[Choice]:
    """Choices in which every pair of values of two axes stands together at least once, greedily."""
    generator = random.Random(seed)
    names = list(AXES)
    left = {
        frozenset({(one, value), (other, its)})
        for one, other in itertools.combinations(names, 2)
        for value in AXES[one]
        for its in AXES[other]
        if possible({one: value, other: its})
    }
    while left:
        best: dict[str, str] = {}
        most = -1
        for _ in range(60):
            chosen = dict(generator.choice(sorted(map(sorted, left))))
            for name in generator.sample(names, len(names)):
                if name not in chosen:
                    values = generator.sample(sorted(AXES[name]), len(AXES[name]))
                    chosen[name] = max(values, key=partial(_covers, left, chosen, name))
            covered = sum(pair <= set(chosen.items()) for pair in left)
            if covered > most:
                best, most = chosen, covered
        left = {pair for pair in left if not pair <= set(best.items())}
        yield {name: best[name] for name in names}


def _covers(left: set[frozenset[tuple[str, str]]], chosen: Choice, name: str, value: str) -> int:
    """How many more pairs a value covers; -1 where it is not possible."""
    more = {**chosen, name: value}
    return sum((name, value) in pair and pair <= set(more.items()) for pair in left) if possible(more) else -1


def choices() -> Iterator[Choice]:
    """One axis at a time, the others plain."""
    plain = {name: next(iter(values)) for name, values in AXES.items()}
    yield plain
    for name, values in AXES.items():
        for value in list(values)[1:]:
            yield {**plain, name: value}


def case_of(choice: Choice) -> Case:
    """The job of a choice."""
    sets, callbacks = [], [f"{{class: {_HERE.rpartition('.')[0]}.probe:Probe}}"]
    for name, value in choice.items():
        for one in AXES[name][value]:
            if one == _AFTERWARDS:
                continue
            if one.startswith("callback:"):
                path, _, args = one.removeprefix("callback:").partition(" ")
                callbacks.append(f"{{class: {json.dumps(path)}, args: {args}}}")
            else:
                sets.append(one)
    return Case("written").setting(*sets, f"trainer.callbacks=[{', '.join(callbacks)}]")


@dataclass(frozen=True)
class Outcome:
    """What came of a choice.

    Args:
        choice: It.
        said: `exact`, or the reasons why not.
        found: What was not the same, by kill; empty: everything was.
    """

    choice: Choice
    said: str
    found: tuple[str, ...]

    @property
    def wrong(self) -> bool:
        """It was called exact, and was not."""
        return bool(self.found) and self.said == "exact"

    def __str__(self) -> str:
        plain = {name: next(iter(values)) for name, values in AXES.items()}
        chosen = ", ".join(f"{k} {v}" for k, v in self.choice.items() if v != plain[k]) or "plain"
        return f"{chosen}: {'NOT EQUAL' if self.found else 'equal'}; said {self.said}"


def tried(choice: Choice, folder: Path, kills: int, seed: int) -> Outcome:
    """Trains a job undisturbed, then again for each kill, and compares."""
    case = case_of(choice)
    found, said = [], "nothing"
    try:
        run(case, folder / "undisturbed", warm)
        reference = case.directory(folder / "undisturbed")
        history = [json.loads(line) for line in (reference / "history.jsonl").read_text().splitlines()]
        steps = next(event["step"] for event in history if event["event"] == "finished")
        record = json.loads((reference / "starts/1/exactness.json").read_text())
        said = "exact" if record["exact"] else "; ".join(reason["what"] for reason in record["reasons"])
        generator = random.Random(f"{seed} {sorted(choice.items())}")
        for number, step in enumerate(generator.sample(range(1, steps), min(kills, steps - 1))):
            for place in generator.sample(PLACES, len(PLACES)):  # no validation begins at most of the steps
                cwd = folder / f"killed-{number}-{place}"
                cwd.mkdir()
                if warm(case, cwd, {KILL: f"{place}:{step}"}).end().code != 0:
                    break
            run(case, cwd, warm)
            different = differences(reference, case.directory(cwd))
            if choice.get("evaluation", "none") != "none":
                both = [validated(case, one) for one in (folder / "undisturbed", cwd)]
                different += [f"validate: {both[0]} became {both[1]}"] if both[0] != both[1] else []
            found += [f"killed at {place}:{step}: {line}" for line in different[:3]]
    except Exception as error:  # an assertion, or a file that is not there: the table goes on, and says it
        found.append(f"{type(error).__name__}: {error}"[-1500:])
    return Outcome(choice, said, tuple(found))


def validated(case: Case, cwd: Path) -> str:
    """What `fairlead validate` prints of a run that has ended.

    Raises:
        AssertionError: It failed.
    """
    ended = warm(case.doing("validate"), cwd, {}).end()
    assert ended.code == 0, f"validate ended with {ended.code}: {ended.text}"
    return next(line for line in ended.text.splitlines() if line.startswith("val/loss"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints an outcome a line, and what differs below it."""
    parser = argparse.ArgumentParser(prog="matrix.py", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=2, help="of each job (2)")
    parser.add_argument("--single", action="store_true", help="one axis at a time in place of pairs")
    parser.add_argument("--only", nargs="+", default=[], help="choices in which these words stand")
    chosen = parser.parse_args(arguments)
    planned = list(choices() if chosen.single else pairs(chosen.seed))
    planned = [choice for choice in planned if all(word in str(Outcome(choice, "", ())) for word in chosen.only)]
    wrong = unequal = 0
    with tempfile.TemporaryDirectory(prefix="fairlead-matrix-") as folder, ThreadPoolExecutor(2) as pool:
        done = pool.map(
            lambda item: tried(item[1], Path(folder) / str(item[0]), chosen.kills, chosen.seed), enumerate(planned)
        )
        for number, outcome in enumerate(done, start=1):
            unequal, wrong = unequal + bool(outcome.found), wrong + outcome.wrong
            print(f"{number:3}/{len(planned)} {'WRONG ' if outcome.wrong else ''}{outcome}", flush=True)
            for line in outcome.found:
                print(f"        {line}", flush=True)
    print(f"{len(planned)} jobs, {unequal} not equal, {wrong} of them called exact")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
