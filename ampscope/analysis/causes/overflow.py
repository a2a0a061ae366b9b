"""Causes in which a number is too large for its dtype: a result, a constant, a scaled gradient."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis import rounding
from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.cause_entry import (
    USE_BFLOAT16,
    CauseEntry,
    Match,
    Occurrence,
    OpRule,
    Reason,
    Turn,
    more_range,
)
from ampscope.analysis.op_facts import Executed
from ampscope.analysis.results import Remedy, SourceLine
from ampscope.analysis.words import listed
from ampscope.numerals import number
from ampscope.provenance import harmless_births
from ampscope.trace.dtypes import FINFO, FLOAT8
from ampscope.trace.schema import Change, Form, Phase
from ampscope.trace.vocabulary import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal(Reason):
    """A constant of the code does not fit the dtype of its op."""

    value: float
    dtype: str
    refused: bool = False  #: torch raised, rather than make an infinity of it

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States which constant does not fit which dtype."""
        refused = f", and {occurrence.op_in_words} refuses it with an error" if self.refused else ""
        return f"The constant {number(self.value)} does not fit {self.dtype}{refused}."


def _literal(op: Executed) -> Match | None:
    value = op.literal_too_large
    return Match(Cause.LITERAL_OVERFLOW, Literal(value=value, dtype=op.dtype)) if value is not None else None


def _lowest_of_dtype(occurrence: Occurrence) -> tuple[Remedy, ...]:
    reason = occurrence.reason
    fits = f"; {number(reason.value)} does not fit {reason.dtype}" if isinstance(reason, Literal) else ""
    end, name = ("largest", "max") if isinstance(reason, Literal) and reason.value > 0 else ("lowest", "min")
    code = f"value = torch.finfo(x.dtype).{name}"
    text = f"Use the {end} value of the dtype in use{fits}."
    return (cause_entry.advice(cause_entry.TURN, text, code, Form.CONSTANT),)


# -- a result ---------------------------------------------------------------------------------------------------------


