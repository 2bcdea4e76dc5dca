"""Which samples are read: by several replicas or workers, by none of them, or from data that differ on the ranks.

Batches show only the steps that are compared. So each rank also draws a full epoch after its training, and so does
the one process: the indices of a map-style dataset, without reading it, where it is the same everywhere; the
fingerprints of the samples where it is not, and of a stream. Each is drawn twice. What one process would not draw
again (a sampler with replacement), or what a second pass gives in part only (a stream with a position), says nothing.
"""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Final

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from fairlead_distributed.batch_order import Order, ReplayedOrder
from fairlead_distributed.rng import isolated_rng, seed_cpu, set_cpu_states
from fairlead_distributed.sampler import ResumableDistributedSampler
from fairlead_lightning.verify.batches import digest, rows

_PROBED: Final = 8
"""Samples of a dataset that are compared between the ranks."""
_MOST_INDICES: Final = 2_000_000
"""The most indices of an epoch that a rank draws."""
_SAMPLES: Final = 5_000
"""The most samples that it reads for their fingerprints."""
_SECONDS: Final = 10.0
"""How long it reads them at most."""
_SPLIT: Final = "take every n-th sample by global rank, or use split_dataset_by_node or a sampler"

Generators = tuple[Any, ...]
"""The states of the global generators, as `fairlead_distributed.rng.cpu_states` gives them."""
Passes = Sequence[Sequence[Hashable]]
"""What was drawn in an epoch, in order, twice."""


@dataclass(frozen=True)
class Reading:
    """What one process reads in an epoch of one of its loaders.

    Attributes:
        name: Of the dataset's class.
        length: Samples of the dataset; None: a stream, or no dataset.
        some: Fingerprints of a few of its samples; None where they are not the same each time.
        by_position: A sampler of torch's, or ours, splits it between the ranks.
        slack: Samples of an epoch that a rank may leave out, as its last batch is not full.
        batch: Samples of a batch.
        indices: Of a map-style dataset; None where they cannot be drawn again.
        samples: Fingerprints, where indices do not tell; None where they were not read.
        begun: Those of the first samples of a stream that is too long for its fingerprints.
        why: Why neither is there.
    """

    name: str
    length: int | None = None
    some: list[str] | None = None
    by_position: bool = False
    slack: int = 0
    batch: int = 1
    indices: Passes | None = None
    samples: Passes | None = None
    begun: Sequence[Hashable] | None = None
    why: str = ""

    @property
    def dataset(self) -> tuple[Any, ...]:
        """What is the same where datasets are."""
        return self.name, self.length, self.some


def read_epochs(loaders: Any, states: Sequence[Generators], gather: Callable[[Any], list[Any]]) -> list[Reading]:
    """Draws an epoch of each training loader twice.

    Args:
        loaders: As the Trainer has them, or as the user made them.
        states: The generators that each pass begins with.
        gather: Gives what all have that are compared, by a collective.
    """
    flat = list(loaders.flattened) if isinstance(loaders, CombinedLoader) else tree_leaves(loaders)
    with isolated_rng():
        own = [_probe(one) for one in flat]
        every = gather([one.dataset for one in own])
        same = [all(other[i : i + 1] == every[0][i : i + 1] for other in every) for i in range(len(own))]
        return [_drawn(loader, one, states, same[i]) for i, (loader, one) in enumerate(zip(flat, own, strict=True))]


def _dataset(loader: Any) -> Any:
    """The user's own: workers may have another before it."""
    dataset = loader.dataset
    inside = vars(dataset).get("_fairlead") if hasattr(dataset, "__dict__") else None
    return inside[0] if inside is not None else dataset


def _sampler(loader: Any) -> Any:
    batches = loader.batch_sampler
    return loader.sampler if batches is None else getattr(batches, "sampler", None)


