"""Takes modes off torch's stacks: other people's for the time of AMPscope's own work, and its own for good."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ampscope.capture.torch_support import torch_private


def remove_modes(ours: Callable[[Any], bool]) -> None:
    """Takes every mode of ours off both stacks."""
    for stack in (torch_private.function_stack, torch_private.dispatch_stack):
        modes = stack.modes()
        rest = [mode for mode in modes if not ours(mode)]
        if len(rest) != len(modes):
            stack.become(rest)


@contextlib.contextmanager
def modes_at_rest(*kinds: type) -> Iterator[None]:
    """Takes dispatch modes of some classes off their stack for the body; then all are where they were."""
    modes = torch_private.dispatch_stack.modes()
    torch_private.dispatch_stack.become([mode for mode in modes if not isinstance(mode, kinds)])
    try:
        yield
    finally:
        torch_private.dispatch_stack.become(modes)


class OthersAside:
    """Takes the modes of other people off both stacks for AMPscope's own work, so that they do not see it.

    Entered again inside itself it does nothing, and the first end is the end of it.

    Args:
        ours: Whether a mode is one of AMPscope's; those stay, at the bottom.
    """

    __slots__ = ("_dispatch", "_function", "_ours", "are_aside")

    def __init__(self, ours: Callable[[Any], bool]) -> None:
        self._ours = ours
        self._function: list[Any] = []
        self._dispatch: list[Any] = []
        self.are_aside = False  #: some are off the stacks now

    def __enter__(self) -> None:
        if self.are_aside or not (torch_private.function_stack.length() or torch_private.dispatch_stack.length()):
            return
        try:
            self._put_all_aside()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._put_back()
        except BaseException:  # what comes from outside comes once
            self._put_back()
            raise

    def _put_all_aside(self) -> None:
        if torch_private.function_stack.length():
            modes = torch_private.function_stack.modes()
            self._function = [mode for mode in modes if not self._ours(mode)]  # known before they are taken off
            self._put_aside(torch_private.function_stack, modes, self._function)
        if torch_private.dispatch_stack.length():
            modes = torch_private.dispatch_stack.modes()
            self._dispatch = [mode for mode in modes if not self._ours(mode)]
            self._put_aside(torch_private.dispatch_stack, modes, self._dispatch)

    def _put_aside(self, stack: torch_private.ModeStack, modes: list[Any], others: list[Any]) -> None:
        if others:
            self.are_aside = True
            stack.become([mode for mode in modes if self._ours(mode)])

    def _put_back(self) -> None:
        if self._function:
            below = 1 if self._function[0] is torch_private.default_device_mode() else 0
            ours = [mode for mode in torch_private.function_stack.modes() if self._ours(mode)]
            torch_private.function_stack.become([*self._function[:below], *ours, *self._function[below:]])
        if self._dispatch:
            torch_private.dispatch_stack.become(
                [*filter(self._ours, torch_private.dispatch_stack.modes()), *self._dispatch]
            )
        self._function, self._dispatch, self.are_aside = [], [], False


def _is_ours(thing: Any) -> bool:
    module: str = type(thing).__module__
    return module.partition(".")[0] == "ampscope" or hasattr(thing, "ampscope_heard")


def others_aside() -> OthersAside:
    """A context in which the modes of other people see nothing; for work that comes outside of any step."""
    return OthersAside(_is_ours)


@contextlib.contextmanager
def making_graph() -> Iterator[None]:
    """In the body torch makes a graph: AMPscope's modes, and its hooks on all modules, are away, and it hears nothing.

    Dynamo exports no module that has hooks, ``torch.jit.trace`` names values by the Python frames that it meets and
    compares constants with Python code, in which a mode gets numbers in place of tensors.
    """
    stacks = [(stack, stack.modes()) for stack in (torch_private.function_stack, torch_private.dispatch_stack)]
    homes = torch_private.hooks_on_all_modules()
    hooks = [(home, number, hook) for home in homes for number, hook in home.items() if _is_ours(hook)]
    torch_private.graphs.in_the_making += 1
    try:
        for home, number, _ in hooks:
            del home[number]
        remove_modes(_is_ours)
        yield
    finally:
        for stack, modes in stacks:
            stack.become(modes)
        for home, number, hook in hooks:
            home[number] = hook
        torch_private.graphs.in_the_making -= 1
