"""The tape itself: takes the calls of a step down, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.hooks.process_hooks import epoch
from ampscope.capture.tape import tape_entry
from ampscope.capture.tape.fingerprints import fingerprint, tensors_given
from ampscope.capture.tape.live_results import (
    LeftGradients,
    LiveResult,
    LiveResults,
    OutsideTensors,
    in_place_results,
)
from ampscope.capture.tape.tape_entry import (
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
from ampscope.capture.torch_support import call_state, tensor_tree
from ampscope.capture.torch_support.backward_call import backward_roots
from ampscope.capture.torch_support.call_state import Ambient, RandomState
from ampscope.capture.torch_support.function_names import dtypes_asked, is_in_place, targets
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.capture.torch_support.user_line import NOWHERE, Place
from ampscope.capture.tracing import light_statistics

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
        self._state: CallState | None = None  # of the latest functions, which all came in the same

    @property
    def end(self) -> int:
        """Number that the next entry will get."""
        return self.start + len(self.entries)

    def __getitem__(self, number: int) -> Entry:
        return self.entries[number - self.start]

    def forget_before(self, number: int) -> None:
        """Lets go of the entries before ``number`` and of what they kept alive."""
        self.gradients.forget()
        self.obstacle = ""
        if number > self.start:
            del self.entries[: number - self.start]
            self.start = number
            self.results.forget_before(number)
            self.outside.forget_but(self.entries)

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
        entry.state.kernels = call_state.kernels_now()
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
        in_place: bool | None = None,
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
            in_place: Whether it overwrites its first argument, or what is given as ``out``; None to be found out.
        """
        if in_place is None:
            in_place = is_in_place(func, kwargs)
        arguments = self._arguments(args, kwargs, originals, overwrites=in_place)
        kernels = call_state.kernels_now() if getattr(func, "__name__", "") in call_state.CHOOSES_KERNELS else None
        state = self._state
        if state is None or random or kernels or state.ambient is not ambient or state.autocast_epoch != epoch[0]:
            state = CallState(ambient, epoch[0], random, kernels=kernels)
            self._state = state if random is None and kernels is None else None
        entry = Entry(EntryKind.FUNCTION, func, arguments, state, place)
        entry.in_place = in_place
        if func is torch.autograd.grad:
            entry.fingerprint = [each.detach() for each in tensor_tree.tensors(args[:1]) if each.numel() == 1]
        if self.full or len(self.entries) >= MAX_ENTRIES:
            self._append(entry)
        else:
            self.entries.append(entry)
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
        entry.state.flags, entry.state.kernels = tape_entry.flags_raised(), call_state.kernels_now()
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
            newest = next((each for each in ends if not light_statistics.finite(each.value)), newest)
        arguments = Arguments.of((newest.value,), {}, lambda _: newest.source)
        entry = _entry(EntryKind.BACKWARD, call, arguments, ambient, NOWHERE)
        entry.fingerprint = [newest.value.clone()]
        self._append(entry)
        return newest.value

    def sum_up_bad(self, ambient: Ambient) -> bool:
        """Adds the sum of the newest result of the step that is not finite; returns whether there is one."""
        results = sorted(self.results.alive(), key=lambda each: (each[1].entry, each[1].leaf), reverse=True)
        graph = (tensor for tensor, source in results if tensor.requires_grad and source.entry >= self.start)
        bad = next((tensor for tensor in graph if not light_statistics.finite(tensor)), None)
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
        """Adds what a collective received, once it is there: whatever it changed on the way belongs to its entry."""
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
        flat = True
        for value in (*args, *kwargs.values()) if kwargs else args:
            if not isinstance(value, tensor_tree.LEAVES) and not tensor_tree.is_shape(value):
                flat = False
                break
        if not flat:
            return Arguments.of(args, kwargs, lambda tensor: self._refer(tensor, originals, overwrites))
        given, references = list(args), list[TensorReference]()  # most calls of a loop have nothing but such arguments
        for place, value in enumerate(args):
            if isinstance(value, Tensor):
                given[place] = self._refer(value, originals, overwrites)
                references.append(given[place])
        named = dict(kwargs)
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                named[name] = self._refer(value, originals, overwrites)
                references.append(named[name])
        return Arguments(tuple(given), named, references)

    def _refer(self, tensor: Tensor, originals: dict[int, Tensor] | None, overwrites: bool) -> TensorReference:
        known = self.results.by_id.get(id(tensor))
        if known is not None and known.tensor() is tensor and self._gave(known, tensor, overwrites):
            return known.source
        gradient = self.gradients.find(tensor)
        return gradient or self.outside.refer(tensor, (originals or {}).get(id(tensor)))

    def earlier_result(self, tensor: Tensor, *, overwrites: bool) -> EarlierResult | None:
        """The entry that returned an argument; None where what it returned is not what the call got."""
        known = self.results.find(tensor)
        return known.source if known is not None and self._gave(known, tensor, overwrites) else None

    def _gave(self, known: LiveResult, tensor: Tensor, overwrites: bool) -> bool:
        """Whether an entry has returned ``tensor`` as it is now."""
        if tensor.requires_grad:
            # a custom autograd function computes without grad and gives its result a history then
            made_by = self.entries[known.source.entry - self.start]
            return made_by.state.ambient.grad or id(tensor) in self.outside.moved
        return overwrites or tensor.is_inference() or tensor._version == known.version

    def _add_results(self, value: Any) -> None:
        """Remembers the tensors of ``value`` as results of the newest entry."""
        if self.full or not self.entries:
            return
        entry, number = self.entries[-1], self.start + len(self.entries) - 1
        if type(value) is Tensor and not entry.in_place:
            known = self.results.by_id.get(id(value))
            new = known is None or known.tensor() is not value
            for each in entry.arguments.tensors if new else ():
                if type(each) is OutsideTensor and each.identity == id(value):
                    new = False
            if new:
                self.results.add(value, EarlierResult(number, 0))
                return
        given = set() if entry.in_place else _given_back(entry)
        for leaf, tensor in enumerate(tensor_tree.tensors(value)):
            if not (given and self._is_among(tensor, given)):
                self.results.add(tensor, EarlierResult(number, leaf), written=entry.in_place)

    def _add_written(self, written: list[Tensor]) -> None:
        """Remembers what an in-place call left, and makes results that share its memory depend on it."""
        if self.full or not self.entries:
            return
        self.entries[-1].also_writes = self.results.sharing_memory(written)
        self._add_results(written)

    def _is_among(self, tensor: Tensor, given: set[int | tuple[int, int]]) -> bool:
        known = self.results.find(tensor)
        return id(tensor) in given or (known is not None and (known.source.entry, known.source.leaf) in given)


def _given_back(entry: Entry) -> set[int | tuple[int, int]]:
    """The arguments of an entry; it made nothing where it merely returns one of them (``x.to(x.device)``).

    One that asks for a half dtype by name returns another tensor as soon as its argument is none.
    """
    if HALF & dtypes_asked(entry.call, entry.arguments.args, entry.arguments.kwargs):
        return set()
    outside = {each.identity for each in entry.arguments.outside}
    return outside | {(each.entry, each.leaf) for each in entry.arguments.earlier}


def _entry(kind: EntryKind, call: Any, arguments: Arguments, ambient: Ambient, place: Place) -> Entry:
    return Entry(kind, call, arguments, CallState(ambient, epoch[0]), place)
