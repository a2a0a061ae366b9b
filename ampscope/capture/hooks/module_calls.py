"""The outermost calls of a watched model go through the step watch; those that mean something else are let through.

Lightning sends ``training_step`` through ``DistributedDataParallel`` by giving the model another ``forward`` for
one call. What runs then is the user's loop: it logs, it may step optimizers. Such a call is let through, and the
modules that are called inside it count as called by the loop. A redirection is made anew for each call; a forward that
stays is the module's own from its second call on.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampscope.capture.events import Through, WeightsCast
from ampscope.capture.hooks import compiled_modules, instrumented, transform_calls
from ampscope.capture.hooks.transform_calls import Experience
from ampscope.capture.torch_support import dynamo, guard, modes, torch_private
from ampscope.capture.torch_support.models import Models, is_optimized, unwrapped
from ampscope.capture.torch_support.threads import HomeThread
from ampscope.capture.torch_support.user_line import user_place


class Redirections:
    """Knows the forward that each module had when watching began.

    Args:
        modules: The watched modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._forwards = {id(module): _own_forward(module) for module in modules}
        self._latest: dict[int, Any] = {}  # by the module called, a wrapper or what it wraps: what stood in for forward

    def is_redirected(self, module: nn.Module) -> bool:
        """Whether a call of ``module`` runs something else than the forward it had."""
        called, module = id(module), unwrapped(module)
        now = _own_forward(module)
        if now is None or now is self._forwards.setdefault(id(module), now):
            return False
        if now is self._latest.get(called):  # it stayed: the user has given the module another forward
            self._forwards[id(module)] = now
            return False
        self._latest[called] = now
        return True


def _own_forward(module: nn.Module) -> Any:
    """The forward that is set on the module itself; None where it is the one of its class, or wraps that."""
    forward = vars(module).get("forward")
    if forward is None:
        return None
    forward = inspect.unwrap(forward)
    if type(forward).__module__.startswith("ampscope."):  # a module that is kept in float32
        return None
    of_class = getattr(forward, "__func__", None) is type(module).forward
    return None if of_class and getattr(forward, "__self__", None) is module else forward


#: Steps during which every module's call is looked at, to learn which submodules the loop calls by itself.
LEARNING_STEPS = 2


class CallListener(Protocol):
    """Receives the outermost calls of watched modules; what ``enter`` returns comes back at the call's end."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any, through: Through | None = None) -> Any:
        """A call begins; ``through`` what calls the module in the loop's place."""

    def leave(self, entry: Any, result: Any) -> None:
        """The call has returned ``result``."""

    def lost(self, entry: Any) -> None:
        """The call was left by an exception."""

    def cast(self, cast: WeightsCast) -> None:
        """Parameters of a watched module have got another dtype."""


