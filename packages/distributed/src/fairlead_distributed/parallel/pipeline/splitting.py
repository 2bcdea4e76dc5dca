"""Where to cut a chain of layers into stages: by names, by numbers, by parameters, or by measured time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fairlead.errors import ConfigError

_WHERE = "split"


def split_by_counts(layers: int, counts: Sequence[int], stages: int) -> list[range]:
    """Stages of so many layers each; the last one takes the rest where its number is left out.

    Raises:
        ConfigError: The numbers do not fit the layers, or the number of stages.

    Example:
        >>> split_by_counts(30, [8, 8, 8], stages=4)
        [range(0, 8), range(8, 16), range(16, 24), range(24, 30)]
    """
    _enough(layers, stages)
    rest = layers - sum(counts)
    numbers = [*counts, rest] if len(counts) == stages - 1 else list(counts)
    if len(numbers) != stages or sum(numbers) != layers or min(numbers) < 1:
        raise ConfigError(
            f"{' + '.join(map(str, counts))} layers do not make {stages} stages of a model of {layers} layers",
            where=_WHERE,
            why=f"they are {sum(counts)} layers in {len(counts)} stages",
            fix=f"give {stages} numbers that add up to {layers}, or {stages - 1} and the last stage takes the rest",
        )
    return _ranges([sum(numbers[:i]) for i in range(stages)], layers)


def split_at(names: Sequence[str], starts: Sequence[str], stages: int) -> list[range]:
    """Stages that begin with the named layers; the first one need not be named.

    Raises:
        ConfigError: There is no such layer, they are out of order, or not as many as there are stages.

    Example:
        >>> split_at(["embedding", "blocks.0", "blocks.1", "head"], ["blocks.1"], stages=2)
        [range(0, 2), range(2, 4)]
    """
    _enough(len(names), stages)
    unknown = [start for start in starts if start not in names]
    if unknown:
        raise ConfigError(
            f"no layer of the pipeline is called {unknown[0]!r}",
            where=_WHERE,
            fix=f"the layers are {', '.join(names)}",
        )
    at = [names.index(start) for start in starts]
    at = at if at[:1] == [0] else [0, *at]
    if len(at) != stages or at != sorted(set(at)):
        raise ConfigError(
            f"{len(at)} stages begin at {', '.join(names[i] for i in at)}",
            where=_WHERE,
            why=f"there are {stages} stages, and they follow each other",
            fix=f"name the first layer of each of the stages 2 to {stages}, in their order",
        )
    return _ranges(at, len(names))


def split_by_cost(
    costs: Sequence[float], stages: int, *, first_stage_less_layers: float = 0, last_stage_less_layers: float = 0
) -> list[range]:
    """The cut with which the most expensive stage is as cheap as it can be.

    Args:
        costs: What each layer costs, in any unit.
        stages: How many stages.
        first_stage_less_layers: Layers that the first stage is to have less than others, because it has other work,
            such as the embedding: that many average layers are added to what it costs.
        last_stage_less_layers: The same for the last one, which has the head and the loss.

    Raises:
        ConfigError: There are more stages than layers.

    Example:
        >>> split_by_cost([1] * 10, 2), split_by_cost([1] * 10, 2, last_stage_less_layers=2)
        ([range(0, 5), range(5, 10)], [range(0, 6), range(6, 10)])
    """
    layers = len(costs)
    _enough(layers, stages)
    average = sum(costs) / layers
    extra = [0.0] * stages
    extra[0] += first_stage_less_layers * average
    extra[-1] += last_stage_less_layers * average
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[i]: the cheapest way to put the first i layers into the stages so far, and where the last of them begins.
    never: tuple[float, float, tuple[int, ...]] = (float("inf"), 0.0, ())
    best = [(0.0, 0.0, never[2]), *[never] * layers]
    for stage in range(stages):
        after = [never] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            found = []
            for begin in range(stage, end):
                load = sums[end] - sums[begin] + extra[stage]
                worst, squares, cuts = best[begin]
                found.append((max(worst, load), squares + load * load, (*cuts, begin)))  # squares: even where it can be
            after[end] = min(found)
        best = after
    return _ranges(list(best[layers][2]), layers)


def layer_costs(layers: Sequence[nn.Module]) -> list[float]:
    """The parameters of each layer, which most of its work and memory follow; one of none counts as one parameter."""
    return [float(max(1, sum(p.numel() for p in layer.parameters()))) for layer in layers]


def _enough(layers: int, stages: int) -> None:
    if stages > layers:
        raise ConfigError(
            f"{layers} layers cannot be split into {stages} stages",
            where=_WHERE,
            why="each stage needs a layer at least",
            fix=f"use at most {layers} ranks times stages per rank, or a deeper model",
        )


def _ranges(starts: list[int], layers: int) -> list[range]:
    return [range(a, b) for a, b in zip(starts, [*starts[1:], layers], strict=True)]