_FORWARD = (Phase.FORWARD, Phase.LOSS)
#: How ops begin that solve or factorise matrices.
_SOLVES = ("linalg", "_linalg", "cholesky", "lu_", "_lu_", "triangular_solve", "inverse", "pinverse")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflowed(Reason):
    """A result left the range of its dtype."""

    dtype: str
    largest: float | None  #: largest magnitude among the operands; None where none was measured
    likewise: tuple[SourceLine, ...] = ()  #: other lines of the step at which the same op leaves the range

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States where the dtype ends, and how large the operands were; magnitudes are recorded in float32."""
        end = FLOAT8.get(self.dtype) or rounding.LARGEST[self.dtype]
        text = f"The result of {occurrence.op_in_words} is too large for {self.dtype}, which ends at {number(end)}"
        if self.largest is None:
            return f"{text}."
        more = " or more" if self.largest >= rounding.LARGEST["float32"] else ""
        return f"{text}; its operands went up to {number(self.largest)}{more}."


def overflowed(op: Executed) -> Overflowed | None:
    """Returns the reason for a result beyond the range of its dtype, where no earlier rule has named a cause.

    The op is a sum, a product or a power; a NaN counts too, as inf - inf inside a sum of products. Ops that solve or
    factorise a matrix do not count: a matrix without an inverse gives the same.
    """
    foreign = op.gives_nan and not op.site.op.startswith("aten.")
    solves = "norm" not in op.name and op.name.startswith(_SOLVES)
    if op.dtype not in rounding.LARGEST or foreign or solves or (op.gives_nan and _divides_complex(op)):
        return None
    return Overflowed(dtype=op.dtype, largest=op.largest_operand, likewise=_likewise(op))


def _likewise(op: Executed) -> tuple[SourceLine, ...]:
    """The other lines of the forward at which the same op makes what is not finite of what is, and that matters."""
    graph, here = op.graph, SourceLine.of(op.graph.place(op.seq))
    same = [seq for seq in graph.outputs if graph.site(seq).op == op.site.op and graph.site(seq).phase in _FORWARD]
    born = [seq for seq in same if graph.bad_output(seq) is not None and not graph.bad_inputs(seq)]
    harmless = {birth.seq for birth in harmless_births(graph)} if len(born) > 1 else set()
    lines = dict.fromkeys(SourceLine.of(graph.place(seq)) for seq in born if seq not in harmless)
    return tuple(line for line in lines if line is not None and line != here)


def _divides_complex(op: Executed) -> bool:
    """Whether it is a quotient of complex numbers, which squares the divisor on its way: that may vanish, too."""
    return op.is_complex and op.name in ("div", "true_divide", "reciprocal")


def _float16_overflow(op: Executed) -> Match | None:
    found = overflowed(op)
    return Match(Cause.FP16_OVERFLOW, found) if found is not None and found.dtype == "float16" else None


def _float8_overflow(op: Executed) -> Match | None:
    """A cast to 8 bits of what is larger than they hold: some of these dtypes have NaN for it, others infinity."""
    largest, end = op.largest_operand, FLOAT8.get(op.dtype)
    if op.name not in ("_to_copy", "copy") or end is None or largest is None or largest <= end:
        return None
    return Match(Cause.FP16_OVERFLOW, Overflowed(dtype=op.dtype, largest=largest))


#: Products of two tensors of the same rank, as of queries and keys; those with a bias or a vector are none.
_PRODUCTS = frozenset({"mm", "bmm", "matmul", "baddbmm"})


def _everywhere(occurrence: Occurrence) -> str:
    """Names the other lines at which the same op leaves the range, to be put at the end of a sentence."""
    reason = occurrence.reason
    lines = reason.likewise if isinstance(reason, Overflowed) else ()
    places = [f"{line.file}:{line.line}" for line in lines]
    return f", also at {listed(places)}" if places else ""


#: When a call is tried in float32 alone, where the code converts nothing to half precision itself.
_ONE_CALL = (
    "a replay tries one call in float32 where it is no module of torch's, the products that read its result hold it, "
    "and nothing has cured the step before"
)
_SCALE_BEFORE_CAST = Remedy(
    text="Scale the tensor into the range of the 8-bit dtype before the cast, by what it holds at this step.",
    code="scale = torch.finfo(dtype).max / x.abs().amax()\ny = (x * scale).to(dtype)",
    untried=cause_entry.MEANING,
)


def _against_overflow(occurrence: Occurrence) -> tuple[Remedy, ...]:
    if isinstance(occurrence.reason, Overflowed) and occurrence.reason.dtype in FLOAT8:
        return (_SCALE_BEFORE_CAST,)
    found = []
    one_call = cause_entry.CONVERTED if occurrence.has_tried(Change.CONVERSIONS) else _ONE_CALL
    if occurrence.op_in_words in _PRODUCTS:
        found.append(
            Remedy(
                text="If this is a product of queries and keys, scale one side before the product, not after it.",
                code="logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)",
                kind=Form.SCALE_FIRST,
                untried="a replay tries it where all that reads the product multiplies it by a number below 1",
            )
        )
    if any(word in occurrence.op for word in ("pow", "square", "norm", "mul")):
        text = f"Square and average in float32{_everywhere(occurrence)}."
        found.append(cause_entry.advice(one_call, text, "h = x.float().pow(2)", Form.IN_FLOAT32))
    if any(word in occurrence.op for word in ("sum", "cumsum", "mean")):
        code, text = "total = x.sum(dtype=torch.float32)", f"Accumulate in float32{_everywhere(occurrence)}."
        found.append(cause_entry.advice(one_call, text, code, Form.IN_FLOAT32))
    return (*found, *more_range(occurrence))


# -- a result in a dtype of float32's range ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGrew(Reason):
    """The loss had grown over the steps before."""

    usual: float  #: what it was: the median
    last: float

    def explanation(self, _: Occurrence, /) -> str:
        """States from what to what the loss had grown."""
        return (
            f"The loss had grown from about {number(self.usual)} to {number(self.last)} in the steps before, until "
            "the values no longer fit their dtype."
        )


def _diverged(op: Executed) -> Match | None:
    found = overflowed(op)
    return Match(Cause.DIVERGENCE, found) if found is not None and found.dtype != "float16" else None


#: Why no smaller step of the optimizer was tried: later the weights from before it are gone.
_NOT_SEEN = "it is tried before the weights move, on a step whose loss is ten times what it was; none was seen"


def _against_growth(occurrence: Occurrence) -> tuple[Remedy, ...]:
    """A smaller learning rate helps where training has made the values grow, and was seen to."""
    if not isinstance(occurrence.reason, LossGrew):
        where = f"what {occurrence.op_in_words} is given" if occurrence.op else "the operands"
        return (
            Remedy(
                text=f"Bound {where}, or use a form of the same that cannot leave the range (as log_softmax for the "
                "logarithm of a softmax).",
                code="y = torch.exp(x.clamp(max=80.0))  # an example: float32 holds e**88",
                kind=Form.OPERAND_BOUND,
                untried="a replay bounds what exp, exp2 and expm1 are given, where the code calls them by name",
            ),
        )
    return (
        Remedy(
            text="Lower the learning rate, or warm it up; the run leaves every dtype's range.",
            kind=Form.SMALLER_STEP,
            untried=_NOT_SEEN,
        ),
        Remedy(
            text="Clip the gradient's norm, after unscaling.",
            code="scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            kind=Form.CLIPPED,
            untried=_NOT_SEEN,
        ),
    )


# -- a scaled gradient ------------------------------------------------------------------------------------------------


#: What is said where nothing tells whether the loss is large: a condition, and what to do if it holds.
SMALLER_LOSS = Remedy(
    text="If the loss is a sum or has a large weight, bring it to an ordinary size: its gradient is larger by as much.",
    code="loss = loss / loss_weight",
    untried=cause_entry.MEANING,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleInLoop(Reason):
    """The loop itself multiplies a float16 tensor by the loss scale."""

    scale: float

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States which scale the loop multiplies by, and where float16 ends."""
        return (
            f"The loop multiplies by the loss scale, {number(self.scale)}, in {occurrence.op_in_words}, and float16 "
            f"ends at {number(FINFO['float16'].max)}."
        )

    @property
    def cure(self) -> Remedy:
        """Returns the remedy: multiply by the scale in float32, or start with one that float16 holds."""
        text = (
            "Multiply by the scale in float32, or start with one that float16 holds, and divide the gradients by it "
            "before they enter a loss."
        )
        return cause_entry.advice(cause_entry.ORDER, text, "scaled = loss.float() * scaler.get_scale()")