def _probe(loader: Any) -> Reading:
    """The dataset of a loader, and a few of its samples."""
    if not isinstance(loader, DataLoader):
        name = type(getattr(loader, "loader", loader)).__name__
        return Reading(name, why=f"{name} is stateful, or no DataLoader")
    dataset, size = _dataset(loader), loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
    batch = size if isinstance(size, int) else 1
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return Reading(name, batch=batch)
    sampler = _sampler(loader)
    splits = isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
    # What wraps a sampler of the user's splits what that says, and not the dataset.
    splits = splits and not isinstance(sampler, DistributedSamplerWrapper)
    drops = loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)
    found = Reading(name, by_position=splits, slack=batch - 1 if drops else 0, batch=batch)
    try:
        length = len(dataset)
        indices = sorted({i * (length - 1) // (_PROBED - 1) for i in range(_PROBED)}) if length else []
        # Random transforms of the global generators give the same on all ranks; others give another sample.
        first, second = ([_fingerprint(dataset, at, at) for at in indices] for _ in range(2))
    except Exception:  # it is read by names, or has no length: then what its sampler gives says which samples
        return found
    return replace(found, length=length, some=first if first == second else None)


def _fingerprint(dataset: Any, at: Any, seed: int) -> str:
    seed_cpu(seed)
    return digest(dataset[at])


def _drawn(loader: Any, found: Reading, states: Sequence[Generators], same: bool) -> Reading:
    if found.why:
        return found
    try:
        if isinstance(loader.dataset, IterableDataset):
            return _streamed(loader, found, states)
        keys = [_keys(loader, one) for one in states]
        if any(one is None for one in keys):
            return replace(found, why=f"the sampler of {found.name} never ends, or continues where it was last left")
        indices: Passes = [[_index(key) for key in one or ()] for one in keys]
        found = replace(found, indices=indices)
        if same:
            return found
        return _sampled(loader, found, [one or [] for one in keys])
    except Exception as error:  # the user's code, read more often than a training does
        return replace(found, why=f"{found.name} cannot be read twice: {type(error).__name__}: {error!s:.80}")


def _keys(loader: Any, state: Generators) -> list[Any] | None:
    """What the sampler gives in an epoch, in order; None: it continues where it was, or has no end."""
    batches, sampler = loader.batch_sampler, _sampler(loader)
    stateful = [one for one in (batches, sampler) if hasattr(one, "state_dict")]
    if isinstance(batches, ReplayedOrder) and batches.is_stateful:
        return None
    if not isinstance(batches, Order) and any(not isinstance(one, ResumableDistributedSampler) for one in stateful):
        return None
    set_cpu_states(state)
    plain = batches is None or type(batches) is BatchSampler  # whose last batch does not matter
    drawn = iter(sampler) if plain else chain.from_iterable(batches)
    found = list(islice(drawn, _MOST_INDICES + 1))
    return found if len(found) <= _MOST_INDICES else None


def _index(key: Any) -> Hashable:
    try:
        return operator.index(key)
    except TypeError:  # a name, a pair
        return repr(key)


def _sampled(loader: Any, found: Reading, keys: list[list[Any]]) -> Reading:
    """The fingerprints of what the sampler gives, of samples that do not depend on any generator."""
    dataset, began = _dataset(loader), time.monotonic()
    if max(map(len, keys)) > _SAMPLES:
        return replace(found, why=f"an epoch of {found.name}, which is not the same everywhere, is long")
    known: dict[Hashable, str] = {}
    for key in chain.from_iterable(keys):
        if _index(key) in known:
            continue
        known[_index(key)] = _fingerprint(dataset, key, 0)
        if len(known) <= _PROBED and known[_index(key)] != _fingerprint(dataset, key, 1):
            return replace(found, why=f"{found.name} draws its samples at random")
        if time.monotonic() - began > _SECONDS:
            return replace(found, why=f"{found.name} is slow to read")
    return replace(found, samples=[[known[_index(key)] for key in one] for one in keys])


def _streamed(loader: Any, found: Reading, states: Sequence[Generators]) -> Reading:
    """The fingerprints of a stream's samples; what its workers would read is read in this process."""
    if loader.batch_size is None and loader.batch_sampler is None:
        return replace(found, why=f"{found.name} makes batches by itself")
    dataset, began = _dataset(loader), time.monotonic()
    passes: list[list[Hashable]] = []
    for state in states:
        set_cpu_states(state)
        samples: list[Hashable] = []
        for sample in dataset:
            samples.append(digest(sample))
            if len(samples) > _SAMPLES or time.monotonic() - began > _SECONDS:
                return replace(found, begun=samples, why=f"an epoch of {found.name} is long")
        passes.append(samples)
    return replace(found, samples=passes)


def unlike_one_process(replicas: Sequence[Sequence[Reading]], alone: Sequence[Reading] | None) -> tuple[list[str], str]:
    """Whether an epoch of all replicas is one of the one process.

    Args:
        replicas: What each replica reads, of each loader.
        alone: What one process reads; None where its loader is unknown.

    Returns:
        What is missing or read more than once, a sentence for each loader; and why it is not known of some.
    """
    if alone is None or any(len(one) != len(alone) for one in replicas):
        return [], "the loader is not known in one process"
    found, unknown = [], ""
    for number, single in enumerate(alone):
        wrong, why = _of_loader([one[number] for one in replicas], single)
        found += wrong
        unknown = unknown or why
    return found, unknown


def _of_loader(ranks: Sequence[Reading], alone: Reading) -> tuple[list[str], str]:
    every = [*ranks, alone]
    by_index = all(one.indices is not None and one.dataset == alone.dataset for one in every)
    passes = [one.indices if by_index else one.samples for one in every]
    if any(one is None for one in passes):
        if all(one.begun or one.samples for one in every):
            return _of_beginnings([one.begun or (one.samples or [[]])[0] for one in every], alone.name)
        why = next((one.why for one in every if one.why), "")
        return [], why or f"{alone.name} is another one in one process"
    *drawn, single = [one for one in passes if one is not None]
    if by_index and alone.by_position and alone.length is not None:  # a sampler for ranks that one process has not
        single = [list(range(alone.length))] * 2
    if any(len(one[0]) != len(one[1]) or not one[0] for one in (*drawn, single)):
        return [], f"{alone.name} does not restart"
    due = Counter(single[0])
    if due != Counter(single[1]):
        return [], f"which samples of {alone.name} an epoch has is drawn at random"
    slack = sum(one.slack for one in ranks) + len(ranks) - 1
    amiss = []
    for first in range(2):
        read = sum((Counter(one[first]) for one in drawn), Counter[Hashable]())
        if not due & read:
            return [], f"{alone.name} has other samples in one process"
        missing = due - read
        twice = +Counter({key: count - max(due[key], 1) for key, count in read.items()})
        if by_index and _is_tail(missing, read) and missing.total() < len(ranks) * ranks[0].batch:
            missing.clear()  # a dataset that is cut to full batches
        if missing.total() <= slack and twice.total() <= len(ranks) - 1:
            more = len(read.keys() - due.keys())
            text = f"{more} samples of {alone.name} are not read in one process, such as other parts for each rank"
            return [], text if more else ""
        amiss.append((missing, twice))
    missing, twice = amiss[0]
    numbers = {key: at for at, key in reversed(list(enumerate(single[0])))}
    keys: list[Any] = sorted(numbers[key] for key in missing)
    if by_index:
        keys = sorted(missing, key=lambda key: (isinstance(key, str), key))
    return [_sentence(alone.name, due.total(), missing.total(), twice.total(), keys, len(ranks))], ""


def _of_beginnings(every: Passes, name: str) -> tuple[list[str], str]:
    """Of long streams those that overlap in what was read of them."""
    why = f"an epoch of {name} is long"
    *ranks, alone = every
    if len(set(alone)) < len(alone):
        return [], why  # its samples are not all different ones
    read = sum((Counter(one) for one in ranks), Counter[Hashable]())
    twice = sum(count - 1 for count in read.values())
    if twice <= max(len(ranks), read.total() // 100):
        return [], why
    first = f"{twice} of their first {read.total()} samples"
    return [f"samples are read twice: of {name}, {len(ranks)} replicas read {first} more than once; {_SPLIT}"], why


def _is_tail(missing: Iterable[Any], read: Iterable[Any]) -> bool:
    """Whether all that is missing lies behind the last index that is read."""
    indices, others = list(missing), list(read)
    numbers = all(isinstance(key, int) for key in (*indices, *others))
    return numbers and bool(others) and all(key > max(others) for key in indices)


def repeats(alone: Sequence[Reading] | None) -> bool:
    """Whether one process itself reads samples several times in an epoch, or draws which ones it reads."""
    for one in alone or ():
        for passes in (one.indices, one.samples):
            if passes is None:
                continue
            if Counter(passes[0]) != Counter(passes[1]) or len(set(passes[0])) < len(passes[0]):
                return True
    return False


def _sentence(name: str, total: int, missing: int, twice: int, names: list[Any], replicas: int) -> str:
    shown = ", ".join(map(str, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    where = f"{missing} of {total} samples that one process reads ({shown})"
    if missing and twice:
        return (
            f"samples are missing: of {name}, an epoch of {replicas} replicas leaves out {where} and reads {twice} "
            "more than once: each rank takes its part of its own order; shuffle with one seed on all ranks, "
            "before the order is split"
        )
    if missing:
        return (
            f"samples are missing: of {name}, an epoch of {replicas} replicas leaves out {where}: ranks take too small "
            "a part; split by the number of ranks that there are"
        )
    return (
        f"samples are read twice: of {name}, an epoch of {replicas} replicas reads {twice} of {total} samples more "
        f"than once; {_SPLIT}"
    )


def other_datasets(ranks: Sequence[Sequence[Reading]], replicas: Sequence[int]) -> Iterator[str]:
    """A sampler gives each rank other indices of one dataset: it has to be the same dataset."""
    for rank, readings in enumerate(ranks):
        if replicas[rank] == replicas[0]:
            continue
        for first, own in zip(ranks[0], readings, strict=False):
            if not (first.by_position and own.by_position):
                continue
            if own.length != first.length:
                what = f"{own.length} samples on rank {rank} and {first.length} on rank 0"
            elif own.some is not None and first.some is not None and own.some != first.some:
                what = f"other samples, or another order, on rank {rank} than on rank 0"
            else:
                continue
            yield (
                f"{own.name} has {what}, and a sampler splits it by position: samples are read twice or not at all; "
                "shuffle or cut it in the same way on all ranks, or set use_distributed_sampler: false for own parts"
            )
            return


def read_twice(
    batches: Sequence[Sequence[Any]], alone: Iterable[Any] | None, epoch_ends: bool, repeating: bool
) -> Iterator[str]:
    """Samples that several replicas or workers have read, which one process would have read once.

    Args:
        batches: Those of each replica.
        alone: The batches that one process reads; None where its loader is unknown.
        epoch_ends: Whether the batches are a full epoch, at whose end samplers repeat samples to make ranks even.
        repeating: Whether an epoch of one process has samples several times.
    """
    own = [Counter(_fingerprints(one)) for one in batches]
    together = sum(own, Counter())
    twice = sum(count - 1 for count in together.values())
    allowed = len(batches) * (len(batches) - 1) if epoch_ends else 0
    if twice <= allowed:
        return
    total = sum(together.values())
    if alone is not None:
        single: Counter[str] = Counter(islice(_fingerprints(alone), total))
        if repeating or any(count > 1 for count in single.values()):
            # Data that repeat themselves: only full batches, one after the other, show that they are the same.
            same = len({tuple(digest(batch) for batch in one) for one in batches}) == 1
            steps = len({digest(batch) for batch in batches[0]})
            if not same or len(batches) == 1 or steps < 2:
                return
    between = sum((own[0] & other).total() for other in own[1:])
    if between:
        who = f"{len(batches)} replicas"
        fix = "a map-style dataset with a sampler, or split_dataset_by_node, or every n-th sample by global rank"
    else:
        who = "several workers"
        fix = "take every n-th sample by torch.utils.data.get_worker_info()"
    yield f"{who} read the same samples: {twice} of {total} in the compared steps are read more than once; {fix}"


def _fingerprints(batches: Iterable[Any]) -> Iterator[str]:
    for batch in batches:
        yield from (digest(row) for row in rows(batch))
