"""A loss or a gradient that is no number is noticed, and a training that does not recover from it ends, as failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch import Tensor, nn

from fairlead.findings import Finding
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.run.session import RunSession
from fairlead_distributed.run.silent_faults import finite_weights, named_weights, non_finite_weights, not_finite
from fairlead_runs.batch_size import replicas_of
from fairlead_runs.waiting import ranks_text

SCALED: Final = 20
"""Steps in a row that a gradient scaler may skip: its usual first scale of 65536 is below 1 after 17."""


FEW: Final = 1 << 14
"""Elements that are looked at in every step: a pass over all gradients would cost a step of DDP 4 %."""
_MOST_NOTED: Final = 256
"""Steps after which notes are read in any case, however rarely the training logs."""


class GradientWatch:
    """Notes before each step of an optimizer whether its gradients are finite, and reads the notes when it is asked.

    In every step it looks at those of the smallest parameters, biases and gains, together `FEW` elements: where a
    backward pass meets a value that is not finite, those of all layers before it are not finite either. At all of them
    where the caller asks for it. A note stays where the gradients are, so that no step waits for an accelerator.
    """

    def __init__(self) -> None:
        self._weights: list[tuple[str, nn.Parameter]] = []
        self._own_hook: Any = None
        self.begin(None)

    def begin(self, module: nn.Module | None, *, several_batches: bool = False) -> None:
        """A training of this module begins; `several_batches`: ranks have other ones than this one."""
        if self._own_hook is not None:
            self._own_hook.remove()
            self._own_hook = None
        self._own: Tensor | None = None
        self._noted: list[tuple[int, list[str], Tensor, Tensor | None]] = []
        self._row = 0
        self._first: tuple[str, int, bool] | None = None
        self._weights = [] if module is None else [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._few = _smallest(self._weights)
        if several_batches and self._few:
            # The ranks' mean does not say whose it was. This rank's own part passes here before: the gradient of the
            # first small parameter of a layer, one of the last that are computed.
            first: Any = next((parameter for name, parameter in self._few if "." in name), self._few[0][1])
            self._own_hook = first.register_hook(self._see_own)

    def _see_own(self, grad: Tensor) -> None:
        values = _values(grad)
        if values.numel():
            size = _sizes([values])
            self._own = size if self._own is None else self._own.maximum(size)  # what is not finite stays so

    @torch.no_grad()
    def look(self, step: int, *, at_all: bool = True) -> None:
        """The gradients are those of the step: unscaled, and the mean over the ranks."""
        own, self._own = self._own, None
        weights = self._weights if at_all else self._few
        given = {name: _values(one.grad) for name, one in weights if one.grad is not None}
        given = {name: values for name, values in given.items() if values.numel()}
        if given:
            self._noted.append((step, list(given), _sizes(list(given.values())), own))
        if len(self._noted) >= _MOST_NOTED:
            self._read()

    def found(self, *, scaled: bool) -> tuple[str, int, bool] | None:
        """The first weight whose gradient is not finite, since which step, and whether by this rank's own batch.

        None where the last gradients were finite, or where a gradient scaler (`scaled`) skips such steps and has not
        skipped too many in a row.
        """
        self._read()
        return self._first if self._row >= (SCALED if scaled else 1) else None

    def _read(self) -> None:
        noted, self._noted = self._noted, []
        for step, names, sizes, own in noted:
            bad = [not math.isfinite(size) for size in sizes.tolist()]
            if not any(bad):
                self._row, self._first = 0, None
                continue
            self._row += 1
            if self._first is None:
                is_own = own is not None and not bool(own.isfinite().all())
                self._first = names[bad.index(True)], step, is_own


def _smallest(weights: list[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """The smallest parameters that have `FEW` elements together, in their order; one at least."""
    sizes = {name: 0 if isinstance(one, nn.UninitializedParameter) else one.numel() for name, one in weights}
    few: set[str] = set()
    total = 0
    for name in sorted((name for name in sizes if sizes[name]), key=lambda name: sizes[name]):
        total += sizes[name]
        if few and total > FEW:
            break
        few.add(name)
    return [(name, one) for name, one in weights if name in few or not few]


def _values(grad: Tensor) -> Tensor:
    """What this rank has of it, dense."""
    local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return local.coalesce().values() if local.is_sparse else local


def _sizes(grads: list[Tensor]) -> Tensor:
    """The largest absolute value of each, infinite or NaN where one of its values is."""
    norms = torch._foreach_norm(grads, math.inf)
    return torch.stack([norm.to(norms[0].device) for norm in norms])


Row = tuple[int, int, str]
"""How many batches in a row, since which step, and what of the weights is no number."""
Gradient = tuple[str, int, bool]
"""The first weight whose gradient is no number, since which step, and whether this rank's own batch has made it so."""


