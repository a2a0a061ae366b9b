"""Causes from outside the step's arithmetic: what came in non-finite, and what does not repeat in a replay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.cause_entry import CauseEntry, Match, Occurrence, OpRule, Reason, Turn
from ampscope.analysis.causes.state import TurnedBad
from ampscope.analysis.op_facts import Executed
from ampscope.analysis.results import Remedy
from ampscope.analysis.words import op_in_words
from ampscope.trace.evidence import RaisedError
from ampscope.trace.schema import Node
from ampscope.trace.vocabulary import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class CameIn(Reason):
    """A value that the step was given was not finite."""

    name: str  #: of the input, parameter or buffer
    carried: bool = False  #: it is a tensor that the loop carries from step to step
    rows: tuple[int, ...] = ()  #: the indices of an input's first dimension that held it, as far as they are known
    at_start: bool = False  #: in the first step of the run, or the first after it was resumed
    finite_at: int | None = None  #: the last step whose forward left it finite, where that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class FromOthers(Reason):
    """A value was finite when it was sent to other ranks, and what came back was not."""

    ranks: int | None  #: that took part; None where the trace does not say
    sender: int | None  #: the rank that sent it; None where several may have
    sums: bool  #: values of several ranks were put together by a reduction that may leave the dtype's range
    dtype: str
    unseen: bool = False  #: the result went on through code that the trace did not see

    @staticmethod
    def of(op: Executed, *, unseen: bool = False) -> FromOthers:
        """Returns what the trace says of an op that communicates."""
        size, reduction = op.scalars.get("group_size"), op.scalars.get("reduce")
        return FromOthers(
            ranks=size if isinstance(size, int) else None,
            sender=None if unseen else _sender(op),
            sums=reduction is not None and reduction not in ("min", "max"),
            dtype=op.dtype,
            unseen=unseen,
        )

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States what was sent, and from whom the value came."""
        through = occurrence.op_in_words
        sent = f"What this rank gave into {through} was finite, and what it got back was not"
        if self.unseen:
            sent = f"What {through} gave back went on through code that the trace does not see, and was not finite"
            sent += " after it"
        if self.sender is not None:
            return f"{sent}: it came from rank {self.sender}."
        who = f"another of the {self.ranks} ranks" if self.ranks is not None else "another rank"
        together = f", or what they put together left the range of {self.dtype}" if self.sums else ""
        return f"{sent}: it came from {who}{together}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised(Reason):
    """A call ended with an error."""

    call: RaisedError

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States what was raised, and why the optimizer had nothing to step, where that was seen."""
        call = self.call
        said = (f"{call.error}: {call.message}" if call.message else call.error).rstrip(".")
        told = f"{occurrence.op_in_words} raised {said}" if occurrence.op else f"{said} was raised"
        return f"{told}, and no step came after it.{self._without_gradient if call.parameters else ''}"

    @property
    def _without_gradient(self) -> str:
        held = self.call.parameters
        if self.call.frozen == held:
            why = "all of them have requires_grad=False"
        elif self.call.foreign == held:
            why = "they are no parameters of the watched model, but of another one, or of a copy"
        else:
            why = "the backward of this step did not reach them, or the loop cleared them after it"
        return f" None of the {held:,} parameters that the optimizer steps has a gradient: {why}."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSince(Reason):
    """A value was finite when it was written, and was not when it was read."""

    written_by: str  #: the op that wrote it, or a `Node`
    seen_in: str  #: the op that read it

    def explanation(self, _: Occurrence, /) -> str:
        """States that something outside torch changed the value between two ops."""
        return f"{self.in_words}: something outside torch changed it."

    @property
    def in_words(self) -> str:
        """States which op wrote the value finite, and which op read it non-finite."""
        gave, read = op_in_words(self.written_by), op_in_words(self.seen_in)
        return f"What {gave} gave was finite, yet {read} read a non-finite value there"


def _enters(node: Node, cause: Cause) -> OpRule:
    def match(op: Executed) -> Match | None:
        came = CameIn(name=op.site.name, carried=node is Node.CARRIED)
        return Match(cause, came) if op.site.op == node else None

    return OpRule(Turn.ENTRY, match, by_operands=False)


def _received(op: Executed) -> Match | None:
    return Match(Cause.RECEIVED, FromOthers.of(op)) if op.communicates else None


def _sender(op: Executed) -> int | None:
    """The rank whose value it is: where one rank sends to all, or each fills an output of its own."""
    root, own = op.scalars.get("root"), op.scalars.get("rank")
    if isinstance(root, int):
        return root
    size, outputs = op.scalars.get("group_size"), len(op.site.out_dtypes)
    if op.name != "allgather" or size != outputs or op.result.out == own:
        return None
    ranks = op.scalars.get("ranks")
    return ranks[op.result.out] if isinstance(ranks, list) else op.result.out


def _name(occurrence: Occurrence, otherwise: str) -> str:
    return occurrence.reason.name if isinstance(occurrence.reason, CameIn) else otherwise


def _bad_input(occurrence: Occurrence) -> str:
    if _is_carried(occurrence):
        return "A tensor that the loop carries from step to step was not finite when the step read it: it is no batch."
    text = f"{_name(occurrence, 'An input')} held non-finite values before the model touched it"
    reason = occurrence.reason
    if isinstance(reason, CameIn) and reason.rows:
        return f"{text}, at index {', '.join(map(str, reason.rows))} of its first dimension."
    return f"{text}."


def left_it_finite(step: int) -> str:
    """States until when a value was seen finite, as a clause."""
    return f"The forward of step {step:,} left it finite"


def _bad_state(kind: str, occurrence: Occurrence) -> str:
    """States that a parameter or buffer was not finite when the step first read it; since when is not known.

    Before the first step nothing was trained: then it was created or loaded so, or written by code that was not seen.
    """
    if isinstance(occurrence.reason, TurnedBad):
        return occurrence.reason.in_words
    name = _name(occurrence, "")
    found = f"{kind} {name} was not finite when the step first read it" if name else f"{kind} was not finite"
    if not isinstance(occurrence.reason, CameIn) or not occurrence.reason.at_start:
        text = f"{'The' if name else 'A'} {found}, and no op of the step that was seen had written it."
        known = occurrence.reason.finite_at if isinstance(occurrence.reason, CameIn) else None
        since = "it was cast, loaded or written after that, and before this step read it"
        return text if known is None else f"{text} {left_it_finite(known)}: {since}."
    return (
        f"{'The' if name else 'A'} {found}, and no step came before: it was created or loaded so, or written by code "
        "that was not seen."
    )


def _against_error(occurrence: Occurrence) -> tuple[Remedy, ...]:
    reason = occurrence.reason
    call = reason.call if isinstance(reason, Raised) else RaisedError()
    if call.parameters:
        text = "Step an optimizer only where its parameters had a part in the loss, and make it for those that train."
        code = "if any(p.grad is not None for p in model.parameters()):  # those of this optimizer\n"
        return (cause_entry.advice(cause_entry.RAISED, text, f"{code}    scaler.step(optimizer)"),)
    if _lacks_kernel(call.message):
        text = "Run the call in float32: torch has it in no half precision, with autocast or without."
        code = "with torch.autocast(device_type, enabled=False):\n    y = op(x.float())"
        return (cause_entry.advice(cause_entry.RAISED, text, code),)
    if any(word in call.message for word in ("dtype", "scalar type")):
        text = "Bring the operands to one dtype, or run the call under autocast."
        return (cause_entry.advice(cause_entry.RAISED, text, "y = op(x.to(w.dtype), w)"),)
    text = "Mend the call that the error names; by itself it says nothing against the steps before."
    return (cause_entry.advice(cause_entry.RAISED, text),)


def _lacks_kernel(message: str) -> bool:
    """Whether an error of torch's says that an op is not there for a half dtype, rather than that dtypes differ."""
    absent = "not implemented for" in message or "not supported" in message
    return absent and ("Half" in message or "BFloat16" in message)


