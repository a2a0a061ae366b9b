"""`watch`: the one line that a training loop needs."""

from __future__ import annotations

import gc
import os
import platform
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

import ampscope
from ampscope.capture import events
from ampscope.capture.budgets import TRIALS
from ampscope.capture.events import END_NOT_KNOWN
from ampscope.capture.heal.healing import Healing, asked_for, configured
from ampscope.capture.hooks import amp_objects
from ampscope.capture.hooks.amp_objects import Accelerator, is_accelerator, prepared
from ampscope.capture.record.run_folder import DEFAULT_FOLDER, Job, asked_folder, default_folder, is_verified, this_job
from ampscope.capture.record.settings import check_costs, check_optimizer, checked, sampled_ranks
from ampscope.capture.record.signals import OnIncident, Tracker, receivers
from ampscope.capture.record.terminal import say
from ampscope.capture.scope import Forgettable, Scope, forgotten, open_scopes, opened
from ampscope.capture.torch_support import call_state
from ampscope.capture.torch_support.models import Extent, Models, inside_fabric
from ampscope.capture.torch_support.modes import others_aside
from ampscope.capture.torch_support.threads import changing
from ampscope.capture.torch_support.user_line import user_place
from ampscope.errors import WatchError
from ampscope.trace.location import BucketPath
from ampscope.trace.manifest import Manifest
from ampscope.trace.upload.opening import cannot_write, named_folder, open_writer
from ampscope.trace.upload.uploader import before_exit

#: Of the disk budget, kept operands take at most one part in this many.
OPERANDS_SHARE = 4


