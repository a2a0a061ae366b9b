"""Observes every op of one step, real or replayed: dtypes, dataflow and statistics, without keeping a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.hooks import process_hooks
from ampscope.capture.torch_support import call_state, torch_private
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.user_line import NOWHERE, Place, user_place
from ampscope.capture.tracing import operators
from ampscope.capture.tracing.operand_keeper import Executed, OperandKeeper
from ampscope.capture.tracing.operators import Operator
from ampscope.capture.tracing.sites import Point, Signature, Sites
from ampscope.capture.tracing.statistics import stats
from ampscope.capture.tracing.statistics.bad_rows import bad_rows
from ampscope.capture.tracing.statistics.full_statistics import Census
from ampscope.capture.tracing.statistics.stats import Slots
from ampscope.trace.schema import UNMEASURED, Cast, EdgeRow, Node, OpRow, Phase, Statistics

#: Frames below which code that runs in backward has no line of its own.
_BACKWARD = (process_hooks.backward_frame, Tensor.backward.__code__)
_PLAIN = frozenset({Tensor, nn.Parameter})
#: Modules that in evaluation choose one fused op, which computes otherwise while a mode is active: the tracer leaves
#: them alone. Source: the fast-path conditions in torch/nn/modules/transformer.py and activation.py.
_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class Output(NamedTuple):
    """One output of an executed op; ``stats`` is the number of its measurement, None where there is none."""

    seq: int
    out: int
    site: int
    micro_batch: int
    numel: int
    stats: int | None


class Edge(NamedTuple):
    """An operand and the op that last wrote it."""

    seq: int
    arg: int
    from_seq: int
    from_out: int
    in_place: bool
    stats: int | None  #: of the operand itself, where it is a part of what was written


class Writer(NamedTuple):
    """Who last wrote a storage."""

    seq: int
    out: int
    numel: int
    offset: int  #: where in the storage the written region begins, elements


class CommunicationError(RuntimeError):
    """A step that is run again was about to communicate, which the other ranks would take for a part of theirs."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """A dispatch mode that records the ops of one step.

    Args:
        sites: Numbers the program points.
        module_names: Qualified names of the watched modules by ``id``.
        full: Take every statistic (replays) instead of min and max without a sync (the real step).
        guard: Catches faults of the tracer itself.
        stops: Code objects at which the search for the user's line ends.
    """

    def __init__(
        self, sites: Sites, module_names: dict[int, str], *, full: bool, guard: Guard, stops: tuple[CodeType, ...] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.outputs: list[Output] = []
        self.edges: list[Edge] = []
        self.micro_batch = 0
        self.phase: Phase | None = None  #: set for a part of the step that the tracer cannot see by itself
        self.creates_graph = False
        self.backward_varies = False  #: a gradient of this step would be rounded otherwise under this mode
        self.paused = False  #: set while AMPscope's own code computes
        self.alone = False  #: set where no other rank does the same, in replays
        self.entry_place = NOWHERE  #: the user's line of the call being replayed
        self.bad_rows: dict[str, list[int]] = {}  #: of each input that is not finite, where; in replays
        self.keeper: OperandKeeper | None = None  #: holds operands of this step, where asked to
        self._sites = sites
        self._module_names = module_names
        self._full = full
        self.guard = guard
        self.stops = stops
        self._slots: Slots | Census = Census() if full else Slots()
        self._seq = 0
        self._site = 0  #: of the op noted last
        self._modules: list[str | None] = []  # qualified names; None in a module that nobody watches
        self._writers: dict[int, Writer] = {}
        self._storages: list[Any] = []
        self._entries: dict[int, tuple[Node, str]] = {}
        self._forward_of: dict[int, int] = {}  #: autograd sequence number -> site of the forward op
        self._last_number = -1
        self._functions = FunctionWatch(self)
        self.handling = 0  #: inside a handled op or function torch has taken the mode off the stack by itself
        self._hooks: list[Any] = []
        self._borrowed: int | None = None  # depth of the recomputed module at which functions are watched again
        self._aside = 0  # fused evaluation modules entered, during which nothing is observed
        self.function = ""
        self.place: Place | None = None
        self.region: torch.dtype | None = None

    # -- being active -------------------------------------------------------------------------------------------

    def insert(self) -> None:
        """Starts observing, below any mode the user has entered."""
        self._step_back()
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]

    def remove(self) -> None:
        """Stops observing; safe to call twice."""
        self._aside = 0
        self._step_aside()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._modules.clear()

    @contextlib.contextmanager
    def active(self) -> Iterator[Tracer]:
        """Observes the body."""
        try:
            self.insert()
            yield self
        finally:
            self.remove()

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._modules.append(self._module_names.get(id(module), self._modules[-1] if self._modules else None))
        if isinstance(module, _FAST_PATHS) and not module.training:
            self._step_aside()
            self._aside += 1
        elif self._borrowed is None and torch_private.current_backward_node() is not None:
            self._borrow(len(self._modules))

    def _leave_module(self, module: nn.Module, _args: Any, _result: Any) -> None:
        if self._borrowed == len(self._modules):
            torch_private.remove_function_mode(self._functions)
            self._borrowed = None
        if self._modules:
            self._modules.pop()
        if isinstance(module, _FAST_PATHS) and not module.training and self._aside:
            self._aside -= 1
            self._step_back()

    def _borrow(self, depth: int) -> None:
        """Watches the functions of a module that is recomputed: backward itself has put the watch aside."""
        if self._functions not in torch_private.function_modes():
            torch_private.insert_function_mode(self._functions)
            self._borrowed = depth

    def _step_aside(self) -> None:
        """Leaves the stacks, outside of any op, until `_step_back`."""
        if not self._aside:
            torch_private.remove_dispatch_mode(self)
            torch_private.remove_function_mode(self._functions)

    def _step_back(self) -> None:
        if not self._aside:
            torch_private.insert_function_mode(self._functions)
            torch_private.insert_dispatch_mode(self)

    # -- what comes from outside, what matters at the end -------------------------------------------------------

    def name_entry(self, tensor: Tensor, node: Node, name: str) -> None:
        """Tells where a tensor that no op of the step wrote comes from."""
        if tensor.layout is torch.strided:
            self._entries.setdefault(self._key(tensor), (node, name))
            if self._full and node is Node.INPUT:
                self._note_rows(tensor, name)

    def _note_rows(self, tensor: Tensor, name: str) -> None:
        before, self.paused = self.paused, True
        rows = bad_rows(tensor)
        self.paused = before
        if rows:
            self.bad_rows.setdefault(name, rows)

    def sink(self, tensor: Tensor, node: Node, name: str, module: str = "") -> None:
        """Marks a tensor from which the walk back to an origin starts: a loss, a gradient, a buffer."""
        writer = self._writers.get(self._key(tensor)) if tensor.layout is torch.strided else None
        if writer is None:
            return
        inputs = Signature((tensor.dtype,), (tuple(tensor.shape),))
        seq = self._number(Point(node, module, "", NOWHERE, inputs, inputs, name=name))
        self._edge(seq, 0, writer, tensor, in_place=False)
        self._output(seq, 0, tensor)

    # -- every op -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _PLAIN.issuperset(types):
            return NotImplemented  # a wrapper subclass: its inner ops come by again
        kwargs = kwargs or {}
        operator = operators.describe(func)
        if self.alone and operator.communicates and torch.distributed.get_world_size() > 1:
            raise CommunicationError(f"the step communicates with other ranks ({operator.name}); a replay must not")
        if self.paused or self.guard.broken:
            return func(*args, **kwargs)
        self.handling += 1
        try:
            if operator.writes:
                with self.guard:
                    self._before_writing(operator, args, kwargs)
            result = func(*args, **kwargs)
            if not self.guard.broken:
                with self.guard:
                    self._note(operator, args, kwargs, result)
        finally:
            self.handling -= 1
        return result

    def _before_writing(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """What came from outside and is about to be overwritten is looked at while it still is as it came."""
        if operator.passes_through:
            return
        for tensor in operators.written_tensors(operator, args, kwargs):
            self._writer(tensor, operator)
        if self.keeper is not None:
            self.keeper.before(operator, args, kwargs)

    def _note(self, operator: Operator, args: Any, kwargs: Any, result: Any) -> None:
        number = torch_private.next_sequence_number() - 1
        made_node, self._last_number = number != self._last_number, number
        self.backward_varies |= operator.varies
        if operator.passes_through:
            return
        operands = operators.flat_tensors([*args, *kwargs.values()])
        results = operators.flat_tensors(result if isinstance(result, (tuple, list)) else (result,))
        written = operators.written_tensors(operator, args, kwargs) if operator.writes else []
        if written:
            known = {torch_private.storage_key(tensor) for tensor in results if tensor.layout is torch.strided}
            results += [each for each in written if not results or torch_private.storage_key(each) not in known]
        if not results:
            return
        point = self._point(operator, args, kwargs, operands, results)
        entries = [(i, operand, self._writer(operand, operator)) for i, operand in enumerate(operands)]
        seq = self._number(point, results)
        if made_node and point.phase not in (Phase.BACKWARD, Phase.OPTIMIZER):
            self._forward_of[number] = self._site
        overwritten = {id(tensor) for tensor in written}
        for i, operand, writer in entries:
            self._edge(seq, i, writer, operand, in_place=id(operand) in overwritten)
        self._own(seq, results)
        if self.keeper is not None:
            writers = [writer.seq for _, _, writer in entries if writer is not None]
            self.keeper.after(Executed(seq, self._site, operator, args, kwargs), results, writers)

    def _number(self, point: Point, results: list[Tensor] | None = None) -> int:
        seq, self._seq = self._seq, self._seq + 1
        site = self._sites.number(point)
        self._site = site
        for out, tensor in enumerate(results or ()):
            self._output(seq, out, tensor)
        return seq

    def _output(self, seq: int, out: int, tensor: Tensor) -> None:
        self.outputs.append(Output(seq, out, self._site, self.micro_batch, tensor.numel(), self._measure(tensor)))

    def _measure(self, tensor: Tensor) -> int | None:
        return self._slots.measure(tensor) if stats.measurable(tensor) else None

    def _own(self, seq: int, results: list[Tensor]) -> None:
        for out, tensor in enumerate(results):
            if tensor.layout is torch.strided:
                self._writers[self._key(tensor)] = Writer(seq, out, tensor.numel(), int(tensor.storage_offset()))

    def _key(self, tensor: Tensor) -> int:
        key = torch_private.storage_key(tensor)
        if key not in self._writers and key not in self._entries:
            self._storages.append(torch_private.storage_ref(tensor))
        return key

    def _writer(self, operand: Tensor, operator: Operator) -> Writer | None:
        """Who wrote an operand; what comes from outside the step gets a node of its own when first read."""
        if operand.layout is not torch.strided:
            return None
        key = self._key(operand)
        if key not in self._writers:
            node, name = self._entries.get(key, (Node.INPUT, f"an operand of {operator.name}"))
            signature = Signature((operand.dtype,), (tuple(operand.shape),))
            point = Point(node, self._module(), self._phase(), outputs=signature, name=name)
            self._own(self._number(point, [operand]), [operand])
        return self._writers[key]

    def _edge(self, seq: int, arg: int, writer: Writer | None, operand: Tensor, *, in_place: bool) -> None:
        if writer is None:
            return
        partial = (operand.numel(), operand.storage_offset()) != (writer.numel, writer.offset)
        own = self._measure(operand) if partial and self._full and not in_place else None
        self.edges.append(Edge(seq, arg, writer.seq, writer.out, in_place, own))

    # -- where and under what an op runs ------------------------------------------------------------------------

    def _module(self) -> str:
        return (self._modules[-1] if self._modules else None) or ""

    def _phase(self) -> Phase:
        if self.phase is not None:
            return self.phase
        if torch_private.current_backward_node() is not None:
            recomputing = torch.is_grad_enabled() and not self.creates_graph
            return Phase.RECOMPUTE if recomputing else Phase.BACKWARD
        return Phase.FORWARD if self._modules and self._modules[-1] is not None else Phase.LOSS

    def _place(self) -> Place:
        backward = torch_private.current_backward_node() is not None
        return self.place_now() if backward or self.place is None else self.place

    def place_now(self) -> Place:
        """The line of a torch function that is being called."""
        if torch_private.current_backward_node() is not None:
            return user_place(*self.stops, *_BACKWARD) or self._place_of_node()
        return user_place(*self.stops) or self.entry_place

    def _place_of_node(self) -> Place:
        """The line of the forward op whose gradient is being computed."""
        node = torch_private.current_backward_node()
        site = self._forward_of.get(torch_private.node_sequence_number(node)) if node is not None else None
        return self._sites.point(site).place if site is not None else self.entry_place

    def _point(
        self, operator: Operator, args: Any, kwargs: Any, operands: list[Tensor], results: list[Tensor]
    ) -> Point:
        phase = self._phase()
        module, place, grad_fn, forward_site = self._module(), NOWHERE, "", None
        if phase is Phase.BACKWARD:
            node = torch_private.current_backward_node()
            grad_fn = node.name() if node is not None else ""
            number = torch_private.node_sequence_number(node) if node is not None else -1
            forward_site = self._forward_of.get(number)
            if forward_site is not None:
                forward = self._sites.point(forward_site)
                module, place = forward.module, forward.place
        else:
            place = self._place()
        return Point(
            op=operator.name,
            module=module,
            phase=phase,
            place=place,
            inputs=_signature(operands),
            outputs=_signature(results),
            scalars=operators.scalar_arguments(operator, args, kwargs),
            autocast=self.region,
            cast=self._cast(operator, operands, results, forward_site),
            grad_fn=grad_fn,
            forward_site=forward_site,
        )

    def _cast(
        self, operator: Operator, operands: list[Tensor], results: list[Tensor], forward_site: int | None
    ) -> Cast:
        if not operator.is_cast or not operands or operands[0].dtype == results[0].dtype:
            return Cast.NONE
        if forward_site is not None and self._sites.point(forward_site).cast:
            return self._sites.point(forward_site).cast
        if self.function in operators.CONVERSIONS:
            return Cast.EXPLICIT
        ends = {operands[0].dtype, results[0].dtype}
        return Cast.AUTOCAST if self.region is not None and self.region in ends else Cast.PROMOTION

    # -- handing over -------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Lets go of everything; the modes and their watch refer to each other, and would wait for the collector."""
        self.outputs, self.edges, self.keeper = [], [], None
        self._slots = Slots()
        self._writers.clear()
        self._entries.clear()
        self._storages.clear()
        self._forward_of.clear()

    def all_finite(self) -> bool:
        """Whether no op of the step gave a non-finite value; waits for the device."""
        return all(measured.finite for measured in self._slots.read())

    def rows(self, step: int, source: str) -> tuple[list[OpRow], list[EdgeRow]]:
        """The trace's rows; waits for the device to have written the slots."""
        measured = self._slots.read()
        ops = [_op_row(step, source, o, measured[o.stats] if o.stats is not None else UNMEASURED) for o in self.outputs]
        edges = [_edge_row(step, source, e, measured[e.stats] if e.stats is not None else None) for e in self.edges]
        return ops, edges


