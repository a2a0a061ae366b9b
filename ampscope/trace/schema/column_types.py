"""The types of a trace's columns: annotations of the row types, and the Arrow types that they stand for."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any

import pyarrow as pa

Int16 = Annotated[int, pa.int16()]
Int32 = Annotated[int, pa.int32()]
Float32 = Annotated[float, pa.float32()]
Texts = Annotated[tuple[str, ...], pa.list_(pa.string())]
Magnitudes = Annotated[tuple[float, ...], pa.list_(pa.float32())]
Counts = Annotated[tuple[int, ...], pa.list_(pa.int64())]
LineNumbers = Annotated[tuple[int, ...], pa.list_(pa.int32())]

_PLAIN_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


def arrow_field(name: str, annotation: Any) -> pa.Field:
    """The Arrow field of a column that is annotated so; ``X | None`` makes it nullable."""
    nullable = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (arg for arg in typing.get_args(annotation) if arg is not types.NoneType)
        nullable = True
    if typing.get_origin(annotation) is Annotated:
        return pa.field(name, annotation.__metadata__[0], nullable)
    return pa.field(name, _PLAIN_TYPES[annotation], nullable)
