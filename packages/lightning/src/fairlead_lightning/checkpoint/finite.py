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


class GradientWatch:
    """Looks at gradients before each step of an optimizer, and remembers the first that is not finite.

    In every step at those of the smallest parameters, biases and gains, together `FEW` elements: where a backward pass
    meets a value that is not finite, those of all layers before it are not finite either. At all of them where that is
    so, and where the caller asks for it. On an accelerator nothing waits for the device: it counts there until `found`
    is asked.
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
        self._row: int | Tensor = 0
        self._since: int | Tensor = 0
        self._first: Tensor | None = None
        self._own: bool | Tensor = False
        self._own_first: bool | Tensor = False
        self._weights = [] if module is None else [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._few = _smallest([parameter for _, parameter in self._weights])
        if several_batches and self._weights:
            # The ranks' mean does not say whose it was. This rank's own part passes here before: the gradient of the
            # first small parameter of a layer, one of the last that are computed.
            few: list[tuple[str, Any]] = [self._weights[index] for index in self._few]
            first = next((parameter for name, parameter in few if "." in name), few[0][1])
            self._own_hook = first.register_hook(self._see_own)

    def _see_own(self, grad: Tensor) -> None:
        own = _local(grad)
        if own is not None and own.numel() and not _surely_finite([own]):
            self._own = self._own | ~_largest([own])[0].isfinite()

    @torch.no_grad()
    def look(self, step: int, *, at_all: bool = True) -> None:
        """The gradients are those of the step: unscaled, and the mean over the ranks."""
        given = [parameter.grad for _, parameter in self._weights]
        few = given if at_all else [given[index] for index in self._few]
        quiet = not isinstance(self._row, Tensor) and not self._row  # asking a device would wait for it
        if quiet and _surely_finite([grad for grad in map(_local, few) if grad is not None]):
            self._own = False
            return
        if not at_all and any(grad is not None and not _on_host(grad) for grad in few):
            seen = set(self._few)
            given = [grad if index in seen else None for index, grad in enumerate(given)]
        grads = [_local(grad) for grad in given]
        there = [grad for grad in grads if grad is not None and grad.numel()]
        own, self._own = self._own, False
        if not there:
            return
        norms = iter(_largest(there))
        zero = torch.zeros((), device=there[0].device)
        full = [next(norms) if grad is not None and grad.numel() else zero for grad in grads]
        bad = ~torch.stack([norm.to(zero) for norm in full]).isfinite()
        if _on_host(zero) and not bad.any():
            self._row = 0
        elif _on_host(zero):
            if not self._row:
                self._since, self._first, self._own_first = step, bad, own
            self._row += 1
        else:
            fresh = torch.as_tensor(self._row, device=zero.device) == 0
            known = bad if self._first is None else self._first
            self._first = torch.where(fresh, bad, known)
            self._since = torch.where(fresh, step, torch.as_tensor(self._since, device=zero.device))
            before = torch.as_tensor(self._own_first, device=zero.device)
            self._own_first = torch.where(fresh, torch.as_tensor(own, device=zero.device), before)
            self._row = (torch.as_tensor(self._row, device=zero.device) + 1) * bad.any()

    def found(self, *, scaled: bool) -> tuple[str, int, bool] | None:
        """The first weight whose gradient is not finite, since which step, and whether by this rank's own batch.

        None where the last gradients were finite, or where a gradient scaler (`scaled`) skips such steps and has not
        skipped too many in a row.
        """
        if int(self._row) < (SCALED if scaled else 1) or self._first is None:
            return None
        index = int(self._first.nonzero()[0])
        return self._weights[index][0], int(self._since), bool(self._own_first)


def _smallest(parameters: list[nn.Parameter]) -> list[int]:
    """The indices, in their order, of the smallest parameters that have `FEW` elements together; one at least."""
    sizes = {i: 0 if isinstance(one, nn.UninitializedParameter) else one.numel() for i, one in enumerate(parameters)}
    found: list[int] = []
    total = 0
    for index in sorted(sizes, key=lambda index: (sizes[index] == 0, sizes[index])):
        total += sizes[index]
        if found and (total > FEW or not sizes[index]):
            break
        found.append(index)
    return sorted(found)


def _surely_finite(grads: list[Tensor]) -> bool:
    """Whether the gradients, all dense and on a CPU, are finite, by one fused call for all of their norms.

    The norm of values above 1e19 is infinite in float32 though they are not: then there is no answer.
    """
    if not all(map(_dense_on_host, grads)):
        return False
    return not grads or all(math.isfinite(norm.item()) for norm in torch._foreach_norm(grads))


def _dense_on_host(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.is_cpu and grad.layout is torch.strided


def _on_host(grad: Tensor) -> bool:
    return grad.device.type == "cpu"


def _local(grad: Tensor | None) -> Tensor | None:
    to_local: Callable[[], Tensor] | None = getattr(grad, "to_local", None)
    return to_local() if to_local is not None else grad


def _largest(grads: list[Tensor]) -> list[Tensor]:
    """The largest absolute value of each, shape (); infinite or NaN where one of its values is. Copies nothing."""
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    found: dict[int, Tensor] = {}
    for device in dict.fromkeys(grad.device for grad in dense):
        at = [i for i, grad in enumerate(dense) if grad.device == device and grad.numel()]
        found |= dict(zip(at, torch._foreach_norm([dense[i] for i in at], math.inf), strict=True))
    return [found.get(i, grad.new_zeros(())) for i, grad in enumerate(dense)]


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
        self._row: int | Tensor = 0
        self._since: int | Tensor = 0
        self._now: bool | Tensor = False
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
            if not isinstance(self._row, Tensor):
                self._row = self._since = torch.zeros((), dtype=torch.long, device=loss.device)
        elif not (math.isfinite(loss.item()) if loss.numel() == 1 else loss.isfinite().all()):
            self._now = True
            if self._weights is None and (names := non_finite_weights(trainer.lightning_module)):
                self._weights = f"{named_weights(names)} before it"

    def after_batch(self, trainer: L.Trainer) -> None:
        """Counts, and looks where it is time."""
        now, self._now = self._now, False
        self._batches += 1
        if isinstance(self._row, Tensor):
            self._since = torch.where(self._row > 0, self._since, self._step)
            self._row = (self._row + 1) * now
        elif not now:
            self._row, self._weights = 0, None
            if trainer.world_size == 1 and not self._bad_gradient(trainer):
                return
        else:
            self._since = self._since if self._row else self._step
            self._row += 1
            if self._weights is None:
                found = named_weights(non_finite_weights(trainer.lightning_module))
                self._weights = f"the weights were finite before it; after it, {found}"
        alone = trainer.world_size == 1 and not isinstance(self._row, Tensor)
        if alone or self._batches % max(1, vars(trainer)["log_every_n_steps"]) == 0:
            self._look(trainer)

    def _bad_gradient(self, trainer: L.Trainer) -> Gradient | None:
        return self._gradients.found(scaled=getattr(trainer.precision_plugin, "scaler", None) is not None)

    def _look(self, trainer: L.Trainer) -> None:
        row, gradient = int(self._row), self._bad_gradient(trainer)
        if not trainer.strategy.reduce_boolean_decision(row > 0 or gradient is not None, all=False):
            return
        self._report_gradient(trainer, gather_objects((gradient, int(self._since) if row else None)))
        if not trainer.strategy.reduce_boolean_decision(row > 0, all=False):
            return
        own = (row, int(self._since), self._weights or named_weights(non_finite_weights(trainer.lightning_module)))
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