def _is_carried(occurrence: Occurrence) -> bool:
    return isinstance(occurrence.reason, CameIn) and occurrence.reason.carried


def _clean_input(occurrence: Occurrence) -> tuple[Remedy, ...]:
    if not _is_carried(occurrence):
        text = "Find and clean the samples before they reach the model."
        return (cause_entry.advice(cause_entry.BATCH, text, "assert x.isfinite().all(), 'non-finite batch'"),)
    keep = "Write into it only what is finite, in a dtype that holds it."
    anew = "Start it anew, or restore it from before it went bad; later steps do not mend it."
    code = "if value.isfinite().all():\n    state.copy_(value)"
    return cause_entry.advice(cause_entry.BEFORE, keep, code), cause_entry.advice(cause_entry.BEFORE, anew)


def _clean_weight(occurrence: Occurrence) -> tuple[Remedy, ...]:
    find = "bad = [name for name, p in model.named_parameters() if not p.isfinite().all()]"
    if _at_start(occurrence):
        text = "Look at how the weights are initialised or loaded: check them before the first step."
        return (cause_entry.advice(cause_entry.BEFORE, text, f"{find}\nassert not bad, bad"),)
    back = f"Go back to {cause_entry.CHECKPOINT}; what is not finite does not train any more."
    text = "Find what wrote it: check the weights after the optimizer, and after every line that writes into them."
    advice = cause_entry.advice(cause_entry.BEFORE, text, f"{find}\nassert not bad, bad")
    return cause_entry.advice(cause_entry.BEFORE, back), advice


