"""The tape itself: takes the calls of a step down, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.hooks import process_hooks
from ampscope.capture.replay.tape import framework_flags
from ampscope.capture.replay.tape.entry import (
    Arguments,
    CallState,
    EarlierResult,
    Entry,
    EntryKind,
    OutsideTensor,
    TensorReference,
    UnscaledGradients,
    unscale_,
)
from ampscope.capture.replay.tape.fingerprints import fingerprint, tensors_given
from ampscope.capture.replay.tape.live_results import LeftGradients, LiveResults, in_place_results, targets
from ampscope.capture.replay.tape.outside_tensors import OutsideTensors
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.calls import kernel_choice
from ampscope.capture.torch_support.calls.backward_call import backward_roots
from ampscope.capture.torch_support.calls.call_state import Ambient
from ampscope.capture.torch_support.calls.function_names import is_in_place
from ampscope.capture.torch_support.calls.half_conversions import dtypes_asked
from ampscope.capture.torch_support.calls.random_state import RandomState
from ampscope.capture.torch_support.dtypes import HALF
from ampscope.capture.torch_support.local_shards import local
from ampscope.capture.torch_support.user_line import NOWHERE, Place
from ampscope.capture.tracing.statistics import stats

#: A tape longer than this is given up: a loop that never steps would otherwise keep every batch alive.
MAX_ENTRIES = 20_000


class Tape:
    """The calls of one optimizer step, in order; many methods because each kind of call is taken down in its own way.

    What an entry returned is known by weak reference, so that the tape keeps alive only what came from outside.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.start = 0  #: number of the first entry that is still there
        self.full = False
        self.obstacle = ""  #: why this step cannot be replayed, in words
        self.results = LiveResults()
        self.gradients = LeftGradients()
        self.outside = OutsideTensors()

    @property
    def end(self) -> int:
        """Number that the next entry will get."""
        return self.start + len(self.entries)

    def __getitem__(self, number: int) -> Entry:
        return self.entries[number - self.start]

    def forget_before(self, number: int) -> None:
        """Lets go of the entries before ``number`` and of what they kept alive."""
        del self.entries[: max(0, number - self.start)]
        self.start = max(self.start, number)
        self.results.forget_before(self.start)
        self.gradients.forget()
        self.outside.forget_but(self.entries)
        self.obstacle = ""

    def take_back(self, entry: Entry) -> None:
        """Takes back the newest entry, whose call was left by an exception."""
        if self.entries and self.entries[-1] is entry:
            self.entries.pop()

    def clear(self) -> None:
        """Forgets everything and lets go of what came from outside."""
        self.start = self.end
        self.entries.clear()
        self.results.clear()
        self.gradients.forget()
        self.outside.forget_but(())
        self.full = False
        self.obstacle = ""

    # -- the calls ----------------------------------------------------------------------------------------------

    def module_call(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        ambient: Ambient,
        place: Place,
        devices: Iterable[torch.device],
        host_random: bool,
    ) -> Entry:
        """Opens the entry of a watched module's call; `returned` completes it.

        Args:
            module: The module.
            args: Its arguments.
            kwargs: Its keyword arguments.
            ambient: The loop's autocast and grad mode.
            place: The user's line.
            devices: Where the module computes; what it is given may lie elsewhere.
            host_random: Whether the call may draw from Python's or NumPy's global generator.
        """
        entry = _entry(EntryKind.MODULE, module, self._arguments(args, kwargs), ambient, place)
        entry.state.kernels = kernel_choice.current()
        entry.state.random = RandomState.take({*devices, *entry.arguments.devices}, host=host_random)
        return self._append(entry)

    def returned(self, entry: Entry, result: Any) -> None:
        """Completes the entry of a module's call with what it returned."""
        entry.fingerprint, entry.gives = fingerprint(result), tensors_given(result)
        self._add_results(result)

    def function_call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        *,
        ambient: Ambient,
        place: Place,
        random: RandomState | None,
        originals: dict[int, Tensor],
    ) -> None:
        """Adds a torch function that ran outside the watched modules, after it ran.

        Args:
            func: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            result: What it returned.
            ambient: The loop's autocast and grad mode.
            place: The user's line.
            random: The generators' states before it, where it draws.
            originals: What it has overwritten, as it was before (`overwritten_unknown`), by ``id``.
        """
        in_place = is_in_place(func, kwargs)
        arguments = self._arguments(args, kwargs, originals, overwrites=in_place)
        entry = _entry(EntryKind.FUNCTION, func, arguments, ambient, place)
        entry.state.random = random
        if getattr(func, "__name__", "") in kernel_choice.CHOOSING:
            entry.state.kernels = kernel_choice.current()
        entry.in_place = in_place
        if func is torch.autograd.grad:
            entry.fingerprint = [each.detach() for each in tensor_tree.tensors(args[:1]) if each.numel() == 1]
        self._append(entry)
        if in_place:
            self._add_written(in_place_results(args, kwargs, result))
        else:
            self._add_results(result)

    def overwritten_unknown(self, args: Any, kwargs: dict[str, Any], *, is_repeated: bool = True) -> dict[int, Tensor]:
        """Copies of small tensors from outside that an in-place function is about to overwrite, by ``id``.

        Without ``is_repeated`` it is what a loop keeps beside its gradients, which a replay makes anew, and not much.
        """

        def is_copied(each: Tensor) -> bool:
            return self.results.find(each) is None and (is_repeated or self.gradients.may_copy(each))

        return self.outside.copied_before_write(targets(args, kwargs), is_copied)

    def backward_call(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ambient: Ambient
    ) -> Entry:
        """Adds a backward, before it runs."""
        entry = _entry(EntryKind.BACKWARD, call, self._arguments(args, kwargs), ambient, NOWHERE)
        entry.fingerprint = [local(loss).detach().clone() for loss in backward_roots(args, kwargs)]
        entry.state.flags, entry.state.kernels = framework_flags.raised(), kernel_choice.current()
        return self._append(entry)

    def add_missing_backward(self, call: Callable[..., Any], since: int, ambient: Ambient) -> Tensor | None:
        """Adds the backward that the loop did not call on the latest single value that it could have called it on.

        Where the loop has asked for gradients (``autograd.grad``) of something else, perhaps, than its loss, of those
        values that it made no other of one that is not finite comes first.

        Args:
            call: What runs a backward.
            since: Number of the first entry to look at.
            ambient: The loop's autocast and grad mode.

        Returns:
            That value; None where there is none, or backward was called after it.
        """
        backwards = (number for number in range(self.start, self.end) if self[number].kind is EntryKind.BACKWARD)
        first = max(since, self.start, *backwards)
        scalars = [each for each in self.results.scalars if each.source.entry >= first]
        if not scalars:
            return None
        newest = scalars[-1]
        if any(self[number].call is torch.autograd.grad for number in range(first, self.end)):
            used = [each for scalar in scalars for each in self[scalar.source.entry].arguments.earlier]
            ends = (each for each in reversed(scalars) if each.source not in used)
            newest = next((each for each in ends if not stats.finite(each.value)), newest)
        arguments = Arguments.of((newest.value,), {}, lambda _: newest.source)
        entry = _entry(EntryKind.BACKWARD, call, arguments, ambient, NOWHERE)
        entry.fingerprint = [newest.value.clone()]
        self._append(entry)
        return newest.value

    def sum_up_bad(self, ambient: Ambient) -> bool:
        """Adds the sum of the newest result of the step that is not finite; returns whether there is one."""
        results = sorted(self.results.alive(), key=lambda each: (each[1].entry, each[1].leaf), reverse=True)
        graph = (tensor for tensor, source in results if tensor.requires_grad and source.entry >= self.start)
        bad = next((tensor for tensor in graph if not stats.finite(tensor)), None)
        if bad is None:
            return False
        with torch.enable_grad():
            total = bad.sum()
        self.function_call(torch.sum, (bad,), {}, total, ambient=ambient, place=NOWHERE, random=None, originals={})
        return True

    def collective_call(
        self, call: Callable[..., Any], args: tuple[Any, ...], *, ambient: Ambient, place: Place
    ) -> tuple[int, Entry]:
        """Adds a collective of the loop's own, before it runs; it writes the tensors in its first argument.

        Returns:
            Its number, for `arrived`, and its entry.
        """
        originals = self.overwritten_unknown(args, {})
        entry = _entry(EntryKind.FUNCTION, call, self._arguments(args, {}, originals, overwrites=True), ambient, place)
        entry.in_place = True
        self._append(entry)
        self._add_written(targets(args, {}))
        return self.end - 1, entry

    def arrived(self, number: int, tensors: list[Tensor]) -> None:
        """What a collective received is there: whatever it changed on the way belongs to its entry."""
        for leaf, tensor in enumerate(tensors):
            self.results.add(tensor, EarlierResult(number, leaf))

    def unscaled(self, gradients: UnscaledGradients, *, ambient: Ambient, place: Place) -> None:
        """Adds ``scaler.unscale_``, after it ran."""
        self._append(_entry(EntryKind.FUNCTION, unscale_, gradients, ambient, place)).in_place = True

    def mark_scaled(self, outputs: list[Tensor]) -> None:
        """Notes that the entries which made ``outputs`` multiply with the loss scale."""
        for tensor in outputs:
            known = self.results.find(tensor)
            if known is not None and known.source.entry >= self.start:
                self[known.source.entry].scales = True

    # -- entries and what they return ---------------------------------------------------------------------------

    def _append(self, entry: Entry) -> Entry:
        if len(self.entries) >= MAX_ENTRIES:
            self.clear()
            self.full = True
        if not self.full:
            self.entries.append(entry)
        return entry

    def _arguments(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        originals: dict[int, Tensor] | None = None,
        *,
        overwrites: bool = False,
    ) -> Arguments:
        def refer(tensor: Tensor) -> TensorReference:
            known = self.earlier_result(tensor, overwrites=overwrites) or self.gradients.find(tensor)
            return known or self.outside.refer(tensor, (originals or {}).get(id(tensor)))

        return Arguments.of(args, kwargs, refer)

    def earlier_result(self, tensor: Tensor, *, overwrites: bool) -> EarlierResult | None:
        """The entry that returned an argument; None where what it returned is not what the call got."""
        known = self.results.find(tensor)
        if known is None:
            return None
        # a custom autograd function computes without grad and gives its result a history then
        follows = self[known.source.entry].state.ambient.grad or id(tensor) in self.outside.moved
        rewritten = not overwrites and not tensor.requires_grad and known.was_written
        return None if (tensor.requires_grad and not follows) or rewritten else known.source

    def _add_results(self, value: Any) -> None:
        """Remembers the tensors of ``value`` as results of the newest entry."""
        if self.full or not self.entries:
            return
        written = self.entries[-1].in_place
        for leaf, tensor in enumerate(tensor_tree.tensors(value)):
            if written or not self._handed_back(tensor):
                self.results.add(tensor, EarlierResult(self.end - 1, leaf), written=written)

    def _add_written(self, written: list[Tensor]) -> None:
        """Remembers what an in-place call left, and makes results that share its memory depend on it."""
        if self.full or not self.entries:
            return
        self.entries[-1].also_writes = self.results.sharing_memory(written)
        self._add_results(written)

    def _handed_back(self, tensor: Tensor) -> bool:
        """Whether the newest entry merely returned one of its arguments (``x.to(x.device)``).

        One that asks for a half dtype by name returns another tensor as soon as its argument is none.
        """
        newest = self.entries[-1]
        if HALF & dtypes_asked(newest.call, newest.arguments.args, newest.arguments.kwargs):
            return False
        source = known.source if (known := self.results.find(tensor)) is not None else None
        return any(
            reference.identity == id(tensor) if isinstance(reference, OutsideTensor) else reference == source
            for reference in newest.arguments.tensors
        )


def _entry(kind: EntryKind, call: Any, arguments: Arguments, ambient: Ambient, place: Place) -> Entry:
    return Entry(kind, call, arguments, CallState(ambient, process_hooks.autocast_epoch()), place)
