"""Follows which of a loop's values depend on the loss scale, and how: gradients, and what is computed from them."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support.torch_private import HeldStorages, storage_key, version_counter
from ampscope.capture.torch_support.user_line import Place, user_place
from ampscope.capture.usage import scale_dependence
from ampscope.capture.usage.loop_numbers import is_count, is_number, is_one, is_round
from ampscope.capture.usage.scale_dependence import CONSTANT, FREE, OF_SCALE, SCALED, UNKNOWN, ScaleDependence

#: A scale below this is too easily a number of the loop's own.
_SMALLEST_SCALE = 64
#: A factor of the whole loss that is this large is there for float16.
_CLEARLY_SCALE = 512
_TIMES = frozenset(("mul", "imul", "rmul", "multiply"))
_BY_FACTORS = _TIMES | scale_dependence.QUOTIENTS
_MOST_ELEMENTS = 1 << 16  #: of the seeds of a backward that are looked at, and of sums that may begin at zero
_MOST_READS = 256  #: of such sums within a run

Memory = tuple[int, int]  #: a storage and the offset in it


class Followed(NamedTuple):
    """A tensor that depends on the loss scale."""

    tensor: weakref.ref[Tensor]
    how: ScaleDependence
    version: int = 0  #: with which it was noted
    place: Place | None = None  #: the line that made it; of what is made of a kept one, the line that made that
    kept: bool = False  #: since an earlier iteration, or made of such a value


class FollowedValues:
    """How each value depends on the loss scale, as far as it was followed.

    Args:
        gradients: Gives the gradients as they are now.
    """

    def __init__(self, gradients: Callable[[], Iterable[Tensor]]) -> None:
        self._present = gradients
        self._gradients: dict[Memory, ScaleDependence] | None = None  # None: not looked at since backward
        self._usual = SCALED  # of a gradient of which nothing else is known
        self._storages: set[int] = set()
        self._held = HeldStorages()  # so that what takes the place of a gradient that is gone is none
        self._ids: set[int] = set()
        self._tensors: dict[int, Followed] = {}
        self._bases: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}  # of what lies in their memory
        self._uses_kept = False
        self.missed = False  #: the loop has done something that nobody heard
        self._reads_left = _MOST_READS
        self.holds_scaled = False  #: there is something but gradients that depends on the scale
        self._by_scaler = False  # scales are those of a scaler, which are floats: whole numbers are counts
        self.scales: deque[float] = deque(maxlen=8)  #: numbers the loop got by asking for the scale

    # -- what becomes known -------------------------------------------------------------------------------------

    def scale_read(self, scale: float) -> None:
        """The loop asked for the scale, and may calculate with it."""
        if scale >= _SMALLEST_SCALE and scale not in self.scales:
            self.scales.append(scale)

    def scale_tensor(self, scale: Tensor | None) -> None:
        """The scaler keeps its scale in this tensor."""
        if scale is not None and id(scale) not in self._tensors:
            self.follow(scale, OF_SCALE)

    def start_over(self) -> None:
        """There is a scaler now: nothing that was followed so far has to do with the scale."""
        self._by_scaler = True
        self.backward_done()
        self._tensors.clear()
        self.scales.clear()

    def follow(self, tensor: Tensor, dependence: ScaleDependence, made_of: Iterable[object] = ()) -> None:
        """Notes that a tensor, ``made_of`` others, depends on the loss scale as ``dependence`` says."""
        if dependence.of_scale:
            self._tensors[id(tensor)] = Followed(weakref.ref(tensor), dependence)
            return
        kept = self.kept_among(made_of)
        place = kept.place if kept is not None else user_place()
        self._note(tensor, Followed(weakref.ref(tensor), dependence, version_counter(tensor), place, kept is not None))
        depends = dependence.degree != 0 or dependence.inhomogeneous is not None
        self.holds_scaled = self.holds_scaled or depends

    def _note(self, tensor: Tensor, followed: Followed) -> None:
        self._tensors[id(tensor)] = followed
        shared = self._bases.get(id(tensor))
        base = shared[1]() if shared is not None and shared[0]() is tensor else tensor._base
        if base is not None and base is not tensor and not self.is_in_gradient(base):
            self._note(base, followed._replace(tensor=weakref.ref(base), version=version_counter(base)))

    def constant_written(self, tensor: Tensor, *, in_part: bool) -> None:
        """A tensor, or a part of it, was overwritten with what does not depend on the scale."""
        known = self._known(tensor)
        if known is not None and not known.how.of_scale:
            self._tensors.pop(id(tensor))
            if in_part:
                self._note(tensor, known._replace(how=UNKNOWN))

    def lies_in(self, tensor: Tensor, base: Tensor) -> None:
        """A tensor is another object in the memory of ``base``: what is written into one is written into both."""
        self._bases[id(tensor)] = (weakref.ref(tensor), weakref.ref(base))

    def backward_done(self) -> None:
        """Gradients are scaled ones again, and may be other tensors."""
        if self._gradients is not None or self._storages:
            self._gradients, self._usual = None, SCALED
            self._storages.clear()
            self._held.release()
            self._ids.clear()

    def new_iteration(self) -> None:
        """Forgets the old gradients; what was computed from them stays known for as long as the loop keeps it.

        Of what was written unheard since, as ``unscale_`` writes gradients, nothing is known any more.
        """
        for key, known in list(self._tensors.items()):
            tensor = known.tensor()
            if tensor is None:
                del self._tensors[key]
            elif not known.how.of_scale:
                changed = known.version != version_counter(tensor) or self.is_in_gradient(tensor)
                self._tensors[key] = known._replace(how=UNKNOWN if changed else known.how, kept=True)
        if self.holds_scaled:
            self.holds_scaled = any(each.how.degree or each.how.inhomogeneous for each in self._tensors.values())
            self._bases.clear()
        self.backward_done()

    # -- gradients ----------------------------------------------------------------------------------------------

    def find_gradients(self) -> None:
        """Notes where the gradients lie, at the first call after a backward."""
        if self._gradients is None:
            self._gradients = {}
            present = [gradient for gradient in self._present() if gradient.layout is torch.strided]
            self._ids = {id(each) for each in present}
            for each in present:
                self.gradient_assigned(each)

    def is_in_gradient(self, tensor: Tensor) -> bool:
        """Whether a tensor is a gradient, or a view of one: it is looked up by its memory."""
        return self._memory(tensor) is not None

    def is_gradient_object(self, thing: Any) -> bool:
        """Whether this very object was the gradient of a parameter after backward."""
        return id(thing) in self._ids

    def gradient_assigned(self, source: Tensor) -> None:
        """A parameter was given ``source`` for its gradient, or a gradient its memory."""
        key = storage_key(source)
        self._storages.add(key)
        self._held.hold(key, source)

    def gradient_written(self, tensor: Tensor, dependence: ScaleDependence) -> None:
        """A gradient, or a view of one, was overwritten with a value that depends on the scale like this."""
        self._tensors.pop(id(tensor), None)
        memory = self._memory(tensor)
        if self._gradients is not None and memory is not None and not dependence.inhomogeneous:
            self._gradients[memory] = dependence

    def gradients_unscaled(self) -> None:
        """No gradient holds the scale any more, nor does what lies in the memory of one."""
        self._usual = FREE
        for key, known in list(self._tensors.items()):
            tensor = known.tensor()
            if tensor is not None and self.is_in_gradient(tensor):
                del self._tensors[key]

    def any_unscaled(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the loop itself has divided the scale out of the gradient of any of ``parameters``."""
        if not self._gradients:
            return False
        return any(self.dependence_of(p.grad).unscaled for p in parameters if p.grad is not None)

    # -- asking -------------------------------------------------------------------------------------------------

    def may_depend(self, values: Iterable[Any]) -> bool:
        """A quick look at a function's arguments, for the many that have nothing to do with the scale."""
        if self._storages:
            return True
        for value in values:
            if id(value) in self._tensors or isinstance(value, (list, tuple)):
                return True
            if self.scales and is_number(value) and self._of_number(value) != CONSTANT:
                return True
        return False

    def dependence_of(self, value: Any) -> ScaleDependence:
        """How ``value`` depends on the loss scale; of a list, the item that does so most."""
        if isinstance(value, Tensor):
            known = self._tensors.get(id(value))
            if known is None or known.tensor() is not value:
                return self._of_gradient(value) if self._storages else CONSTANT
            self._uses_kept = self._uses_kept or known.kept
            is_gradient = known.how.unknown and self.is_in_gradient(value)
            return self._of_gradient(value) if is_gradient else known.how
        if isinstance(value, (list, tuple)):
            found = filter(CONSTANT.__ne__, map(self.dependence_of, value))
            return max(found, key=lambda each: (bool(each.inhomogeneous), abs(each.degree)), default=CONSTANT)
        return self._of_number(value) if is_number(value) else CONSTANT

    def dependence_of_operand(self, value: object) -> ScaleDependence:
        """The same; but a tensor may be one that the loop keeps, if it does so and was not heard in between."""
        found = self.dependence_of(value)
        unsure = self.missed and self._uses_kept and found == CONSTANT
        return UNKNOWN if unsure and isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter) else found

    def kept_among(self, values: Iterable[object]) -> Followed | None:
        """The first of ``values``, or of the items of a list, that depends on what an earlier iteration has kept."""
        for value in values:
            items: Iterable[object] = value if isinstance(value, (list, tuple)) else (value,)
            for known in map(self._known, items):
                if known is not None and known.kept and known.how != UNKNOWN:
                    return known
        return None

    def is_zero(self, value: object) -> bool:
        """Whether a tensor is zero throughout, as sums are that begin; looks a few times within a run."""
        if not isinstance(value, Tensor) or self._reads_left <= 0:
            return False
        self._reads_left -= 1
        return _equal_elements(value) == 0

    def _known(self, value: object) -> Followed | None:
        known = self._tensors.get(id(value))
        return known if known is not None and known.tensor() is value else None

    def dependence_of_threshold(self, value: Any) -> ScaleDependence:
        """Returns how a threshold depends on the loss scale; a round number times the scale counts as scaled, too."""
        found = self.dependence_of_operand(value)
        ratios = [abs(value / scale) for scale in self.scales] if isinstance(value, float) else []
        return SCALED if found == CONSTANT and any(map(is_round, ratios)) else found

    def takes_scale_out(self, number: Any) -> bool:
        """Whether a factor of scaled gradients holds one over the scale, with a learning rate in it or without.

        A learning rate alone has few digits; over a scale it has many.
        """
        factor = abs(float(number)) if is_number(number) else 0.0
        rates = [factor * scale for scale in self.scales] if 0 < factor < math.inf else []
        return any(
            is_one(rate)
            or (rate <= 1 and scale >= _CLEARLY_SCALE)
            or (not is_round(factor) and (is_round(rate) or is_count(1.0 / rate)))
            for rate, scale in zip(rates, self.scales, strict=False)
        )

    def _of_gradient(self, tensor: Tensor) -> ScaleDependence:
        memory = self._memory(tensor)
        return (self._gradients or {}).get(memory, self._usual) if memory else CONSTANT

    def _memory(self, tensor: Tensor) -> Memory | None:
        """Returns the place in memory of a gradient, or of a view of one; None for any other tensor."""
        if not self._storages or tensor.layout is not torch.strided:
            return None
        key = storage_key(tensor)
        return (key, int(tensor.storage_offset())) if key in self._storages else None

    def _of_number(self, number: float) -> ScaleDependence:
        """A multiple of the scale, its square, or one over these, of either sign; every other number is a constant."""
        is_of_loop = self._by_scaler and isinstance(number, int)
        for scale in self.scales if math.isfinite(number) and not is_of_loop else ():
            square = scale * scale
            if number and abs(number) in (square, 1.0 / square):
                return ScaleDependence(math.copysign(2.0, abs(number) - 1), of_scale=True)
            if is_count(abs(number) / scale):
                return OF_SCALE
            if number and is_count(1.0 / (abs(number) * scale)):
                return ScaleDependence(-1.0, of_scale=True)
        return CONSTANT


