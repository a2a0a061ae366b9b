"""``ampscope.keep_fp32``: named modules compute in float32 inside autocast, and nothing else changes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampscope
from ampscope.capture.keep_fp32 import in_float32
from ampscope.errors import KeepError
from ampscope.trace.schema import ReplayStatus, Table
from tests.support.training.small_loop import POISONED, make_scaler, poison
from tests.support.training.twin_runs import train_both

WIDTH = 8
HALF, FULL = torch.bfloat16, torch.float32  # bfloat16: its matrix products are quick on a CPU


class Attention(nn.Module):
    """Remembers in which dtypes it was called and computed."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = self.proj(x) * scale
        self.seen = [x.dtype, y.dtype]
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn(x))


class Net(nn.Module):
    """Two blocks behind a layer whose output autocast leaves in half precision."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.recompute = recompute  # None: no checkpointing; else whether it is the reentrant kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return x


def call(model: Callable[[Tensor], Tensor], x: Tensor | None = None) -> Tensor:
    with torch.autocast("cpu", dtype=HALF):
        return model(torch.ones(2, WIDTH) if x is None else x)


def attention_of(model: nn.Module, block: int) -> Attention:
    attention = model.get_submodule(f"blocks.{block}.attn")
    assert isinstance(attention, Attention)
    return attention


def dtypes(model: nn.Module) -> list[list[torch.dtype]]:
    """In what the blocks' attention was called and computed, in a fresh call."""
    call(model)
    return [attention_of(model, number).seen for number in range(2)]


KEPT, HALVED = [FULL, FULL], [HALF, HALF]


class TestWhatItDoes:
    def test_named_modules_compute_in_float32_and_others_as_before(self) -> None:
        model = Net()
        assert dtypes(model) == [HALVED, HALVED]
        ampscope.keep_fp32(model, ["blocks.1.attn"])
        assert dtypes(model) == [HALVED, KEPT]

    def test_removed_it_is_as_it_was(self) -> None:
        model = Net()
        before, attributes = call(model), [sorted(vars(module)) for module in model.modules()]
        handle = ampscope.keep_fp32(model, "blocks.*.attn")
        assert not torch.equal(call(model), before)
        handle.remove()
        handle.remove()
        assert torch.equal(call(model), before)
        assert [sorted(vars(module)) for module in model.modules()] == attributes

    def test_it_is_a_context_manager_that_ends_with_an_exception(self) -> None:
        model = Net()
        with pytest.raises(KeyError), ampscope.keep_fp32(model, ["blocks.0.attn"]) as kept:
            assert kept.names == ("blocks.0.attn",)
            assert dtypes(model) == [KEPT, HALVED]
            raise KeyError
        assert dtypes(model) == [HALVED, HALVED]

    def test_an_exception_inside_leaves_autocast_on(self) -> None:
        def fails(x: Tensor) -> Tensor:
            raise ValueError(str(x.dtype))

        with torch.autocast("cpu", dtype=HALF):
            with pytest.raises(ValueError, match=r"torch\.float32"):
                in_float32(fails)(torch.ones(1, dtype=HALF))
            assert torch.is_autocast_enabled("cpu")

    def test_autocast_and_gradient_mode_inside(self) -> None:
        def state() -> tuple[bool, bool]:
            return torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()

        with torch.autocast("cpu", dtype=HALF), torch.no_grad():
            assert in_float32(state)() == (False, False)

    def test_two_handles_hold_a_module_until_both_are_removed(self) -> None:
        model = Net()
        first = ampscope.keep_fp32(model, ["blocks.0.attn", "blocks.*.attn"])
        second = ampscope.keep_fp32(model, ["blocks.0"])
        third = ampscope.keep_fp32(model, ["blocks.0.attn"])
        first.remove()
        second.remove()
        assert dtypes(model) == [KEPT, HALVED]
        third.remove()
        assert dtypes(model) == [HALVED, HALVED]

    def test_a_forward_that_someone_else_has_put_in_is_kept(self) -> None:
        model = Net()
        attention = model.get_submodule("blocks.0.attn")
        plain = attention.forward
        attention.forward = lambda x: plain(x, scale=2.0)
        with ampscope.keep_fp32(model, ["blocks.0.attn"]):
            assert dtypes(model)[0] == KEPT
            inner = attention.forward
            attention.forward = lambda x: inner(x) + 1  # and one on top of ours
            outer = attention.forward
        assert attention.forward is outer
        assert dtypes(model)[0] == HALVED

    def test_outside_autocast_nothing_changes(self) -> None:
        model, x = Net(), torch.ones(2, WIDTH)
        before = model(x)
        ampscope.keep_fp32(model, [""])
        assert torch.equal(model(x), before)

    def test_the_model_itself_and_a_shared_module(self) -> None:
        model = Net()
        model.blocks[1].attn = model.blocks[0].attn
        handle = ampscope.keep_fp32(model, ["blocks.0.attn", "blocks.1.attn"])
        assert dtypes(model) == [KEPT, KEPT]
        handle.remove()
        with ampscope.keep_fp32(model, ""):
            assert call(model).dtype is FULL
        assert call(model).dtype is HALF