def _clean_buffer(occurrence: Occurrence) -> tuple[Remedy, ...]:
    buffer = _name(occurrence, "buffer").rpartition(".")[2]
    code = f"if value.isfinite().all():\n    self.{buffer}.copy_(value)" if buffer.isidentifier() else ""
    keep = cause_entry.advice(cause_entry.BEFORE, "Keep non-finite values out of it where it is written.", code)
    text = f"Go back to {cause_entry.CHECKPOINT}, or write it anew."
    if _at_start(occurrence):
        text = "Look at how the buffer is created or loaded: it was not finite from the start."
    return cause_entry.advice(cause_entry.BEFORE, text), keep


def _at_start(occurrence: Occurrence) -> bool:
    return isinstance(occurrence.reason, CameIn) and occurrence.reason.at_start


ENTRIES = (
    CauseEntry(
        cause=Cause.BAD_INPUT,
        noun="a batch that was already bad",
        sentence=_bad_input,
        remedies=_clean_input,
        rules=(_enters(Node.INPUT, Cause.BAD_INPUT), _enters(Node.CARRIED, Cause.BAD_INPUT)),
    ),
    CauseEntry(
        cause=Cause.BAD_WEIGHT,
        noun="a weight that was already bad",
        sentence=partial(_bad_state, "parameter"),
        remedies=_clean_weight,
        rules=(_enters(Node.PARAMETER, Cause.BAD_WEIGHT),),
    ),
    CauseEntry(
        cause=Cause.BAD_BUFFER,
        noun="a buffer that was already bad",
        sentence=partial(_bad_state, "buffer"),
        remedies=_clean_buffer,
        rules=(_enters(Node.BUFFER, Cause.BAD_BUFFER),),
    ),
    CauseEntry(
        cause=Cause.RECEIVED,
        noun="a value received from another rank",
        sentence="What is not finite came from another rank, through {op}.",
        remedies=(
            cause_entry.advice(cause_entry.RANKS, "Look at the same step on the other ranks: on one of them it began."),
        ),
        rules=(OpRule(Turn.ENTRY, _received, by_operands=False),),
        cured_by_precision=False,
    ),
    CauseEntry(
        cause=Cause.EXCEPTION,
        noun="an error that ended the run",
        sentence="A call raised an error, and no step came after it.",
        remedies=_against_error,
        recognised_in="analysis.diagnosis.context",
        cured_by_precision=False,
    ),
    CauseEntry(
        cause=Cause.HARDWARE_TRANSIENT,
        noun="a fault that does not repeat",
        sentence=(
            "Up to {op} the step was the same to the last bit when it was run again, its inputs, weights and random "
            "numbers too; only what became of this op's result was another, and finite."
        ),
        remedies=(
            Remedy(
                text="The same calls on the same values are finite when run again: suspect the device, its memory "
                "or driver, or code that writes into tensors behind torch's back.",
                untried=cause_entry.OUTSIDE,
            ),
        ),
        recognised_in="analysis.causes.recognition",
        cured_by_precision=False,
    ),
    CauseEntry(
        cause=Cause.COMPILED_ONLY,
        noun="compiled code that computes otherwise than eager code",
        sentence=(
            "torch.compile is in use, and the same calls on the same values came out finite when they were run again "
            "as eager code: the compiled code computes otherwise, or the fault does not repeat."
        ),
        remedies=(
            Remedy(
                text="Train some steps without compiled code, on the same batches: if they stay finite, the compiler's "
                "output is to blame.",
                code='torch.compiler.set_stance("force_eager")',
                untried=cause_entry.COMPILED,
            ),
            Remedy(
                text="Have inductor round to half precision where eager code does.",
                code="torch._inductor.config.emulate_precision_casts = True",
                untried=cause_entry.COMPILED,
            ),
        ),
        recognised_in="analysis.diagnosis.context",
        cured_by_precision=False,
    ),
)