class Finite:
    """Counts the batches in a row whose loss is not finite, `most` of which end the run; None: it continues.

    A gradient that is not finite is reported with its weight, its step and the ranks whose batch it comes from.

    One process on a CPU looks at once. Others look every `log_every_n_steps` batches, where the ranks come by together
    and a log waits for the device anyway; until then an accelerator counts for itself.
    """

    def __init__(self, most: int | None, say: Callable[[str], None] | None = None) -> None:
        self.most = most
        self._say = say or _say
        self._session: RunSession | None = None
        self._gradients = GradientWatch()
        self._begin_row()

    def begin(self, session: RunSession) -> None:
        """A fit of this run begins."""
        self._session = session
        self._begin_row()

    def _begin_row(self) -> None:
        self._row = self._since = 0
        self._now: bool | Tensor = False
        self._noted: list[tuple[int, bool | Tensor]] = []
        self._step = self._batches = 0
        self._weights: str | None = None
        self._reported_in = self._gradient_reported_in = -1
        self._gradient = ""

    def training_starts(self, trainer: L.Trainer) -> None:
        """The weights are where they stay."""
        batches, _ = replicas_of(trainer.strategy, trainer.world_size)
        self._gradients.begin(trainer.lightning_module, several_batches=batches > 1)

    def before_optimizer_step(self, trainer: L.Trainer) -> None:
        """The gradients are unscaled, and not clipped yet."""
        due = (self._batches + 1) % max(1, vars(trainer)["log_every_n_steps"]) == 0
        self._gradients.look(trainer.global_step, at_all=due)

    def before_backward(self, trainer: L.Trainer, loss: Tensor) -> None:
        """The weights are those that the loss was computed with."""
        self._step = trainer.global_step
        if loss.device.type != "cpu":
            self._now = self._now | ~loss.detach().isfinite().all()
        elif not (math.isfinite(loss.item()) if loss.numel() == 1 else loss.isfinite().all()):
            self._now = True
            if self._weights is None and (names := non_finite_weights(trainer.lightning_module)):
                self._weights = f"{named_weights(names)} before it"

    def after_batch(self, trainer: L.Trainer) -> None:
        """Notes the batch, and looks where it is time."""
        now, self._now = self._now, False
        self._batches += 1
        self._noted.append((self._step, now))
        on_host = not isinstance(now, Tensor)
        if on_host or len(self._noted) >= _MOST_NOTED:
            self._count()
        if on_host and now and self._weights is None:
            found = named_weights(non_finite_weights(trainer.lightning_module))
            self._weights = f"the weights were finite before it; after it, {found}"
        alone = trainer.world_size == 1 and on_host
        if alone or self._batches % max(1, vars(trainer)["log_every_n_steps"]) == 0:
            self._look(trainer)

    def _count(self) -> None:
        """Reads the notes: waits for an accelerator."""
        noted, self._noted = self._noted, []
        for step, bad in noted:
            if not bool(bad):
                self._row, self._weights = 0, None
                continue
            self._since = self._since if self._row else step
            self._row += 1

    def _bad_gradient(self, trainer: L.Trainer) -> Gradient | None:
        return self._gradients.found(scaled=getattr(trainer.precision_plugin, "scaler", None) is not None)

    def _look(self, trainer: L.Trainer) -> None:
        self._count()
        row, gradient = self._row, self._bad_gradient(trainer)
        if not trainer.strategy.reduce_boolean_decision(row > 0 or gradient is not None, all=False):
            return
        self._report_gradient(trainer, gather_objects((gradient, self._since if row else None)))
        if not trainer.strategy.reduce_boolean_decision(row > 0, all=False):
            return
        own = (row, self._since, self._weights or named_weights(non_finite_weights(trainer.lightning_module)))
        found = gather_objects(own)
        longest = max(found, key=lambda one: one[0])
        ends = self.most is not None and longest[0] >= self.most
        if self._reported_in != trainer.current_epoch or ends:
            self._reported_in = trainer.current_epoch
            finding = _finding(found, longest, advice(trainer))
            self._event(longest[1], finding.what, finding.why)
            if not ends and trainer.is_global_zero:
                self._say(str(finding))
        if ends:
            what = f"the loss was not finite in {longest[0]} batches in a row, since step {longest[1]}"
            raise not_finite(self._session, what, self._with_gradient(longest[2]), f"{advice(trainer)}\n{_FIX}")

    def _report_gradient(self, trainer: L.Trainer, found: Sequence[tuple[Gradient | None, int | None]]) -> None:
        """Where the loss was not finite before, that is the cause, and is reported."""
        bad = {rank: one for rank, (one, _) in enumerate(found) if one is not None}
        if not bad:
            return
        step = min(since for _, since, _ in bad.values())
        first = {rank: one for rank, one in bad.items() if one[1] == step}
        # Without an owner: gradients are sharded, or that of the first matrix does not depend on the bad one.
        ranks = tuple(rank for rank, (_, _, own) in first.items() if own) or tuple(first)
        name = next(iter(first.values()))[0]
        where = f" on {ranks_text(ranks)}" if len(found) > 1 else ""
        self._gradient = f"the gradient of {name} was not finite at step {step}{where}"
        by_loss = any(since is not None and since <= step for _, since in found)
        if by_loss or self._gradient_reported_in == trainer.current_epoch:
            return
        self._gradient_reported_in = trainer.current_epoch
        why = "the loss of this step was finite"
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            why = f"the gradient scaler has skipped {SCALED} steps in a row or more: nothing is trained"
        what = self._gradient.replace(" was ", " is ")
        finding = Finding("warning", "gradient-not-finite", what, why=why, fix=advice(trainer))
        self._event(step, what, why)
        if trainer.is_global_zero:
            self._say(str(finding))

    def _with_gradient(self, why: str) -> str:
        return f"{why}; {self._gradient}" if self._gradient else why

    def training_ends(self, trainer: L.Trainer) -> None:
        """A training whose weights are no numbers has not finished, however few its steps were."""
        self._gradients.begin(None)
        self.check_weights(trainer)
        for callback in trainer.early_stopping_callbacks:
            if callback.stopping_reason is EarlyStoppingReason.NON_FINITE_METRIC:
                what = f"early stopping has ended the training at step {trainer.global_step}: {callback.monitor}"
                raise not_finite(
                    self._session, f"{what} is not finite", "the weights are finite", f"{advice(trainer)}\n{_FIX}"
                )

    def check_weights(self, trainer: L.Trainer) -> bool:
        """Whether all weights are finite, the same on all ranks, which call it together; raises where that ends it."""
        names = non_finite_weights(trainer.lightning_module)
        fix = f"{advice(trainer)}\n{_FIX}"
        step, ends = trainer.global_step, self.most is not None
        return finite_weights(names, self._session, step, fix, ends=ends, more=self._gradient)

    def _event(self, step: int, what: str, why: str | None) -> None:
        if self._session is not None:
            self._session.event("not-finite", step=step, what=what, why=why)


def advice(trainer: L.Trainer) -> str:
    """What to try, with the figures of this training."""
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups if "lr" in group]
    less = f" (it is {float(max(rates)):g}: try {float(max(rates)) / 10:g})" if rates else ""
    tried = vars(trainer).get("gradient_clip_val")
    clip = f"a smaller trainer.gradient_clip_val than {tried}" if tried else "trainer.gradient_clip_val: 1.0"
    return f"a smaller learning rate{less}, {clip}, or other data"


_FIX: Final = (
    "`trainer.detect_anomaly: true` finds the operation;\n"
    "`trainer.max_non_finite: null` (`Fairlead(max_non_finite=None)`) continues whatever the loss is"
)


def _finding(found: Sequence[Row], longest: Row, fix: str) -> Finding:
    ranks = tuple(rank for rank, one in enumerate(found) if one[0])
    where = f" on {ranks_text(ranks)}" if len(found) > 1 else ""
    return Finding(
        "warning",
        "loss-not-finite",
        f"the loss is not finite at step {longest[1]}{where}",
        why=longest[2],
        fix=fix,
    )


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)