def _scaled_gradient(op: Executed) -> Match | None:
    return Match(Cause.SCALE_OVERFLOW) if op.dtype == "float16" and op.depends_on_gradient else None


def _against_scale(occurrence: Occurrence) -> tuple[Remedy, ...]:
    """A smaller loss is the cure where no scale helped; where none was tried, a smaller scale may be."""
    if isinstance(occurrence.reason, ScaleInLoop):
        return (occurrence.reason.cure,)
    if occurrence.has_tried(Change.SCALE):
        return (SMALLER_LOSS, USE_BFLOAT16)
    text, code = "Start with a smaller loss scale, so that fewer steps are lost.", "GradScaler(init_scale=2.0**8)"
    lower = cause_entry.advice(cause_entry.TURN, text, f"scaler = torch.amp.{code}", Change.SCALE)
    return (lower, SMALLER_LOSS, USE_BFLOAT16)


# -- the entries ------------------------------------------------------------------------------------------------------

ENTRIES = (
    CauseEntry(
        cause=Cause.FP16_OVERFLOW,
        noun="a value too large for float16",
        sentence="The result of {op} is too large for float16, which ends at 65,504.",
        remedies=_against_overflow,
        rules=(OpRule(Turn.OVERFLOW, _float16_overflow), OpRule(Turn.OVERFLOW, _float8_overflow)),
        cured_by_precision=True,
    ),
    CauseEntry(
        cause=Cause.DIVERGENCE,
        noun="values that outgrow their dtype",
        sentence="The result of {op} is too large for its dtype.",
        remedies=_against_growth,
        rules=(OpRule(Turn.OVERFLOW, _diverged),),
        cured_by_precision=False,
    ),
    CauseEntry(
        cause=Cause.SCALE_OVERFLOW,
        noun="a loss scale that is too large",
        sentence="The gradient times the loss scale is too large for float16 in {op}.",
        remedies=_against_scale,
        rules=(OpRule(Turn.SCALED_GRADIENT, _scaled_gradient, Phase.BACKWARD),),
    ),
    CauseEntry(
        cause=Cause.LITERAL_OVERFLOW,
        noun="a constant that does not fit the dtype",
        sentence="A constant does not fit its dtype.",
        remedies=_lowest_of_dtype,
        rules=(OpRule(Turn.LITERAL, _literal, by_operands=False),),
        cured_by_precision=True,
    ),
)
