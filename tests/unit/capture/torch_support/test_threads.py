"""What a thread replaces in torch is its own, and two threads that do so may end in any order."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ampscope.capture.changes import replay_change
from ampscope.capture.hooks import compiled_modules
from ampscope.capture.tape import tape_entry
from ampscope.capture.torch_support.backward_call import active_in_engine
from ampscope.capture.torch_support.threads import HomeThread, PerThread, Together

Context = contextlib.AbstractContextManager[Any]


def leave(context: Context) -> None:
    context.__exit__(None, None, None)


class Worker:
    """A thread that does one thing after another, each when it is told to; the test waits for each."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def do(self, call: Callable[[], Any]) -> Any:
        return self._pool.submit(call).result(timeout=60)

    def end(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    workers = [Worker(), Worker()]
    yield workers
    for worker in workers:
        worker.end()


class Seen(TorchFunctionMode):
    """Passes everything on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_float32() -> Context:
    return replay_change._autocast_in({torch.float16: torch.float32})


def in_engine() -> Context:
    return active_in_engine(Seen())


def eager() -> Context:
    return compiled_modules.all_eager()


def patched() -> list[Any]:
    return [
        torch.set_autocast_enabled,
        torch.set_autocast_dtype,
        vars(torch.autograd)["_engine_run_backward"],
        torch._dynamo.eval_frame._stance.stance,
    ]


@pytest.mark.parametrize("make", [in_float32, in_engine, eager])
@pytest.mark.parametrize("first_out", [0, 1])
def test_two_replays_leave_torch_as_it_was(make: Callable[[], Context], first_out: int, workers: list[Worker]) -> None:
    import torch._dynamo  # noqa: F401  # `all_eager` asks whether it is loaded

    before = patched()
    contexts = [make(), make()]
    for worker, context in zip(workers, contexts, strict=True):
        worker.do(context.__enter__)
    assert patched() != before
    for each in (first_out, 1 - first_out):
        workers[each].do(partial(leave, contexts[each]))
    assert patched() == before


def dtype_under_autocast() -> torch.dtype:
    with torch.autocast("cpu", dtype=torch.float16):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def dtype_recomputed() -> torch.dtype:
    """That of a product that a checkpoint makes once more, in backward."""
    seen = []

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.append((x @ x).dtype)
        return x @ x

    with torch.autocast("cpu", dtype=torch.float16):
        made = torch.utils.checkpoint.checkpoint(product, torch.ones(2, 2, requires_grad=True), use_reentrant=False)
    made.sum().backward()
    assert len(seen) == 2
    return seen[1]


@pytest.mark.parametrize("ask", [dtype_under_autocast, dtype_recomputed])
def test_the_autocast_of_a_replay_is_that_of_its_thread(ask: Callable[[], torch.dtype], workers: list[Worker]) -> None:
    replaying, training = workers
    context = in_float32()
    replaying.do(context.__enter__)
    assert replaying.do(ask) is torch.float32
    assert training.do(ask) is torch.float16
    replaying.do(partial(leave, context))
    assert replaying.do(ask) is torch.float16


def test_the_engine_runs_under_the_mode_of_its_thread_only(workers: list[Worker]) -> None:
    def modes_in_backward() -> int:
        seen = []
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda _: seen.append(torch._C._len_torch_function_stack()))
        (x * 2).sum().backward()
        return int(seen[0])

    context = in_engine()
    workers[0].do(context.__enter__)
    assert [worker.do(modes_in_backward) for worker in workers] == [1, 0]
    workers[0].do(partial(leave, context))
    assert [worker.do(modes_in_backward) for worker in workers] == [0, 0]


class TestPerThread:
    def test_the_latest_of_a_thread_is_called_and_the_one_before_comes_back(self) -> None:
        home = SimpleNamespace(name=lambda: "torch")
        function = PerThread(home, "name")
        with function.replaced(lambda original: lambda: original() + " once"):
            with function.replaced(lambda original: lambda: original() + " twice"):
                assert home.name() == "torch once twice"
            assert home.name() == "torch once"
        assert home.name() == "torch"

    def test_what_somebody_puts_around_it_stays_and_works(self) -> None:
        home = SimpleNamespace(name=lambda: "torch")
        function = PerThread(home, "name")
        with function.replaced(lambda _: lambda: "ours"):
            inner = home.name
            home.name = theirs = lambda: inner() + " wrapped"
            assert home.name() == "ours wrapped"
        assert home.name is theirs
        assert home.name() == "torch wrapped"

    def test_an_exception_ends_it(self) -> None:
        home = SimpleNamespace(name=(original := lambda: "torch"))
        with contextlib.suppress(ValueError), PerThread(home, "name").replaced(lambda _: lambda: "ours"):
            raise ValueError
        assert home.name is original


def test_a_context_of_all_threads_is_entered_once(workers: list[Worker]) -> None:
    seen = []

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        seen.append("in")
        yield
        seen.append("out")

    together = Together(noted)
    for worker in workers:
        worker.do(together.__enter__)
    workers[0].do(together.__exit__)
    assert seen == ["in"]
    workers[1].do(together.__exit__)
    assert seen == ["in", "out"]


def test_a_flag_that_two_replays_set_is_as_it_was(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    home = SimpleNamespace(flag=False)
    monkeypatch.setitem(sys.modules, "a_framework", home)
    contexts = [tape_entry.flags_set((tape_entry.Flag("a_framework", "flag"),)) for _ in workers]
    for worker, context in zip(workers, contexts, strict=True):
        worker.do(context.__enter__)
    assert home.flag
    for worker, context in zip(workers, contexts, strict=True):
        worker.do(partial(leave, context))
    assert not home.flag


class TestHomeThread:
    def test_it_is_where_a_model_is_first_called(self, workers: list[Worker]) -> None:
        home = HomeThread()
        assert workers[0].do(home.is_entered)
        assert (home.is_elsewhere, home.goes_on_elsewhere, home.is_entered()) == (True, True, False)
        assert not workers[0].do(lambda: home.is_elsewhere)

    def test_a_call_that_trains_nothing_chooses_none(self, workers: list[Worker]) -> None:
        home = HomeThread()
        with torch.no_grad():
            assert home.is_entered()
        assert workers[0].do(home.is_entered)
        assert home.is_elsewhere

    def test_another_thread_takes_over_once_it_has_ended(self) -> None:
        home = HomeThread()
        thread = threading.Thread(target=home.is_entered)
        thread.start()
        thread.join()
        assert (home.goes_on_elsewhere, home.is_entered(), home.is_elsewhere) == (False, True, False)
