"""The player runs the calls of a step tape again, in order, on substitutes for what they could change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.hooks import compiled_modules
from ampscope.capture.hooks.transform_calls import Exchange, exchanging
from ampscope.capture.isolation.device_asserts import guarded
from ampscope.capture.isolation.memory import Bounded
from ampscope.capture.isolation.own_attributes import gradients_kept, left_as_found
from ampscope.capture.isolation.write_guard import WriteGuard
from ampscope.capture.rerun.substitutes import Substitutes
from ampscope.capture.tape import functional_calls, tape_entry
from ampscope.capture.tape.fingerprints import Differences, fingerprint
from ampscope.capture.tape.live_results import in_place_results
from ampscope.capture.tape.tape_entry import EarlierResult, Entry, EntryKind, GradientOf, OutsideTensor, Reception
from ampscope.capture.tape.taped_step import Draws, HeldResults, TapedStep, cleared_on_failure
from ampscope.capture.torch_support import call_state, tensor_tree, torch_private
from ampscope.capture.torch_support.backward_call import backward_roots, creates_graph, in_engine
from ampscope.capture.torch_support.call_state import random_state_kept
from ampscope.capture.torch_support.function_names import attaches
from ampscope.capture.torch_support.models import Models, unwrapped
from ampscope.capture.torch_support.modes import modes_at_rest
from ampscope.capture.torch_support.own_collectives import Answering, CommunicationError
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.tracing.light_statistics import finite
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.schema import Node, Phase

#: Why a replay in which something was changed does not go on.
OF_UNCHANGED = (
    "the step uses values that it received from other ranks, and what they would be with a change cannot be known"
)


class HandingBack(Answering):
    """Active in a faithful replay; answers each collective with what the real one at its place brought."""

    def __init__(self) -> None:
        super().__init__()
        self._left: Iterator[Reception] = iter(())
        self._works: list[Any] = []  # a work that Python made lives no longer than its Python object

    def entry_begins(self, entry: Entry) -> None:
        """The replay comes to an entry of the tape."""
        self._left = iter(entry.received)

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """See `Answering`.

        Raises:
            CommunicationError: What the real step received is not there.
        """
        library, _, name = func._schema.name.partition("::")
        why = "what it received was not seen"
        if library == "c10d" and not kwargs:
            if name in ("barrier", "send"):
                return self._done()
            note = next(self._left, None)
            why = why if note is None else note.difference(name, _group_of(func, args), args)
            if note is not None and not why:
                note.hand_to(args)
                return (args[0], self._done()) if len(func._schema.returns) > 1 else self._done()
        raise CommunicationError(f"the step communicates with other ranks ({func}), and {why}")

    def _done(self) -> Any:
        self._works.append(_Done())
        return self._works[-1].boxed()


def _group_of(func: Any, args: Any) -> str:
    names = [argument.name for argument in func._schema.arguments]
    group: Any = dist.ProcessGroup.unbox(args[names.index("process_group")])
    return str(group.group_name)


if dist.is_available():

    class _Done(dist.distributed_c10d.Work):
        """A work that is over."""

        def wait(self, timeout: Any = None) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

        def is_success(self) -> bool:
            return True


class Player:
    """One run over a tape.

    Args:
        step: The step.
        models: The watched models.
        tracer: Observes every op; its sinks are set at the end.
        change: What is done otherwise than in the real step.
        asked_for: Parameters whose gradients are marked in the trace, whatever they are.
        is_brief: See `Rerun`.

    Attributes:
        substitutes: Of what the calls could change.
        losses: What the backward passes began from.
        bad_gradients: Names of the parameters whose gradients came out non-finite.
        spoilt: Names of the buffers that came out non-finite, and were finite before or are what is to be cured; and of
            weights whose updates did.
        differences: How what the tape holds and what the calls returned differ from the real step; looked for only
            where nothing is changed.
    """

    def __init__(
        self,
        step: TapedStep,
        models: Models,
        tracer: Tracer,
        change: ReplayChange,
        *,
        asked_for: frozenset[str] = frozenset(),
        is_brief: bool = False,
    ) -> None:
        self._asked_for = asked_for
        self._is_brief = is_brief
        self._entries = step.entries()
        self.models = models
        self._tracer = tracer
        self._change = change
        self.draws = Draws(step.draws, notes=type(change) is ReplayChange)
        self._guard = WriteGuard(self.draws.run)
        self.substitutes = Substitutes(models, step.state, change.leaf, self._guard, change.weights)
        self._results = HeldResults(self._entries, step.read_last())
        self._step = step
        self._handing_back = HandingBack()
        self.losses: list[Tensor] = []
        self.bad_gradients: frozenset[str] = frozenset()
        self.spoilt: frozenset[str] = frozenset()
        self.differences = Differences()

    def play(self) -> None:
        """Runs the tape. Nothing of the model, the generators or the gradients is different afterwards.

        Raises:
            Exception: Whatever the user's own code raises when it is run again.
        """
        with (
            cleared_on_failure(self._results, self.substitutes),
            self._guard.putting_back(),
            random_state_kept(self.devices),
            gradients_kept(self.models),
            compiled_modules.all_eager(),
            torch.autograd.set_detect_anomaly(False),
            torch.autograd.set_multithreading_enabled(False),  # one thread numbers all autograd nodes, in one order
        ):
            self._check_versions()
            for node, name, leaf in self.substitutes.leaves(self._step.carried):
                self._tracer.name_entry(leaf, node, name)
            bad_before = self.substitutes.bad_buffers()
            with self.substitutes.installed(self._hooks()), left_as_found(self.models.names, self._tracer.unseen):
                self._change.change_modules(self.models)
                with (
                    self._change.active(self._tracer.places.now, self._tracer.unseen, self._step.in_force),
                    self._tracer.active(),
                    self._handing_back.active(),
                    self._guard.active(self._tracer.functions),
                    guarded(self.devices, self._tracer),
                ):
                    self._play_entries()
                self._mark_attributes()
            self._mark_sinks()
            self.spoilt |= self.substitutes.bad_buffers() - (bad_before - self._step.broken)

    @property
    def devices(self) -> frozenset[torch.device]:
        """The devices on which the calls compute, as far as it is known."""
        return self.models.devices | self._step.devices()

    @property
    def finite(self) -> bool:
        """Whether losses and gradients came out finite."""
        return not self.bad_gradients and all(finite(loss) for loss in self.losses)

    @property
    def _is_lost(self) -> bool:
        """Whether a loss tells that the change was in vain, and nothing more is asked for."""
        with self._tracer.unseen():
            return self._is_brief and not self._step.read_last() and not all(map(finite, self.losses))

    def gradients(self) -> dict[str, Tensor]:
        """The gradient that each parameter got, by name; scaled where the step is."""
        left = {name: p.grad for name, p in self.substitutes.parameters() if p.grad is not None}
        return left | {name: self._tensor_of(source) for name, source in self._step.given.items()}

    def buffers_moved(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Yields each floating buffer that the step could write, with its values before and after it in float32."""
        for module, name, buffer in self.substitutes.buffers():
            before = self.substitutes.at_start(module, name)
            if before is not None and before.is_floating_point():
                yield ".".join(filter(None, (module, name))), (before.float(), buffer.detach().float())

    @property
    def hooked(self) -> str:
        """Name of a parameter whose gradient a function of the user's may have changed; a replay runs none of those."""
        return next((name for name, p in self.models.parameters.values() if torch_private.has_gradient_hooks(p)), "")

    def _play_entries(self) -> None:
        for _, entries in groupby(self._entries, key=lambda numbered: numbered[1].state.autocast_epoch):
            with call_state.one_autocast_cache():
                for number, entry in entries:
                    if self._step.updates:
                        self._tracer.points.phase = Phase.OPTIMIZER if number > self._step.gradients_at else None
                    self._play_entry(number, entry)
                    self._results.was_run(number, entry)
                    if entry.kind is EntryKind.BACKWARD and self._is_lost:
                        return

    def _hooks(self) -> list[Callable[..., Any]]:
        """Lists the functions that the loop attached to tensors in the step: the replay's backward runs them again."""
        return [f for _, entry in self._entries if attaches(entry.call) for f in entry.arguments.args if callable(f)]

    def _play_entry(self, index: int, entry: Entry) -> None:
        self._tracer.pause.on = True
        args, kwargs = entry.arguments.resolved(self._tensor_of)
        for buffer, value in entry.overwritten:
            self.substitutes.of(buffer).data.copy_(value)  # by another rank, which moves no counter of it either
        if entry.scales and self._change.scale and self._step.scale:
            args = tuple(self._rescaled(value) for value in args)
        self._tracer.pause.on = False
        if kwargs.get("generator") is not None:
            kwargs["generator"] = entry.arguments.kwargs["generator"].clone_state()
        if entry.state.random is not None:
            entry.state.random.put_back()
        self._tracer.places.entry_place = entry.place
        self._handing_back.entry_begins(entry)
        for attributes, training in zip(self.substitutes.attributes, entry.state.training, strict=False):
            attributes["training"] = training
        with entry.state.ambient.entered(), call_state.kernels_chosen(entry.state.kernels):
            if entry.kind is EntryKind.BACKWARD:
                self._backward(entry, args, kwargs)
                return
            for tensor, node, name in functional_calls.named_tensors(entry, args, kwargs, self.models):
                self._tracer.name_entry(tensor, node, name)
            with self._read_by(entry):
                result = call_user(self._callable(entry), args, kwargs)
        if entry.kind is EntryKind.MODULE:
            self._compare(entry, result)
        if self._step.given and not self._step.edited and entry.call is torch.autograd.grad:
            self.losses += [loss.detach() for loss in tensor_tree.tensors(args[:1]) if loss.numel() == 1]
        left = in_place_results(args, kwargs, result) if entry.in_place else tensor_tree.tensors(result)
        self._results.put(index, list(left))

    def _callable(self, entry: Entry) -> Callable[..., Any]:
        if entry.through is not None:
            return entry.through.call
        if isinstance(entry.call, nn.Module):
            return unwrapped(entry.call)
        return entry.call if entry.in_place else self._change.function(entry.call)

    def _read_by(self, entry: Entry) -> AbstractContextManager[None]:
        """Gives a transform the tensors of this replay for those that it read in the real step."""
        if entry.through is None or entry.through.lends:
            return contextlib.nullcontext()
        reads = entry.through.reads

        def given(tensor: Tensor) -> Tensor:
            if (known := reads.get(id(tensor))) is not None:
                return self._tensor_of(known)
            return self.substitutes.of(tensor) if id(tensor) in self.models.parameters else tensor

        return exchanging(Exchange(given, again=True))

    def _rescaled(self, value: Any) -> Any:
        """The loss scale among the operands of its multiplication, changed."""
        is_scale = isinstance(value, Tensor) and not value.dim() and not value.requires_grad
        return value * ((self._change.scale or 1.0) / (self._step.scale or 1.0)) if is_scale else value

    def _compare(self, entry: Entry, result: Any) -> None:
        if type(self._change) is not ReplayChange:
            return
        with self._tracer.unseen():
            name = self.models.names.get(id(entry.call)) or type(entry.call).__name__
            self.differences.compare(f"the output of {name} differs", fingerprint(result), entry.fingerprint)
            if self._tracer.batch is not None:
                self._tracer.batch.returned(result)

    def _backward(self, entry: Entry, args: Any, kwargs: Any) -> None:
        with self._tracer.unseen():
            self.losses += (losses := [local(loss).detach() for loss in backward_roots(args, kwargs)])
            if type(self._change) is ReplayChange:
                self.differences.compare("the loss differs", losses, entry.fingerprint)
        if self._is_lost:
            return
        self._tracer.functions.creates_graph = creates_graph(args, kwargs)
        self.substitutes.backward_begins(entry)
        resting = (Bounded, Tracer) if self._is_brief else (Bounded,)  # the first looks at what forward gives
        with tape_entry.flags_set(entry.state.flags), in_engine(lambda: modes_at_rest(*resting)):
            call_user(torch_private.through_topmost_mode(entry.call), args, kwargs)
        self._tracer.outputs.begin_micro_batch()

    def _tensor_of(self, reference: EarlierResult | OutsideTensor | GradientOf) -> Tensor:
        if isinstance(reference, EarlierResult):
            return self._results.of(reference)
        if isinstance(reference, GradientOf):
            return self.substitutes.gradient_of(reference.parameter)
        if (name := self._step.carried.get(reference.identity)) is not None:
            self._tracer.name_entry(self.substitutes.of(reference.tensor), Node.CARRIED, name)
        return self._change.given(reference.tensor, self.substitutes.of(reference.tensor))

    def _check_versions(self) -> None:
        """Notes inputs and weights that were changed in place since the real step read them."""
        for _, entry in self._entries if type(self._change) is ReplayChange else ():
            if entry.versions and entry.versions != self.models.versions(entry.module):
                self.differences.note("weights changed since")
            if any(torch_private.version_counter(read.tensor) != read.version for read in entry.arguments.outside):
                self.differences.note("an input was changed in place since")
                self.differences.input_changed = True
        self.differences.held_otherwise = bool(self.differences.found)

    def _mark_sinks(self) -> None:
        for loss in self.losses:
            self._tracer.sink(loss, Node.LOSS, "loss")
        gradients = self.gradients()
        bad = [(name, gradient) for name, gradient in gradients.items() if not finite(gradient)]
        for name, gradient in [*bad, *((name, gradients[name]) for name in self._asked_for & gradients.keys())]:
            self._tracer.sink(gradient, Node.GRADIENT, name, name.rpartition(".")[0])
        self.bad_gradients = frozenset(name for name, _ in bad)
        for name, source in self._step.left:
            self._tracer.sink(self._results.of(source), Node.CARRIED_AFTER, name)
        for name, source in self._step.updates:
            self._tracer.sink(update := self._tensor_of(source), Node.WEIGHT_AFTER, name, name.rpartition(".")[0])
            self.spoilt |= frozenset() if finite(update) else {name}
        for module, name, buffer in self.substitutes.buffers():
            if not finite(buffer):
                self._tracer.sink(buffer, Node.BUFFER_AFTER, ".".join(filter(None, (module, name))), module)

    def _mark_attributes(self) -> None:
        """Marks what the step has left in plain attributes, while the modules hold it."""
        held = self.substitutes.attribute_tensors() if self._step.left_in_attributes else {}
        for name in self._step.left_in_attributes.keys() & held.keys():
            self._tracer.sink(held[name], Node.CARRIED_AFTER, self._step.left_in_attributes[name])


def call_user(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls the user's code; the search for a user's line ends at this frame."""
    return call(*args, **kwargs)
