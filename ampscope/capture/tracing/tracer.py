"""Observes every op of one step, real or replayed: dtypes, dataflow and statistics, without keeping a tensor."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.dynamo import OwnMode
from ampscope.capture.torch_support.guard import NOT_RUN, Guard, left, surely
from ampscope.capture.torch_support.modes import Pause
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.torch_support.tensor_tree import inner_tensors
from ampscope.capture.tracing import op_points, operators, traced_rows
from ampscope.capture.tracing.batch_rows import BatchRows, bad_rows
from ampscope.capture.tracing.dataflow import Dataflow, Reading, StepOutputs
from ampscope.capture.tracing.executions import Call, Made, Ran
from ampscope.capture.tracing.light_statistics import Slots, stored
from ampscope.capture.tracing.op_points import OpPoints, Within
from ampscope.capture.tracing.operand_keeper import ExecutedCall, OpListener
from ampscope.capture.tracing.operators import Operator, RunningCollective
from ampscope.capture.tracing.places import Places
from ampscope.capture.tracing.running_code import FunctionWatch, ModuleStack
from ampscope.capture.tracing.sampled_shapes import Given
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.traced_rows import BadFlow, TraceLayout
from ampscope.trace.files.arrow_arrays import ColumnBlock
from ampscope.trace.schema import EdgeRow, Node, OpRow

_PLAIN = frozenset({Tensor, nn.Parameter})
#: Of the numbers that a view may be given in place of the tensors that they are, the dtypes.
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class Tracer(OwnMode):
    """A dispatch mode that sees the ops of one step, numbers them and hands them to the parts that know what to record.

    Args:
        sites: Numbers the program points.
        module_names: Qualified names of the watched modules by ``id``.
        full: Take every statistic (replays) instead of min and max without a sync (the real step).
        guard: Catches faults of the tracer itself.
        stops: Code objects at which the search for the user's line ends.
        pause: The switch of the run, where the step is the loop's and not a replay.
        slots: Where min and max are written; None for new ones.
    """

    def __init__(
        self,
        sites: Sites,
        module_names: dict[int, str],
        *,
        full: bool,
        guard: Guard,
        stops: tuple[CodeType, ...] = (),
        pause: Pause | None = None,
        slots: Slots | None = None,
    ) -> None:
        super().__init__()
        self.backward_varies = False  #: a gradient of this step would be rounded otherwise under this mode
        self._in_replay = pause is None
        self.pause = pause or Pause()  #: on while AMPscope's own code computes
        self.bad_rows: dict[str, list[int]] = {}  #: of each input that is not finite, where; in replays
        self.batch: BatchRows | None = None  #: compares the rows of the batch, where asked to
        self.keeper: OpListener | None = None  #: is told of each op with its operands, where asked to
        self.places = Places(sites, stops)
        self.functions = FunctionWatch(self.places, guard)
        self._guard = guard
        self._modules = ModuleStack(module_names, self, self.functions)
        self.points = OpPoints(sites, self.places, self.functions, self._modules)
        self.outputs = StepOutputs(full=full, slots=slots)
        self._dataflow = Dataflow(self.outputs.measure if full else None)
        self._reading = Reading(self.outputs, self._dataflow, self.points.number_entry)
        self._one_at_a_time = threading.RLock()  # the engine has a thread for each device

    # -- being active -------------------------------------------------------------------------------------------

    def insert(self) -> None:
        """Starts observing, below any mode the user has entered."""
        self._modules.insert()

    def remove(self) -> None:
        """Stops observing; safe to call twice."""
        surely(self._modules.remove)

    @contextlib.contextmanager
    def active(self) -> Iterator[Tracer]:
        """Observes the body.

        Raises:
            Exception: What kept the tracer from being inserted, which its guard has told of: where the body is the
                user's own code, its errors are expected and tell nobody.
        """
        try:
            try:
                self.insert()
            except Exception:
                with self._guard:
                    raise
                raise
            yield self
        finally:
            surely(self.remove)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Leaves the body out: AMPscope's own work within the step."""
        before, self.pause.on = self.pause.on, True
        try:
            yield
        finally:
            self.pause.on = before

    @property
    def handling(self) -> bool:
        """Whether an op or a function is in progress, for which torch has taken a mode off its stack by itself."""
        return bool(self.functions.handling)

    # -- what comes from outside, what matters at the end -------------------------------------------------------

    def name_entry(self, tensor: Tensor, node: Node, name: str) -> None:
        """Tells where a tensor that no op of the step wrote comes from."""
        held = [] if type(tensor) in _PLAIN else inner_tensors(tensor)
        for each in held or [stored(local(tensor))]:
            if each.layout is torch.strided:
                self._dataflow.name_entry(each, node, name)
                if self.outputs.full and node is Node.INPUT and not tensor.is_nested:
                    self._note_rows(each, name)

    def _note_rows(self, tensor: Tensor, name: str) -> None:
        with self.unseen():
            rows = bad_rows(tensor)
        if self.batch is not None:
            self.batch.given(name, tensor)
        if rows:
            self.bad_rows.setdefault(name, rows)

    def sink(self, tensor: Tensor, node: Node, name: str, module: str = "", *, always: bool = False) -> None:
        """Marks where a walk back to an origin starts; ``always``: even if no op wrote it, with every statistic."""
        tensor = stored(local(tensor))
        with self._one_at_a_time:
            point = op_points.of_sink(node, name, module, tensor)
            self._reading.sink(tensor, lambda: self.points.sites.number(point), always=always)

    # -- every op -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: C901  # one frame for every op
        kwargs = kwargs or {}
        if not _PLAIN.issuperset(types):
            if self.pause.on or torch_private.are_fake(types):  # another tracer may be at work below this one
                return func(*args, **kwargs)
            self.functions.unwraps = True
            return NotImplemented  # a wrapper subclass: its inner ops come by again
        operator, guard = operators.described.get(id(func)) or operators.describe(func), self._guard
        number_as = _NUMBERS.get(type(args[0])) if operator.passes_through and args else None
        if number_as is not None:  # where torch prints a constant
            args = (torch.scalar_tensor(args[0], dtype=number_as), *args[1:])
        captured = self.pause.cuda and self.pause.captures()
        unseen = self.pause.on or guard.broken or captured
        if unseen or (not operator.passes_through and torch_private.records_calls()):
            return operator.call(*args, **kwargs)
        result, places = NOT_RUN, self.places
        self.functions.handling += 1
        try:
            if operator.communicates:
                return self._exchange(operator, func, args, kwargs)
            if self.outputs.late and self._is_arrival(operator, args):
                return func(*args, **kwargs)
            if operator.writes:
                with guard:
                    self._before_writing(operator, args, kwargs)
            result = operator.call(*args, **kwargs)
            if not guard.broken:
                try:  # and not the guard around it: this is done for every op
                    number = torch_private.next_sequence_number()
                    makes = number != places.forward.last or threading.get_ident() != places.thread
                    makes = makes or bool(places.marked.unread)
                    if not operator.passes_through or (makes and not torch_private.records_calls()):
                        node = torch_private.current_backward_node()
                        caller = sys._getframe().f_back if node is not None else None  # none on a thread of autograd's
                        note = self._note_past_modes if self._in_replay else self._note
                        with self._one_at_a_time:
                            note(operator, (args, kwargs), result, number if makes else None, (node, caller))
                except BaseException:
                    with guard:
                        raise
        except BaseException as error:  # noqa: BLE001  # a door
            left(error)
        finally:
            self.functions.handling -= 1
        return operator.call(*args, **kwargs) if result is NOT_RUN else result

    def _exchange(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an op that communicates, and notes it from outside: what it sent, and what came when that is read."""
        exchange, sent, looked_at = None, [], []
        with self._guard:
            exchange = RunningCollective(operator, args, kwargs)
            sent = exchange.sent
            with self._one_at_a_time:
                looked_at = [(self._reading.writer(tensor, operator), self.outputs.measure(tensor)) for tensor in sent]
        result = func(*args, **kwargs)
        if exchange is None or self._guard.broken:
            return result
        with self._guard:
            received = exchange.received(result)
            if received:
                with self._one_at_a_time:
                    self._note_exchange(operator, exchange, (args, kwargs), looked_at, received)
        return result

    def _note_exchange(
        self,
        operator: Operator,
        exchange: RunningCollective,
        call: Call,
        looked_at: list[tuple[int, int | None]],
        received: list[Tensor],
    ) -> None:
        now, sites = self.points.now(torch_private.current_backward_node(), None), self.points.sites
        point = self.points.of_op(operator, now, call, exchange.sent, received)
        site, numels = sites.number(point._replace(scalars=exchange.facts)), [each.numel() for each in received]
        edges = tuple([(arg, False) for arg in range(len(looked_at))])
        first = self.outputs.add_late(Made(site, tuple(numels), edges), received)
        for writer, measurement in looked_at:
            self._dataflow.sent(writer, measurement)
        self._dataflow.wrote(first, received)

    def _is_arrival(self, operator: Operator, args: Any) -> bool:
        """Whether an op brings a collective's result, where a backend copies it from elsewhere when the loop waits."""
        if operator.name != "aten.copy_.default" or not self.outputs.is_awaited(args[0]):
            return False
        known = self._dataflow.writer(args[1]) is not None or self._dataflow.entry(args[1]) is not None
        return not known

    def _before_writing(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """Looks at tensors from outside that are about to be changed in place, while they still are as they came.

        Not what is given for ``out=``, or to draw numbers into: it may be memory without values, and nothing reads it.
        """
        if operator.passes_through or operator.draws:
            return
        for tensor in operators.written_tensors(operator, args, {}):
            self._reading.writer(stored(tensor), operator)
        if self.keeper is not None:
            self.keeper.before(operator, args, kwargs)

    def _note(self, operator: Operator, call: Call, result: Any, number: int | None, within: Within) -> None:
        """An op has run.

        Args:
            operator: The op.
            call: Its arguments.
            result: What it returned.
            number: That of the next autograd node; None where the op has made none, and is not followed.
            within: Where in a backward it was called.
        """
        made_node = number is not None and self.places.made_node(number)
        self.backward_varies |= operator.varies
        if operator.passes_through:
            if made_node:
                self.points.link_view(operator, *within)
        else:
            now = self.points.now(*within)
            if operator.writes or type(result) is not Tensor:
                results, written = operators.results(operator, *call, result)
            else:
                results, written = [result], []
            if results:
                ran = now.again(operator, call, results, written)
                ran = ran or self.points.ran(operator, now, call, results, written)
                if made_node:
                    self.points.link(now.phase, ran[0].site)
                self._record(operator, call, ran)
        if number is not None and self.places.follows:
            self.points.follow(operator, [*call[0], *call[1].values()], result)

    def _note_past_modes(self, *ran: Any) -> None:
        """Notes an op as `_note` does, where the modes of a replay need not see what is read and measured."""
        past_dispatch, past_functions = torch_private.past_modes()
        with past_dispatch, past_functions:
            self._note(*ran)

    def _record(self, operator: Operator, call: Call, ran: Ran) -> None:
        made, operands, results, overwritten = ran
        outputs, dataflow, writers = self.outputs, self._dataflow, self._reading.writers(operator, operands)
        given = Given(operator, *call, alone=len(results) == 1) if outputs.shapes is not None else None
        first = outputs.add(made, results, all_bits=operator.is_random, given=given)
        if outputs.full:
            dataflow.look_at_parts(operands, writers, overwritten)
        dataflow.read_from += writers
        dataflow.wrote(first, results)
        if operator.is_cast or not operands:
            point = len(outputs.ops) - 1, made.site
            outputs.distinct.ran(operator, point, operands, results[0], outputs.makers[writers[0]] if writers else None)
        if self.keeper is not None:
            executed = ExecutedCall(len(outputs.ops) - 1, made.site, operator, *call)
            self.keeper.after(executed, results, [outputs.makers[each] for each in writers])

    # -- handing over -------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Lets go of everything; the modes and their parts refer to each other, and would wait for the collector."""
        self.keeper = self.batch = None
        self.outputs.clear()
        self._dataflow.clear()
        self.places.clear()

    def bad_flow(self) -> BadFlow | None:
        """Gives the part of the step that bad values go through; None where there are none. Waits for the device."""
        return BadFlow.of(self.outputs, self._dataflow)

    def columns(
        self, step: int, source: str, layout: TraceLayout | None
    ) -> tuple[ColumnBlock, ColumnBlock, TraceLayout]:
        """The same as `rows`, as columns; with the layout that they have, which is often that of the step before."""
        layout = layout if layout is not None and layout.ops == self.outputs.ops else TraceLayout(self.outputs.ops)
        return *traced_rows.columns(self.outputs, self._dataflow, layout, step, source), layout

    def rows(self, step: int, source: str) -> tuple[list[OpRow], list[EdgeRow]]:
        """The trace's rows; waits for the device to have written the slots."""
        return traced_rows.rows(self.outputs, self._dataflow, step, source)