def watch(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module] | Accelerator,
    scaler: Any | None = None,
    *,
    optimizer: Optimizer | None = None,
    dir: str | os.PathLike[str] | None = None,  # noqa: A002  # reads best at the call
    every: int | None = None,
    ranks: int | Sequence[int] | str = 1,
    name: str | None = None,
    overhead: float = 0.02,
    modules: str | Sequence[str] | None = None,
    ops: str | Sequence[str] | None = None,
    parameters: str | Sequence[str] | None = None,
    audit_every: int | None = None,
    replay_budget: int = TRIALS,
    save_tensors: bool = False,
    heal: bool | Healing = False,
    disk_budget: int = 2 << 30,
    log_to: Tracker | Sequence[Tracker] | None = None,
    on_incident: OnIncident | None = None,
    webhook: str | None = None,
    quiet: bool = False,
) -> Scope:
    """Watches the mixed-precision training of ``model``; the loop itself stays as it is.

    Args:
        model: The model the loop calls, or several of them. Wrapped ones (``DistributedDataParallel``,
            ``torch.compile``) are fine. Or an `accelerate.Accelerator`, after its ``prepare``: its models and its
            scaler are watched.
        scaler: The loop's ``GradScaler`` (``ShardedGradScaler`` too), or what holds one. Without it, the scaler is
            noticed when it first scales a loss; a loop without one (bf16, fp32) is watched too.
        optimizer: Checked to hold parameters of ``model``; it is found by itself otherwise.
        dir: The run's folder, or a URL as ``s3://bucket/prefix``, to which it is sent while it trains. One that already
            holds a run is continued as a resumed segment. Default: a new folder below ``./ampscope_runs``, one for all
            ranks of a job.
        every: Trace one step in this many op by op; 0 for none. Default: the first steps are looked at, and healthy
            ones recorded at 0, 8, 16, 32, ..., then about one in a thousand; sooner where a value grows towards
            overflow. Of steps recorded so, and of those asked for that are 16 steps
            apart, some tensors have every statistic.
        ranks: Of a training on several ranks, those on which healthy steps are traced: ``[0, 3]``, so many spread
            evenly (1 is rank 0), or ``"all"``. A step that goes wrong is looked at on every rank on which it did.
        name: Name of the run; the folder's by default.
        overhead: Share of the run's time that observing may take in the default mode.
        modules: Of healthy steps, write down the ops in these modules and in those inside them: qualified names, as
            ``"blocks.*.attn"`` or a list of such patterns. What goes wrong is always written whole.
        ops: Likewise these ops: ``"aten.mm.default"``, ``"aten.mm"`` or ``"mm"``, ``"*softmax*"``.
        parameters: Likewise these parameters, gradients and optimizer state; by default those of ``modules``.
        audit_every: Audit one step in this many: run it again, op by op, and in float32, for what each op loses by its
            dtype (``ampscope audit``). An audit takes ten to twenty times as long as its step. Default: none, but where
            ``scope.audit()`` asks for one.
        replay_budget: Counterfactual replays per incident (all in float32, another loss scale, single modules in
            float32, bfloat16), which tell what would have cured it; 0 for none. Over a run they stay within
            ``overhead``, but for the first incidents.
        save_tensors: Keep the operands of the op at which a replayed step went wrong, up to 64 MiB an incident and a
            quarter of ``disk_budget`` in all, for ``ampscope repro``. A trace holds no tensor values otherwise.
        heal: Change the training where it goes bad: what a replay of the bad step has proved to help is done to the
            live model, and the step's gradients are taken from that replay. ``True``, or `ampscope.Healing` with
            limits. Default: nothing of the training is ever changed.
        disk_budget: Bytes the trace may take; the oldest per-op rows go first, old steps are thinned, incidents stay.
        log_to: Trackers that get the run's figures and alerts, on rank 0: of `ampscope.integrations.trackers`, as
            ``TensorBoard("logs")``, or one of your own. Like all that is told, from threads apart: no step waits.
        on_incident: Called with an `ampscope.Alert`, its diagnosis in it, when a step goes wrong, the loop makes a
            mistake, or a value is about to overflow; by one rank, a few times at once and then at most every 10 min.
        webhook: Address to which each of these alerts is posted, as Slack takes them. It is kept secret.
        quiet: Print nothing.

    Returns:
        The open scope. It closes itself when the process ends, when these models are watched again, or at a later
        ``watch`` when nobody holds them any more.

    Raises:
        WatchError: The call cannot be honoured; nothing was installed.
        RunError: ``dir`` holds a run that cannot be continued.
    """
    roots, scaler = _watched(model, scaler)
    healing = asked_for(heal) if not is_verified() else None
    check_costs(replay_budget, disk_budget, save_tensors)
    told = receivers(log_to, on_incident, webhook)
    with changing, others_aside():  # two threads may begin to watch at a time
        _close_forgotten()
        earlier = _earlier_scope(roots)
        models, job = Models(roots), this_job()
        sampled = sampled_ranks(ranks, job.world_size)
        check_optimizer(optimizer, models)
        asked = {"every": every, "overhead": overhead, "audit_every": audit_every}
        settings = checked(asked | {"modules": modules, "ops": ops, "parameters": parameters}, models)
        folder = asked_folder() or (named_folder(dir) if dir is not None else _new_folder(models, job))
        _end_earlier_run(folder)
        kept: dict[str, Any] = {"replay_budget": replay_budget, "save_tensors": save_tensors, "ranks": sampled}
        manifest = _manifest(models, job, str(name or folder.name), settings | kept | configured(healing))
        writer = open_writer(folder, manifest, job.rank, disk_budget, say)
        if earlier is not None:
            earlier.succeeded(folder)
        share = disk_budget // OPERANDS_SHARE // max(writer.manifest.world_size, 1) if save_tensors else 0
        chosen: Any = {"replay_budget": replay_budget, "operand_budget": share, "quiet": quiet, "heal": healing}
        return Scope(models, writer, told, settings=settings, sampled=job.rank in sampled, **chosen).open(scaler)


def _close_forgotten() -> None:
    """Closes the scopes of models that nobody holds any more, as a collection finds; under `threads.changing`."""
    while forgotten:
        forgotten.pop()._close(END_NOT_KNOWN)
    if not opened:
        return
    for scope in open_scopes():
        if scope._steps.in_progress and not scope._home.goes_on_elsewhere:  # interrupted, it would keep its model
            scope._steps.give_up("ampscope.watch was called while the step was in progress")
    del scope
    known = [weakref.ref(scope) for scope in opened]
    while opened:
        opened.popitem()[0].__class__ = Forgettable
    gc.collect()
    for scope in (left for left in (ref() for ref in known) if left is not None):
        scope.__class__ = Scope
        opened[scope] = None


