"""Tells an exception that came from outside into the code that ran from one that this code has raised itself.

Python runs a signal handler between any two instructions, and what it raises (a time limit, a preemption) surfaces in
whatever code runs there. One that interrupts AMPscope is meant for the user's program.
"""

from __future__ import annotations

import dis
import signal
from collections.abc import Iterator
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any

from ampscope.capture.torch_support.user_line import is_capture

#: Instructions between which Python looks whether anything has come from outside, and which raise nothing themselves.
_LOOK_OUTSIDE = frozenset({"RESUME", "RESUME_CHECK", "JUMP_BACKWARD", "POP_JUMP_BACKWARD_IF_NONE", "NOT_TAKEN"})
_VAR_ARGUMENTS = 0x04  # of a code object's flags: it takes ``*args``


def is_interruption(error: BaseException) -> bool:
    """Whether an exception has come from outside into the code that it was raised in.

    Known by its traceback: it holds a call that was given the frame of its caller, as signal handlers (and debuggers)
    are given the frame that they interrupt, or one of a handler that is registered now; or it ends at an instruction
    that raises nothing itself, where another thread has put it (``PyThreadState_SetAsyncExc``). What another thread
    puts in just as a call returns, or a handler written in C raises, looks like an exception of that call.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    last, handlers = trace, None
    while trace is not None:
        last, code = trace, trace.tb_frame.f_code
        if not is_capture(code.co_filename):
            handlers = set(_handlers()) if handlers is None else handlers
            if code in handlers or _holds_its_caller(trace.tb_frame):
                return True
        trace = trace.tb_next
    return _was_put_in(last)


def _holds_its_caller(frame: FrameType) -> bool:
    """Whether an argument of a call is the frame that it was called from."""
    code, caller = frame.f_code, frame.f_back
    count = code.co_argcount + bool(code.co_flags & _VAR_ARGUMENTS)
    if caller is None or count == 0:
        return False
    values = frame.f_locals
    for name in (*code.co_varnames[: code.co_argcount], *_var_arguments(code)):
        value = values.get(name)
        if value is caller or (type(value) is tuple and any(each is caller for each in value)):
            return True
    return False


def _var_arguments(code: CodeType) -> tuple[str, ...]:
    """The name of the ``*args`` of a function that has them."""
    start = code.co_argcount + code.co_kwonlyargcount
    return code.co_varnames[start : start + 1] if code.co_flags & _VAR_ARGUMENTS else ()


def _handlers() -> Iterator[CodeType]:
    """The code of the signal handlers that are registered now."""
    for number in signal.valid_signals():
        yield from _codes(signal.getsignal(number))


def _codes(called: Any) -> Iterator[CodeType]:
    """The code behind a callable, as far as it is Python's."""
    while isinstance(called, (partial, MethodType)):
        called = called.func if isinstance(called, partial) else called.__func__
    if isinstance(called, FunctionType):
        yield called.__code__
    elif callable(called) and isinstance(method := type(called).__call__, FunctionType):
        yield method.__code__


def _was_put_in(last: TracebackType) -> bool:
    """Whether the innermost frame stands at an instruction that raises nothing itself."""
    here = (each.opname for each in dis.get_instructions(last.tb_frame.f_code) if each.offset == last.tb_lasti)
    return next(here, "") in _LOOK_OUTSIDE