def _op_row(step: int, source: str, output: Output, measured: Statistics) -> OpRow:
    return OpRow(step, source, output.seq, output.out, output.site, output.micro_batch, output.numel, measured)


def _edge_row(step: int, source: str, edge: Edge, own: Statistics | None) -> EdgeRow:
    low, high = (own.min, own.max) if own is not None else (None, None)
    return EdgeRow(step, source, *edge[:-1], own is not None, low, high)


def _signature(tensors: list[Tensor]) -> Signature:
    return Signature(tuple([t.dtype for t in tensors]), tuple([t.shape for t in tensors]))


class FunctionWatch(TorchFunctionMode):
    """Tells the tracer which torch function of the user's runs, from which line, under which autocast region."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer
        self._types = call_state.device_types()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer, kwargs = self._tracer, kwargs or {}
        before = (tracer.function, tracer.place, tracer.region, tracer.creates_graph)
        tracer.handling += 1
        try:
            self._note(func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            tracer.handling -= 1
            tracer.function, tracer.place, tracer.region, tracer.creates_graph = before

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        tracer = self._tracer
        if tracer.guard.broken:
            return
        with tracer.guard:
            tracer.function = getattr(func, "__name__", "")
            tracer.place = tracer.place_now()
            tracer.region = self._region()
            if func is torch.autograd.grad:
                tracer.creates_graph = bool(args[4] if len(args) > 4 else kwargs.get("create_graph"))

    def _region(self) -> torch.dtype | None:
        enabled = (kind for kind in reversed(self._types) if torch.is_autocast_enabled(kind))
        return next((torch.get_autocast_dtype(kind) for kind in enabled), None)