@dataclasses.dataclass
class Batch:
    x: Tensor
    name: str


Pair = namedtuple("Pair", "a b")


class TestArguments:
    @pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
    def test_half_tensors_come_in_as_float32_wherever_they_are(self, half: torch.dtype) -> None:
        h, ids = torch.ones(2, dtype=half), torch.arange(2)
        seen: list[Any] = []
        in_float32(lambda *args, **kwargs: seen.append((args, kwargs)))(
            h, [h, ids], (h, {"k": Pair(h, 3)}), Batch(h, "n"), OrderedDict(b=h), mask=h.bool(), bias=h
        )
        args, kwargs = seen[0]
        floats = [args[0], args[1][0], args[2][0], args[2][1]["k"].a, args[3].x, args[4]["b"], kwargs["bias"]]
        assert {each.dtype for each in floats} == {FULL}
        assert (args[1][1].dtype, kwargs["mask"].dtype) == (torch.int64, torch.bool)
        assert (args[2][1]["k"].b, args[3].name, type(args[4])) == (3, "n", OrderedDict)
        assert h.dtype is half

    def test_what_holds_no_half_tensor_goes_in_itself(self) -> None:
        cache, wide = {"keys": [torch.ones(2)]}, torch.ones(2, dtype=torch.float64)
        seen: list[Any] = []
        in_float32(lambda *args: seen.extend(args))(cache, wide)
        assert seen[0] is cache
        assert seen[1] is wide

    def test_gradients_flow_through_the_casts(self) -> None:
        x = torch.full((3,), 300.0, dtype=torch.float16, requires_grad=True)
        y = in_float32(lambda x: (x * x).sum() / 1000)(x)
        y.backward()
        assert y.item() == 270.0  # 90,000 past float16's largest, in between
        assert x.grad is not None
        assert x.grad.tolist() == pytest.approx([0.6] * 3, rel=1e-3)

    def test_the_signature_stays(self) -> None:
        model = Net()
        before = inspect.signature(attention_of(model, 0).forward)
        ampscope.keep_fp32(model, ["blocks.0.attn"])
        assert inspect.signature(attention_of(model, 0).forward) == before


