"""The one place that catches AMPscope's own faults is here, so that none of them reaches the training loop.

Each part has a guard; whatever happens outside of all parts is caught at the doors, through which the loop comes in.

An exception that came from outside into the code that ran is told from one that this code has raised itself: Python
runs a signal handler between any two instructions, and what it raises (a time limit, a preemption) surfaces in whatever
code runs there. One that interrupts AMPscope is meant for the user's program.
"""

from __future__ import annotations

import dis
import signal
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, Protocol, TypeGuard

import torch

from ampscope.capture.torch_support.user_line import is_capture
from ampscope.trace.vocabulary import DEVICE_FAILED, SWITCHED_OFF

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


_BY_DEVICE = ("CUDA error:", "HIP error:", "device-side assert", "CUBLAS_STATUS_", "CUDNN_STATUS_EXECUTION_FAILED")
#: Set to True to let faults through; for AMPscope's own tests.
RAISE = False


def is_of_device(error: BaseException) -> bool:
    """Whether a device tells of what ran on it earlier; the first call that waits for it hears that, ours or not."""
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _BY_DEVICE)
    )


def _is_fault(error: BaseException) -> TypeGuard[Exception]:
    """Whether an exception is one of the code that it was raised in; so it is where that cannot be told."""
    if not isinstance(error, Exception):
        return False
    try:
        return not is_interruption(error)
    except Exception:  # noqa: BLE001  # memory is short, say
        return True


class Suppressed:
    """A context that lets no exception out and keeps it: for running the user's own code once more, in a replay.

    What interrupts that code from outside (a signal handler) is not its exception, and goes on.
    """

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Suppressed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None or not _is_fault(error):
            return False
        self.error = error.with_traceback(None)
        return True


def surely(remove: Callable[[], object], *, tries: int = 2) -> None:
    """Takes something away that AMPscope has put into the process; tries once more where that has failed."""
    for _ in range(tries):
        try:
            remove()
        except BaseException as error:
            if not _is_fault(error):
                raise
        else:
            return


class Guard:
    """A reusable context for one part of AMPscope: a fault inside disables the part, with one warning that names it.

    What is no fault of the part goes on to the loop: `KeyboardInterrupt` and `SystemExit`, and what a signal handler of
    the user's raises while the part runs.

    Args:
        part: What the part does, as the user would say it, e.g. ``the step tape``.
        on_fault: Called once with a one-line description; also where the part removes what it installed.
    """

    __slots__ = ("broken", "on_fault", "part")
    __enter__ = staticmethod(int)  #: does nothing, without a frame of Python's: parts are entered many times a step

    def __init__(self, part: str, on_fault: Callable[[str], None]) -> None:
        self.part = part
        self.on_fault = on_fault
        self.broken = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        return error is not None and self.catches(error)

    def catches(self, error: BaseException) -> bool:
        """Whether an exception is a fault of the part, which is broken then; else it is to be raised again."""
        if RAISE or not _is_fault(error):
            return False
        if not self.broken:
            self.broken = True
            self._report(error)
        return True

    def _report(self, error: Exception) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
        told = f"{type(error).__name__}: {error}"
        if is_of_device(error):
            text = f"{self.part} {SWITCHED_OFF}, {DEVICE_FAILED} ({told.splitlines()[0]})"
            goes_on = "the training's next call on it raises the same"
        else:
            text, goes_on = f"{self.part} {SWITCHED_OFF} after {told} ({place})", "training goes on unchanged"
        with Suppressed():  # where warnings are errors, or cannot be shown, this one still is none of the loop's
            warnings.warn(f"ampscope: {text}; {goes_on}", RuntimeWarning, stacklevel=4)
        with Suppressed():
            self.on_fault(text)


# -- doors -----------------------------------------------------------------------------------------------------------


class Behind(Protocol):
    """Who lives behind the doors: a scope."""

    def failed(self, error: Exception) -> None:
        """A fault that no part's guard has caught: tells of it, and takes everything out of the loop's way."""

    def interrupted(self) -> None:
        """The user's own exception has come in the midst of it: puts everything back as the loop had it."""


class RunOverError(BaseException):
    """The run was closed, in another thread, before this part of it was done; nothing more of it is to be done."""


class _Here(threading.local):
    """Holds for each thread how it stands between the loop and AMPscope's own work."""

    doors = 0  #: that it has come through, one inside the other
    working = False  #: AMPscope's own work is being done, in which the user's code may be run again
    broken_off = False  #: by what came from outside, behind an inner door: the outermost one puts everything back


