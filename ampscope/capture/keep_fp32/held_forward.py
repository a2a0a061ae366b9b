"""A callable in the place of a module's ``forward``, held by the module itself, until it is let go."""

from __future__ import annotations

from typing import Any

from torch import nn


class HeldForward:
    """Stands in the place of a module's ``forward``; an object instead of a function, so that a copy gets its own."""

    travels = True  #: copies and pickles of the module have it, too

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.other = vars(module).get("forward")  #: a forward that someone else put into the module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward."""
        raise NotImplementedError

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that the module has without this."""
        if self.other is not None:
            return self.other(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    def leave(self) -> None:
        """Gives the module its own forward back, unless someone else has wrapped this one meanwhile."""
        held = vars(self._module)
        if held.get("forward") is not self:
            return
        if self.other is None:
            del held["forward"]
        else:
            held["forward"] = self.other

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy; of one that does not travel, the forward that the module's copy has without it."""
        if self.travels:
            return super().__reduce_ex__(protocol)
        return getattr, ((self._module, "forward") if self.other is None else (self.other, "__call__"))

    @property
    def __wrapped__(self) -> Any:
        """The module's own forward, whose signature this one has."""
        return self.other if self.other is not None else type(self._module).forward.__get__(self._module)

    @property
    def __func__(self) -> Any:
        """The function that the user wrote, as a bound method has it."""
        return getattr(self.__wrapped__, "__func__", self.__wrapped__)

    @property
    def __code__(self) -> Any:
        """The user function's code, for those who read it (``torch.jit.script``, ``torch.export``)."""
        return self.__func__.__code__

    @property
    def __globals__(self) -> Any:
        """The user function's globals; see ``__code__``."""
        return self.__func__.__globals__

    @property
    def __closure__(self) -> Any:
        """The user function's closure; see ``__code__``."""
        return self.__func__.__closure__

    @property
    def __defaults__(self) -> Any:
        """The user function's defaults; see ``__code__``."""
        return self.__func__.__defaults__

    @property
    def __kwdefaults__(self) -> Any:
        """The user function's keyword defaults; see ``__code__``."""
        return self.__func__.__kwdefaults__