class TestGoesWith:
    def test_class_and_state_stay(self) -> None:
        model = Net()
        state, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
        ampscope.keep_fp32(model, ["blocks.*.attn"])
        assert list(model.state_dict()) == state
        assert all(type(module) is kind for module, kind in zip(model.modules(), kinds, strict=True))

    def test_a_copy_keeps_its_own_modules(self) -> None:
        model = Net()
        handle = ampscope.keep_fp32(model, ["blocks.*.attn"])
        twin = copy.deepcopy(model)
        handle.remove()
        with torch.no_grad():
            attention_of(twin, 0).proj.weight.zero_()
        assert dtypes(twin) == [KEPT, KEPT]
        assert dtypes(model) == [HALVED, HALVED]
        assert attention_of(model, 0).proj.weight.any()

    def test_a_pickle_keeps_them_too(self) -> None:
        model = Net()
        ampscope.keep_fp32(model, ["blocks.1"])
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert dtypes(loaded) == [HALVED, KEPT]
        assert torch.equal(call(loaded), call(model))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing_recomputes_in_float32(self, reentrant: bool) -> None:
        torch.manual_seed(0)
        plain = Net()
        recomputing = copy.deepcopy(plain)
        recomputing.recompute = reentrant
        gradients = []
        for model in (plain, recomputing):
            ampscope.keep_fp32(model, ["blocks.*.attn"])
            call(model, torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
            assert attention_of(model, 0).seen == KEPT
            gradients.append([p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_compiled_code_follows(self, when: str) -> None:
        torch._dynamo.reset()
        model = Net()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        if when == "after":
            call(compiled)
        assert isinstance(compiled, nn.Module)
        handle = ampscope.keep_fp32(compiled, ["blocks.*.attn"])
        kept = call(compiled)
        assert torch.equal(kept, call(model))
        assert dtypes(model) == [KEPT, KEPT]
        handle.remove()
        assert torch.equal(call(compiled), call(model))
        assert not torch.equal(call(compiled), kept)
        torch._dynamo.reset()

    def test_names_within_a_distributed_model(self, tmp_path: Path) -> None:
        torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
        wrapped: nn.Module | None = None
        try:
            model = Net()
            wrapped = nn.parallel.DistributedDataParallel(model)
            with ampscope.keep_fp32(wrapped, ["blocks.0.attn", "module.blocks.1.attn"]):
                call(wrapped).sum().backward()
                assert [attention_of(model, number).seen for number in range(2)] == [KEPT, KEPT]
            assert model.stem.weight.grad is not None
        finally:
            wrapped = None  # what frees the group's threads holds Python's lock, for which one of them may wait
            torch.distributed.destroy_process_group()


class TestWatched:
    @pytest.mark.parametrize("first", ["kept", "watched"])
    def test_a_bad_step_replays_exactly(self, run_folder: Path, first: str) -> None:
        def loop(observe: Callable[..., object]) -> dict[str, Any]:
            model, scaler = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention()), make_scaler()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for act in ("kept", "watched") if first == "kept" else ("watched", "kept"):
                observe(model, scaler) if act == "watched" else ampscope.keep_fp32(model, ["1"])
            losses = []
            for step in range(5):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(torch.randn(4, WIDTH)).square().mean()
                poison(step, scaler.scale(loss)).backward()
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
            assert model[1].seen == KEPT
            return {"model": model, "scaler": scaler, "losses": losses}

        assert train_both(loop, run_folder).replay_of(POISONED) == (ReplayStatus.EXACT, "")

    def test_the_trace_shows_it(self, watch: Callable[..., Any]) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention())
        scope = watch(model, every=1)
        ampscope.keep_fp32(model, ["1"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        call(model).float().sum().backward()
        optimizer.step()
        scope.close()
        with ampscope.open_run(scope.folder) as run:
            forward = {row.module: row for row in run.rows(Table.SITES) if row.op == "aten.addmm.default"}
            casts = [row for row in run.rows(Table.SITES) if row.cast and row.module == "1" and row.phase == "forward"]
        assert (forward["0"].out_dtypes, forward["0"].autocast) == (("bfloat16",), "bfloat16")
        assert (forward["1.proj"].out_dtypes, forward["1.proj"].autocast) == (("float32",), "")
        assert [(row.out_dtypes, Path(row.file).name) for row in casts] == [(("float32",), Path(__file__).name)]


class TestErrors:
    @pytest.mark.parametrize(
        ("names", "said"),
        [
            (["blocks.3.attn"], r"no module 'blocks\.3\.attn'; near it: 'blocks\.\d\.attn', 'blocks\.\d\.attn'"),
            (["*.attn"], r"no module '\*\.attn'; near it"),
            (["zzz"], r"no module 'zzz'; model\.named_modules\(\) lists them"),
            (["blocks"], r"'blocks' is a ModuleList, which is never called; name what it holds: 'blocks\.\*'"),
            ([3], "names of modules, not int"),
        ],
    )
    def test_names_that_cannot_be(self, names: Any, said: str) -> None:
        model = Net()
        with pytest.raises(KeepError, match=said) as error:
            ampscope.keep_fp32(model, ["blocks.0.attn", *names])
        assert "\n" not in str(error.value)
        assert dtypes(model) == [HALVED, HALVED]

    def test_half_weights_are_refused(self) -> None:
        with pytest.raises(KeepError, match=r"'stem' holds float16 parameters \(weight\).*model\.float\(\)"):
            ampscope.keep_fp32(Net().half(), ["stem"])

    def test_what_is_no_model(self) -> None:
        with pytest.raises(KeepError, match=r"needs a torch\.nn\.Module, not dict"):
            ampscope.keep_fp32({}, ["stem"])  # type: ignore[arg-type]


class TestOutputs:
    def test_they_have_the_dtype_that_is_asked_for_inside_a_region_of_it(self) -> None:
        model = Net()
        ampscope.keep_fp32(model, ["blocks.0.attn"], outputs=HALF)
        assert dtypes(model)[0] == KEPT
        attention = attention_of(model, 0)
        x = torch.ones(2, WIDTH)
        with torch.autocast("cpu", dtype=HALF):
            assert attention(x).dtype is HALF
        assert attention(x).dtype is FULL
        with torch.autocast("cpu", dtype=torch.float16):
            assert attention(x).dtype is FULL

    def test_another_dtype_is_refused(self) -> None:
        with pytest.raises(KeepError, match="outputs="):
            ampscope.keep_fp32(Net(), ["stem"], outputs=torch.int8)
