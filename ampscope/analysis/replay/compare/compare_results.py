"""The results of a comparison, and its sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ampscope.analysis.results import SourceLine
from ampscope.analysis.words import listed, op_in_words
from ampscope.notebook_repr import NotebookRepr
from ampscope.numerals import number
from ampscope.trace.schema import ENTRY_NODES

#: Version of the JSON object that ``ampscope compare --json`` prints.
JSON_SCHEMA = 1


class Likeness(StrEnum):
    """How two runs or steps compare."""

    IDENTICAL = "identical"  #: to the last bit, as far as it was measured, and by the same ops
    WITHIN_TOLERANCE = "within_tolerance"  #: something was changed, or bits differ, and no number is out of tolerance
    DIFFERENT = "different"


class DifferenceKind(StrEnum):
    """Names the kinds of differences."""

    OP = "op"  #: another op runs there, or none
    MODULE = "module"  #: one has a module that the other lacks
    RENAMED = "renamed"
    MICRO_BATCHES = "micro_batches"  #: how many make a step
    RECOMPUTE = "recompute"  #: forward runs again in backward, as activation checkpointing does
    SCALAR = "scalar"  #: an argument that is no tensor: an eps, a probability, a literal
    OPERANDS = "operands"  #: the op reads something else
    DTYPE = "dtype"
    CAST = "cast"
    SHAPE = "shape"
    LINE = "line"  #: the same op stands in another line of code
    WEIGHTS = "weights"  #: what the step found in parameters and buffers
    BATCH = "batch"  #: what came into the step from outside
    RANDOM = "random"  #: random numbers that it drew
    SEED = "seed"  #: several of these, as another seed makes
    SCALE = "scale"  #: the loss scale
    LEARNING_RATE = "lr"
    OPTIMIZER = "optimizer"  #: the same gradients made other weights
    VALUE = "value"  #: the same op gave something else
    NONFINITE = "nonfinite"  #: it is finite in one and not in the other
    RANGE = "range"  #: magnitudes moved
    VERDICT = "verdict"  #: of the diagnoses
    LOSS = "loss"
    GRAD_NORM = "grad_norm"
    SKIPS = "skips"
    STEPS = "steps"  #: how many were made
    NOT_COMPARED = "not_compared"  #: ops of an optimizer's steps, for want of a step that both traced
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that differs, in a sentence."""

    kind: DifferenceKind
    module: str = ""  #: where, by the name it has in the first; the first of several
    text: str
    score: float  #: how much it matters, 0 to 100
    step: int | None = None  #: of the first
    op: str = ""
    source: SourceLine | None = None
    other_source: SourceLine | None = None  #: in the second, where that is another
    modules: tuple[str, ...] = ()  #: all of them
    count: int = 1  #: in how many places
    optimizer: int | None = None  #: whose step it is; None where it is of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first op, in order of execution, with which the numbers part beyond tolerance."""

    step: int
    op: str
    module: str
    source: SourceLine | None
    error: float | None  #: relative to the largest magnitude; None where it is not a matter of more or less
    tolerance: float
    rank: int = 0
    other_step: int = 0  #: in the second
    seq: int | None = None  #: in the first; None for what is not there
    optimizer: int = 0  #: whose step it is
    other_seq: int | None = None  #: in the second
    traced: str = ""  #: which execution of the first was compared, a `Source`; empty where curves alone tell
    other_traced: str = ""
    #: what stands where the other has another kind of number, finite or not; empty where both are finite
    unlike: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two."""

    path: str
    name: str
    rank: int
    step: int | None = None  #: asked for; None for the run
    steps: int = 0  #: of all optimizers
    verdict: str = ""
    model: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(NotebookRepr):
    """The whole comparison; differences by what matters most."""

    schema: int = JSON_SCHEMA
    likeness: Likeness
    identical: bool  #: to the last bit, as far as it was measured
    summary: str
    first_divergence: Divergence | None
    differences: tuple[Difference, ...] = ()
    a: Side
    b: Side
    traced: int = 0  #: steps, of all optimizers, of which both have a trace
    compared: int = 0  #: of these, those whose ops were compared; the others have the same numbers, or come later
    tolerance: float | None = None  #: as asked for; None where each op's dtypes gave it


#: Names that a sentence lists one by one.
LISTED = 3
#: Digits that tell any two float64 apart.
_EXACT = 17


def ops_listed(ops: Iterable[str]) -> str:
    """``mm, add and a cast``; each with how often it is there, as in ``3 add``."""
    names: dict[str, int] = {}
    for op in ops:
        word = op_in_words(op)
        names[word] = names.get(word, 0) + 1
    told = [name if count == 1 else f"{count:,} {_plural(name)}" for name, count in names.items()]
    return listed(told, LISTED, "kind of op")


def _plural(name: str) -> str:
    """``casts`` for ``a cast``; the name of an op has none."""
    article, _, noun = name.partition(" ")
    return f"{noun}s" if noun and article in ("a", "an") else name


def place(module: str) -> str:
    """``in blocks.0``, or where code outside every module runs."""
    return f"in {module}" if module else "outside the modules"


def places(modules: Sequence[str]) -> str:
    """``in a, b and 3 more modules``."""
    named = [each or "the code outside the modules" for each in modules]
    return f"in {listed(named, LISTED, 'module')}"


def numbers(one: float, other: float) -> tuple[str, str]:
    """Two numbers, with as many digits as show that they differ."""
    shown = ((number(one, digits), number(other, digits)) for digits in range(4, _EXACT))
    return next((texts for texts in shown if texts[0] != texts[1]), (number(one, _EXACT), number(other, _EXACT)))


def unlike_in_words(found: Divergence) -> str:
    """``NaN in A, 3.13 in B``; empty where the numbers that part are both finite, or not known."""
    return ", ".join(f"{number(value)} in {side}" for value, side in zip(found.unlike, "AB", strict=False))


def parted_in_words(found: Divergence) -> str:
    """States in a sentence where the numbers part."""
    steps = f"step {found.step:,}" + (f" (step {found.other_step:,} in B)" if found.other_step != found.step else "")
    steps += f" of optimizer {found.optimizer}" if found.optimizer else ""
    if not found.op:
        return f"The curves part at {steps}; no trace that both have tells with which op."
    what = f"with {op_in_words(found.op)} {place(found.module)}"
    if found.op in ENTRY_NODES:
        what = f"with {op_in_words(found.op)} {place(found.module)}, before anything is computed"
    apart = f": {number(found.error)} of the largest magnitude apart" if found.error is not None else ""
    if found.error is not None and math.isinf(found.error):
        apart = f": {unlike_in_words(found) or 'not finite in one of them'}"
    alone = ", which A alone runs" if found.other_seq is None else ", which B alone runs" if found.seq is None else ""
    return f"The numbers part at {steps} {what}{alone if found.traced else ''}{apart}."