def _watched(model: Any, scaler: Any) -> tuple[list[nn.Module], Any]:
    """The models to watch and their scaler."""
    if is_accelerator(model):
        model, scaler = _prepared(model, scaler)
    roots = _models(model)
    _check_initialised(roots)
    return roots, _scaler(scaler)


def _prepared(accelerator: Any, scaler: Any) -> tuple[list[nn.Module], Any]:
    models, own = prepared(accelerator)
    if not models:
        raise WatchError("this accelerator has prepared no model yet; call ampscope.watch after accelerator.prepare")
    return models, own if scaler is None else scaler


def _models(model: Any) -> list[nn.Module]:
    roots = list(model.values()) if isinstance(model, Mapping) else model
    roots = [roots] if isinstance(roots, nn.Module) and not isinstance(model, Mapping) else roots
    if not isinstance(roots, (list, tuple)) or not roots or not all(isinstance(root, nn.Module) for root in roots):
        raise WatchError(
            f"ampscope.watch needs the model your loop calls (a torch.nn.Module, or a list of them), "
            f"not {type(model).__name__}; write ampscope.watch(model, scaler)"
        )
    return [inside_fabric(root) for root in roots]


def _scaler(scaler: Any) -> Any | None:
    """The scaler to watch; None where none was given."""
    if scaler is None:
        return None
    found = amp_objects.torch_scaler(scaler)
    if found is None:
        raise WatchError(amp_objects.refusal(scaler))
    return found


def _earlier_scope(roots: list[nn.Module]) -> Scope | None:
    """The open scope of the same models: a notebook's cell was run again, and the newer scope takes its place.

    Raises:
        WatchError: A scope watches a part of the models, or more than them.
    """
    for scope in open_scopes():
        extent = scope.watches(roots)
        if extent is Extent.THE_SAME:
            return scope
        if extent is Extent.OVERLAPS:
            raise WatchError(
                f"a part of this model is already watched, with other modules, into {scope.folder}; "
                f"close() that scope first"
            )
    return None


def _check_initialised(roots: list[nn.Module]) -> None:
    lazy = [name for root in roots for name, p in root.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise WatchError(f"the parameter {lazy[0]} has no shape yet; call the model once, then ampscope.watch")


def _end_earlier_run(folder: Path) -> None:
    """A loop that is started again in the same process, for the same folder, resumes the run that it left open.

    One that goes to an object store is closed while the process can still send it.
    """
    if isinstance(folder, BucketPath):
        before_exit(_close_remote)
    for scope in open_scopes():
        if scope.folder.absolute() == folder.absolute():
            scope.succeeded(folder)


def _new_folder(models: Models, job: Job) -> Path:
    try:
        return default_folder(job, models.main_type())
    except OSError as error:
        raise cannot_write(DEFAULT_FOLDER, error) from error


def _close_remote() -> None:
    for scope in open_scopes():
        if isinstance(scope.folder, BucketPath):
            scope._close(events.end_of_process(scope._handled_before))


def _manifest(models: Models, job: Job, name: str, configuration: dict[str, Any]) -> Manifest:
    device = models.main_device()
    label = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Manifest(
        ampscope=ampscope.__version__,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pyarrow": pa.__version__,
            "platform": f"{platform.system()} {platform.machine()}",
        },
        device=label,
        world_size=job.world_size,
        name=name,
        model=models.main_type(),
        parameters=sum(parameter.numel() for _, parameter in models.parameters.values()),
        configuration=configuration | _watched_at() | {"kernels": call_state.kernels_by_name(call_state.kernels_now())},
        job=job.ids,
        host=platform.node(),
    )


def _watched_at() -> dict[str, Any]:
    """The line that called ``watch``; nothing where it is a part of AMPscope that did."""
    place, own = user_place(), Path(ampscope.__file__).parent
    if place is None or place.code is None or Path(place.code.co_filename).is_relative_to(own):
        return {}
    return {"watched_at": {"file": place.file, "line": place.line, "function": place.function, "code": place.text}}