class HandScale:
    """A loss scale that a loop without a scaler multiplies and divides by itself.

    Args:
        values: How the loop's values depend on the scale; factors of the loss are added here.

    Attributes:
        in_gradients: Gradients have been asked of a loss that was multiplied.
        divided_out: The loop has divided the scale out of scaled gradients: it knows what it does.
        judged: An optimizer has stepped without a scaler, and it was decided whether one is missing.
    """

    def __init__(self, values: FollowedValues) -> None:
        self._values = values
        self.in_gradients = False
        self.divided_out = False
        self.judged = False

    def function_runs(self, func: Callable[..., Any], args: Any, kwargs: Any, *, after_backward: bool) -> None:
        """The loop computes something: with its loss, or with what came of it."""
        name = scale_dependence.plain(getattr(func, "__name__", ""))
        if not after_backward and len(args) > 1 and name in _BY_FACTORS:
            self._loss_computed(name, args)
        if self.in_gradients and not self.divided_out and self._values.may_depend((*args, *kwargs.values())):
            self.divided_out = self._divides(name, args, kwargs)

    def is_free_of_scale(self, func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Whether what a function gives to the tensor that it writes is free of the scale, as far as it is known."""
        given = map(self._values.dependence_of, (*args[1:], *kwargs.values()))
        depends = any(each.degree or each.inhomogeneous for each in given)
        return not depends or self._divides(scale_dependence.plain_name(func), args, kwargs)

    def seeded(self, seeds: Iterable[Tensor]) -> None:
        """A backward begins with these gradients of its losses: the same as losses multiplied with them."""
        for seed in seeds:
            waits = seed.device.type != "cpu" and (self.judged or self.divided_out)
            factor = None if waits or self._values.dependence_of(seed) != CONSTANT else _equal_elements(seed)
            for scale in {factor, factor * seed.numel()} if factor and factor != 1 else ():
                if scale >= _SMALLEST_SCALE:
                    self._values.scale_read(scale)
                    self._values.follow(seed, OF_SCALE)

    def transformed(self, factors: Iterable[Any]) -> bool:
        """A transform has multiplied single values with ``factors``; returns whether its results are scaled."""
        for factor in factors:
            self._takes(factor)
        scaled = any(self._values.dependence_of(factor).degree == 1 for factor in factors)
        self.in_gradients |= scaled
        return scaled

    def _loss_computed(self, name: str, args: Any) -> None:
        """Something was computed that may be the loss times a factor."""
        if name in _TIMES:
            for factor, other in (args[:2], args[1::-1]):
                self._multiplies(factor, other)
        elif scale_dependence.divides(name) and is_number(args[1]) and args[1]:
            self._takes(1.0 / args[1])

    def _multiplies(self, factor: Any, other: Any) -> None:
        single = isinstance(other, Tensor) and other.requires_grad and other.dim() == 0
        if single or not isinstance(factor, Tensor):
            self._takes(factor)

    def _takes(self, factor: Any) -> None:
        if is_number(factor):
            self._values.scale_read(float(factor))
        elif _may_be_scale(factor) and self._values.dependence_of(factor) == CONSTANT:
            self._values.follow(factor, OF_SCALE)

    def _divides(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether this divides the scale out of something that was computed from scaled gradients."""
        values = self._values
        found = [values.dependence_of(each) for each in args]
        if not any(each != CONSTANT and not each.of_scale for each in found):
            return False
        if name.endswith("non_finite_check_and_unscale") or name in ("sign", "sgn"):
            return True
        if scale_dependence.divides(name):  # by the scale, or by what is scaled itself: a norm, another moment
            divisors = [each for each in found[1:] if each.degree]
            return any((each.of_scale and each.degree == 1) or each.degree == found[0].degree for each in divisors)
        factors = args if scale_dependence.multiplies(name) else (kwargs.get("alpha"), kwargs.get("value"))
        return any(values.takes_scale_out(each) or _is_inverse(values, each) for each in factors)


def _may_be_scale(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad and value.numel() == 1


def _equal_elements(tensor: Tensor) -> float | None:
    """The number that all elements of a tensor are; None where they differ or cannot be read."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_floating_point()
    if not plain or not 0 < tensor.numel() <= _MOST_ELEMENTS or not _can_be_read(tensor.device.type):
        return None
    least, most = (float(each) for each in torch.aminmax(tensor.detach()))
    return most if least == most else None


def _can_be_read(device: str) -> bool:
    """Whether the host can get a value from a kind of device: one that a graph is captured on has none to give."""
    return device != "meta" and not (device == "cuda" and torch.cuda.is_current_stream_capturing())


def _is_inverse(values: FollowedValues, value: Any) -> bool:
    """Whether a tensor is one over the scale, times a constant."""
    found = values.dependence_of(value) if isinstance(value, Tensor) else CONSTANT
    return found.of_scale and found.degree == -1
