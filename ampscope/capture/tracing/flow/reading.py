"""Finds out which outputs of the step an op reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ampscope.capture.tracing.executions import Made
from ampscope.capture.tracing.flow.dataflow import Dataflow
from ampscope.capture.tracing.flow.outputs import Outputs
from ampscope.capture.tracing.operators import Operator
from ampscope.trace.schema import Node


class Reading:
    """Follows the operands of ops; what comes from outside the step becomes one of its outputs when first read.

    Args:
        outputs: The outputs of the step.
        dataflow: Who wrote what.
        number: Numbers the site of a value from outside.
    """

    def __init__(self, outputs: Outputs, dataflow: Dataflow, number: Callable[[Node, str, Tensor], int]) -> None:
        self._outputs = outputs
        self._dataflow = dataflow
        self._number = number

    def writers(self, operator: Operator, operands: list[Tensor]) -> list[int]:
        """The outputs that an op's operands are."""
        known, late, found = self._dataflow.written, self._outputs.late, []
        writer: int | None
        for operand in operands:
            if late or operand.layout is not torch.strided:
                writer = self.writer(operand, operator)
            else:
                writer = known.get(operand.untyped_storage()._cdata)
                if writer is None:
                    writer = self._from_outside(operand, operator)
            found.append(writer)
        return found

    def writer(self, operand: Tensor, operator: Operator) -> int:
        """The output that an operand is."""
        if operand.layout is not torch.strided:  # opaque: nobody knows who wrote it, nor what is in it
            return self._enter(Node.INPUT, f"an operand of {operator.name}", operand, all_bits=False)
        self._outputs.is_read(operand)
        writer = self._dataflow.writer(operand)
        return self._from_outside(operand, operator) if writer is None else writer

    def _from_outside(self, operand: Tensor, operator: Operator) -> int:
        """The output that an operand becomes which is there for the first time."""
        node, name = self._dataflow.entry(operand) or (Node.INPUT, f"an operand of {operator.name}")
        writer = self._enter(node, name, operand, all_bits=True)
        self._dataflow.wrote(writer, [operand])
        if node is not Node.PARAMETER:
            self._outputs.entered(len(self._outputs.ops) - 1, operand)
        return writer

    def sink(self, tensor: Tensor, number: Callable[[], int], *, always: bool) -> None:
        """The step leaves a value that matters.

        Args:
            tensor: The value, as it is `stored`.
            number: Numbers its site.
            always: Note it, with every statistic, also where no op of the step wrote it.
        """
        writer = self._dataflow.writer(tensor) if tensor.layout is torch.strided else None
        if writer is None and not always:
            return
        self._outputs.is_read(tensor)
        edges = ((0, False),) if writer is not None else ()
        self._outputs.add(Made(number(), (tensor.numel(),), edges), [tensor], chosen=always, given=writer)
        if writer is not None:
            self._dataflow.look_at_parts([tensor], [writer], ())
            self._dataflow.read_from.append(writer)

    def _enter(self, node: Node, name: str, operand: Tensor, *, all_bits: bool) -> int:
        """Notes a value from outside; returns its number among the outputs."""
        made = Made(self._number(node, name, operand), (operand.numel(),))
        return self._outputs.add(made, [operand], all_bits=all_bits)