here = _Here()
#: By ``id``; no weak set, whose callback in Python would swallow what a signal handler of the user's raises in it.
_behind: dict[int, weakref.ref[Behind]] = {}
_changing = threading.Lock()


def stand_behind(scope: Behind) -> None:
    """Has a scope told of faults and interruptions behind the doors, as long as it lives."""
    with _changing:
        for key in [key for key, known in _behind.items() if known() is None]:
            del _behind[key]
        _behind[id(scope)] = weakref.ref(scope)


def _all_behind() -> list[Behind]:
    with _changing:
        return [scope for scope in (known() for known in _behind.values()) if scope is not None]


class _UsersCall:
    """The loop's own call, behind a door: known are what it returned, and whether an exception is its own."""

    __slots__ = ("_call", "error", "result", "returned")

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.error = 0  #: ``id`` of the exception that it raised
        self.returned = False
        self.result: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self._call(*args, **kwargs)
        except BaseException as error:
            self.error = id(error)
            raise
        self.returned = True
        return self.result


def through(run: Callable[..., Any], call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A door around a call of the loop's: runs it once, whatever happens to AMPscope, and returns what it returned.

    Args:
        run: AMPscope's own code, which is given the call and its arguments.
        call: The loop's.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        BaseException: What the call raises; and what comes from outside.
    """
    users, is_working = _UsersCall(call), here.working
    here.doors += 1
    try:
        return run(users, args, kwargs)
    except BaseException as error:
        if is_working or id(error) == users.error:
            raise
        _caught(error, users.error)
    finally:
        here.doors -= 1
        if here.broken_off and not here.doors:
            _interrupted()
    return users.result if users.returned else call(*args, **kwargs)


def tell(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A door for what the loop only tells of: returns what ``run`` returned, and None after a fault.

    Raises:
        BaseException: What comes from outside.
    """
    is_working = here.working
    here.doors += 1
    try:
        return run(*args, **kwargs)
    except BaseException as error:
        if is_working:
            raise
        _caught(error)
    finally:
        here.doors -= 1
        if here.broken_off and not here.doors:
            _interrupted()
    return None


def told_by_hook(run: Callable[..., None]) -> Callable[..., None]:
    """A hook on the calls of all modules, as a door; where Dynamo traces these calls nothing is behind it."""

    def hook(*call: Any) -> None:
        if not torch.compiler.is_compiling():
            tell(run, *call)

    hook.ampscope_heard = True  # type: ignore[attr-defined]  # functions take any
    return hook


#: In place of what a function returned that has not run.
NOT_RUN: Any = object()


def left(error: BaseException) -> None:
    """A mode's handler is left by an exception; as a door, for what is called so often that it has none.

    The handler calls the loop's function as ``func(*args, **kwargs)``, and nothing else in this way.

    Raises:
        BaseException: It is the loop's: that function has raised it, or it comes from outside.
    """
    if here.working:
        raise error
    try:
        is_loops = _is_of_call(error)
    except Exception:  # noqa: BLE001  # where it cannot be told, the loop's own must not be lost
        is_loops = True
    if not is_loops:
        _caught(error)
    else:
        if not here.doors and not _is_fault(error):
            _interrupted()
        raise error


def _is_of_call(error: BaseException) -> bool:
    """Whether an exception has come out of a call with all arguments as they were, in the file that caught it."""
    trace = error.__traceback__
    home = trace.tb_frame.f_code.co_filename if trace is not None else ""
    while trace is not None and (code := trace.tb_frame.f_code).co_filename == home:
        if dis.opname[code.co_code[trace.tb_lasti]] == "CALL_FUNCTION_EX":
            return True
        trace = trace.tb_next
    return False


def _interrupted() -> None:
    here.working = here.broken_off = False
    for scope in _all_behind():
        with Suppressed():
            scope.interrupted()


def _caught(error: BaseException, users: int = 0) -> None:
    """An exception that is not of the loop's own call.

    Raises:
        BaseException: It is the user's all the same; or that call had raised one, which AMPscope was to hear of.
    """
    if isinstance(error, RunOverError):
        return
    if not _is_fault(error):
        if here.doors <= 1 or here.working:
            _interrupted()
        else:  # in the midst of a call of the loop's, which is followed until the loop has left it, or caught this
            here.broken_off = True
        raise error
    here.working = False
    for scope in _all_behind():
        scope.failed(error)
    earlier = error.__context__
    while earlier is not None:
        if id(earlier) == users:
            raise earlier
        earlier = earlier.__context__