class WatchedModule(instrumented.Instrumented):
    """Behaviour of a module that a scope watches."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, through its watch."""
        forward = super().__call__  # type: ignore[misc]  # the module's class comes next in the order
        if torch_private.is_tracing():
            return forward(*args, **kwargs)
        return guard.through(partial(self.ampscope_owner.called, self), forward, args, kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Casts or moves the module (``half``, ``to`` and the like all come here), through its watch."""
        apply = super()._apply  # type: ignore[misc]
        return guard.through(partial(self.ampscope_owner.applied, self), apply, args, kwargs)


def _weakly(method: Any) -> Callable[..., None]:
    """A hook that calls a bound method and does not keep its object alive."""
    known, function = weakref.ref(method.__self__), method.__func__

    def hook(*call: Any) -> None:
        found = known()
        if found is not None:
            function(found, *call)

    return guard.told_by_hook(hook)


class _Learning:
    """The hooks on all modules; they do not keep alive whose methods they call."""

    #: Torch's handles, by number. They know what they hook into by weak reference, and those of an object that the
    #: collector takes are dead when it is finalised; so no object holds them.
    _handles: ClassVar[dict[int, Any]] = {}

    def __init__(self) -> None:
        self._numbers: tuple[int, ...] = ()

    @property
    def installed(self) -> bool:
        """Whether they are there."""
        return bool(self._numbers)

    def install(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Has the methods called around the call of every module."""
        handles = (
            register_module_forward_pre_hook(_weakly(before)),
            register_module_forward_hook(_weakly(after), always_call=True),
        )
        self._numbers = tuple(handle.id for handle in handles)
        self._handles.update(zip(self._numbers, handles, strict=True))

    def remove(self) -> None:
        """Removes them; safe to call twice, and again where a signal has come within."""
        for number in self._numbers:
            if (handle := self._handles.get(number)) is not None:
                handle.remove()
                self._handles.pop(number, None)
        self._numbers = ()


class _Hooked(NamedTuple):
    """An outermost call that the learning hooks noticed."""

    module: nn.Module
    entry: Any


class ModuleWatch:
    """Instruments the models and passes on the outermost of their calls.

    A loop may call ``model.encoder(x)`` and never the root. During the first `LEARNING_STEPS` steps, hooks on every
    module's call find such submodules; they are instrumented too.

    Args:
        models: The watched models.
        caller: Is told of outermost calls.

    Attributes:
        was_called: Any call of a watched module was seen.
        keeps: What lives as long as the models do.
        home: The thread of the loop; replicas in other threads are not the loop's.
    """

    def __init__(self, models: Models, caller: CallListener) -> None:
        self._models = models
        self._redirections = Redirections(models.modules)
        self._caller = caller
        self.home = HomeThread()
        self._depth = 0
        self._instrumented: dict[int, nn.Module] = {}
        self._hooks = _Learning()
        self._hooked: _Hooked | None = None
        self._transform: Through | None = None  # that runs
        self._experience = Experience()
        self._steps = 0
        self.was_called = False
        self.keeps: object = None

    def install(self) -> None:
        """Instruments every model; calls of compiled ones are heard anyway, and Dynamo knows them by their class."""
        for root in self._models.roots:
            if is_optimized(root):
                dynamo.tie(root, self)
            else:
                self._instrument(root)
        compiled_modules.join(self, self.home)
        transform_calls.join(self, self.home)
        if not self._models.compiled:
            self._hooks.install(self._before, self._after)

    def uninstall(self) -> None:
        """Gives every module its own class back."""
        self._stop_learning()
        compiled_modules.leave(self)
        transform_calls.leave(self)
        for root in filter(is_optimized, self._models.roots):
            dynamo.tie(root, None)
        for module in self._instrumented.values():
            instrumented.restore(module)
        self._instrumented.clear()

    def stepped(self) -> None:
        """A step is over."""
        self._steps += 1
        if self._steps == 1 and not self.was_called:
            self._look_inside()
        if dynamo.in_use():
            compiled_modules.meet_dynamo()  # by another way than `torch.compile`, which says so
        if self._steps >= LEARNING_STEPS or dynamo.in_use():
            self._stop_learning()

    def called(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An instrumented module was called."""
        if self._transform is not None:
            self._called_inside(module)
        outermost = id(module) in self._instrumented and self._is_outermost()
        if not outermost or self._redirections.is_redirected(module):
            return forward(*args, **kwargs)
        return self._outermost(module, forward, args, kwargs)

    def applied(self, module: nn.Module, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A function is applied to the tensors of an instrumented module; it may cast them."""
        if not self.home.is_entered():
            return apply(*args, **kwargs)
        before = {name: each.dtype for name, each in module.named_parameters() if each.requires_grad}
        result = apply(*args, **kwargs)
        now = {name: each.dtype for name, each in module.named_parameters() if name in before}
        changed = [dtype for name, dtype in now.items() if dtype is not before[name]]
        if changed:
            self._caller.cast(WeightsCast(user_place(), len(changed), len(before), changed[0]))
        return result

    def compiles(self) -> None:
        """``torch.compile`` is used: it warns of hooks on all modules."""
        self._stop_learning()
        modes.leave_to_dynamo()

    def compiled_called(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A compiled module was called; it counts as a call of the watched module inside."""
        self.compiles()
        inner = unwrapped(module)
        if id(inner) not in self._models.names or not self._is_outermost():
            return call(*args, **kwargs)
        return self._outermost(inner, call, args, kwargs)

    def transformed(self, through: Through, proceed: Callable[[], Any]) -> Any:
        """A transform of torch.func runs; it counts as a call of the first model until it calls another module."""
        if not self._is_outermost():
            return proceed()
        self._transform, called = through, self.was_called
        through.promising = self._experience.promises(through)
        try:
            reading = transform_calls.reading(through, proceed)
            return self._outermost(unwrapped(self._models.roots[0]), reading, (), {}, through)
        finally:
            self._transform = None
            self.was_called = called or through.module is not None
            self._experience.learn(through)

    def _called_inside(self, module: nn.Module) -> None:
        """A module is called inside a transform."""
        through = self._transform
        if through is not None and id(module) in self._models.names and self.home.is_entered():
            if through.module is None:
                through.module = module
                self._instrument(module)
            through.trains |= torch.is_grad_enabled()

    def lends(self, module: nn.Module, through: Through, proceed: Callable[[], Any]) -> Any:
        """A module is called with other weights than its own."""
        inner = unwrapped(module)
        if id(inner) not in self._models.names or not self._is_outermost():
            return proceed()
        return self._outermost(inner, proceed, (), {}, through)

    def _outermost(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, through: Through | None = None
    ) -> Any:
        self.was_called = True
        if self._hooks.installed and self._models.compiled:
            self._stop_learning()  # now: torch compiles again when the number of hooks on all modules changes
        if through is not None:
            entry = self._caller.enter(module, through.given, {}, through)
        else:
            entry = self._caller.enter(module, args, kwargs)
        self._depth += 1
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            self._caller.lost(entry)
            raise
        finally:
            self._depth -= 1
        self._caller.leave(entry, result)
        return result

    def _is_outermost(self) -> bool:
        if self._hooked is not None and not self._hooks.installed and not self.home.is_elsewhere:
            self._stop_learning()  # its hooks are gone, and so will its end go unheard
        return not self._depth and self.home.is_entered() and not torch_private.in_functorch()

    def _look_inside(self) -> None:
        """Instruments what compiled models were made of: the loop may call that.

        Only where their own calls do not come, for Dynamo compiles a module anew whose class has changed.
        """
        for root in self._models.roots:
            if is_optimized(root):
                self._instrument(unwrapped(root))

    def _instrument(self, module: nn.Module) -> None:
        if id(module) not in self._instrumented and not instrumented.is_instrumented(module):
            self._instrumented[id(module)] = instrumented.instrument(module, WatchedModule, self)

    # -- learning -----------------------------------------------------------------------------------------------

    def _stop_learning(self) -> None:
        self._hooks.remove()
        if self._hooked is not None and not self.home.is_elsewhere:  # its end will not be heard
            hooked, self._hooked = self._hooked, None
            self._depth -= 1
            self._caller.lost(hooked.entry)

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch_private.is_tracing() or dynamo.in_use():
            return
        if self._transform is not None:
            self._called_inside(module)
        if torch_private.in_functorch():
            return
        known = id(module) in self._models.names and not isinstance(module, torch.jit.ScriptModule)
        if self._depth or not known or id(module) in self._instrumented or not self.home.is_entered():
            return
        if self._redirections.is_redirected(module):
            return
        self._instrument(module)
        self.was_called = True
        kwargs = torch_private.forward_kwargs(sys._getframe(4))  # past the door and the hooks, in the module's call
        self._hooked = _Hooked(module, self._caller.enter(module, args, kwargs))
        self._depth += 1

    def _after(self, module: nn.Module, _args: Any, result: Any) -> None:
        if self._hooked is None or self._hooked.module is not module or self.home.is_elsewhere:
            return
        hooked, self._hooked = self._hooked, None
        self._depth -= 1
        self._caller.leave(hooked.entry, result)
