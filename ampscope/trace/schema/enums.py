"""Defines the enumerations of a trace's columns, each value with its meaning."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

_Said = TypeVar("_Said", bound=StrEnum)


def said(kind: type[_Said], text: str, otherwise: _Said) -> _Said:
    """Returns the member for a column's text; ``otherwise`` for a text that no AMPscope has written."""
    return next((each for each in kind if each == text), otherwise)


class Phase(StrEnum):
    """The part of an optimizer step in which an op ran."""

    FORWARD = "forward"  #: inside a watched module
    LOSS = "loss"  #: outside every watched module, before backward
    BACKWARD = "backward"  #: inside ``backward``, on autograd's nodes
    RECOMPUTE = "recompute"  #: forward code run again inside backward by activation checkpointing
    OPTIMIZER = "optimizer"  #: inside ``optimizer.step``


class Node(StrEnum):
    """Pseudo-ops: where values enter a traced step and where they leave it (``sites.op``)."""

    INPUT = "input"  #: a tensor from outside the step: the batch, a target, a constant
    PARAMETER = "parameter"  #: a parameter as the step found it
    BUFFER = "buffer"  #: a buffer as the step found it
    CARRIED = "carried"  #: a tensor that the loop carries from step to step, as the step found it
    LOSS = "loss"  #: what backward was called on
    GRADIENT = "gradient"  #: a parameter's gradient as backward left it
    STATE_AFTER = "state_after"  #: what an optimizer keeps of a parameter, as its step left it
    WEIGHT_AFTER = "weight_after"  #: a parameter as the optimizer left it
    BUFFER_AFTER = "buffer_after"  #: a buffer as the step left it
    CARRIED_AFTER = "carried_after"  #: a carried tensor as the loop left it, in a step or after it


#: Nodes that no op of the step wrote.
ENTRY_NODES = frozenset({Node.INPUT, Node.PARAMETER, Node.BUFFER, Node.CARRIED})
#: Nodes from which the walk back to the origin starts.
SINK_NODES = frozenset(
    {Node.LOSS, Node.GRADIENT, Node.STATE_AFTER, Node.WEIGHT_AFTER, Node.BUFFER_AFTER, Node.CARRIED_AFTER}
)


#: Libraries of ops whose results depend on what other ranks do (what comes before the first dot of ``sites.op``).
COLLECTIVE_LIBRARIES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
)


class Cast(StrEnum):
    """Why an op that only changes the dtype ran."""

    NONE = ""  #: no cast, or one among other work
    AUTOCAST = "autocast"  #: inserted by autocast (or its mirror in backward)
    EXPLICIT = "explicit"  #: asked for by a conversion such as ``.float()``
    PROMOTION = "promotion"  #: type promotion between operands, or an op's own conversion


class Source(StrEnum):
    """The execution of a step that the op rows describe; see `source_of` for runs with several optimizers."""

    LIVE = "live"  #: the real step, as it ran
    REPLAY = "replay"  #: the faithful replay of the step
    WRITE = "write"  #: what the loop ran between two steps and left in a tensor that it carries, run again
    AUDIT = "audit"  #: the faithful replay of a healthy step, each op of which was measured (``audit_ops``)
    REPLAY_FP32 = "replay:fp32"  #: everything in float32; only extremes are measured, but of `Trigger.LOST_GRADIENT`


def source_of(execution: Source, optimizer: int) -> str:
    """Returns the value of ``source`` in the op rows of one optimizer's attempt.

    Every optimizer counts its own steps, so those of a GAN share their numbers: ``replay`` is that of the first
    optimizer, ``replay@1`` that of the second.
    """
    return f"{execution}@{optimizer}" if optimizer else str(execution)


def execution_of(source: str) -> tuple[str, str]:
    """The execution and the number of the optimizer, as text, that `source_of` put together; empty for the first."""
    execution, _, optimizer = source.partition("@")
    return execution, optimizer


class ReplayStatus(StrEnum):
    """How far the replay of an incident can be trusted."""

    EXACT = "exact"  #: it came out the same: what failed, and a few elements of what each call returned
    DIVERGED = "diverged"  #: it came out differently: ``incidents.replay_reason`` says in what
    NOT_REPRODUCED = "not_reproduced"  #: the same calls came out finite
    RECEIVED = "received"  #: this rank's own calculation came out finite when it was run again; what is not finite came
    #: from another rank through a collective, or out of the collective itself: ``incidents.replay_reason`` says which
    UNAVAILABLE = "unavailable"  #: the step could not be run again


class AuditStatus(StrEnum):
    """How far an audit came (``audits.status``)."""

    DONE = "done"  #: each op was measured, and compared with the same step in the reference dtype
    PARTIAL = "partial"  #: each op was measured; what it inherited, and the true error, are not known for ``reason``
    UNAVAILABLE = "unavailable"  #: the step could not be run again, for ``reason``


class Change(StrEnum):
    """The difference between a counterfactual replay and the real step (``replays.change``)."""

    NONE = "none"  #: nothing: the same once more
    FP32 = "fp32"  #: every half-precision computation in float32
    BF16 = "bf16"  #: bfloat16 in place of float16
    SCALE = "scale"  #: another loss scale
    MODULES_FP32 = "modules_fp32"  #: the named modules in float32, the rest as it was
    CONVERSIONS = "conversions"  #: float32 where the code itself converts to a half dtype, autocast as it was
    FORM = "form"  #: another form of one call of the user's code: ``replays.form``


class Form(StrEnum):
    """The form that a counterfactual replay put in the place of one call of the user's code (``replays.form``)."""

    OPERAND_BOUND = "operand_bound"  #: ``f(x.clamp(min=v))``, or ``max``
    ADDED_EPS = "added_eps"  #: ``f(x + v)``, ``a / (b + v)``
    CONSTANT = "constant"  #: another number in the place of one that the call was given
    LOG_SOFTMAX = "log_softmax"  #: the logarithm of a softmax, from the logits
    LOGSIGMOID = "logsigmoid"  #: the logarithm of a sigmoid, from the logits
    WITH_LOGITS = "with_logits"  #: binary cross-entropy of a sigmoid, from the logits
    CROSS_ENTROPY = "cross_entropy"  #: the negative log-likelihood of the logarithm of a softmax, from the logits
    LOGSUMEXP = "logsumexp"  #: the logarithm of a sum of exponentials, in one
    MAX_OFF = "max_off"  #: ``exp(x - x.max())``, where what comes of it is normalised
    SCALE_FIRST = "scale_first"  #: ``(a * s) @ b`` for ``(a @ b) * s``
    SAFE_WHERE = "safe_where"  #: the op on an operand that is safe where ``torch.where`` does not choose its result
    IN_FLOAT32 = "in_float32"  #: the call alone on float32 operands, outside of autocast
    CENTRED = "centred"  #: a variance from centred squares
    KEPT_ROWS = "kept_rows"  #: rows without a key are left out of the mask, and their result is zero
    ZERO_INFINITY = "zero_infinity"  #: a CTC loss that leaves out what has no alignment
    ROWS_LEFT_OUT = "rows_left_out"  #: the step without the rows of its batch that fail
    CLIPPED = "clipped"  #: the norm of the gradients bounded, in a step that would have made its loss grow
    SMALLER_STEP = "smaller_step"  #: a smaller learning rate, in such a step
    OPTIMIZER_EPS = "optimizer_eps"  #: the optimizer's step alone, with another eps
    OPTIMIZER_IN_FLOAT32 = "optimizer_in_float32"  #: the optimizer's step alone, on float32 copies of all that is half
    OPTIMIZER_CLIPPED = "optimizer_clipped"  #: the optimizer's step alone, with the norm of the gradients bounded


class Trial(StrEnum):
    """The outcome of a counterfactual replay (``replays.outcome``)."""

    FINITE = "finite"  #: it cures the step: loss and gradients were finite, lost no more, or agreed with float32
    NONFINITE = "nonfinite"  #: tried, and did not help
    UNAVAILABLE = "unavailable"  #: could not be run


class Trigger(StrEnum):
    """The observation that made a step an incident."""

    NONFINITE_GRADIENT = "nonfinite_gradient"  #: a gradient that is inf or NaN
    NONFINITE_LOSS = "nonfinite_loss"  #: a loss that is inf or NaN
    NONFINITE_WEIGHT = "nonfinite_weight"  #: a parameter that the optimizer made inf or NaN
    NONFINITE_BUFFER = "nonfinite_buffer"  #: a buffer that became inf or NaN
    NONFINITE_STATE = "nonfinite_state"  #: optimizer state, or a tensor that the loop carries, that became inf or NaN
    BUFFER_STANDS_STILL = "buffer_stands_still"  #: a buffer in half precision that float32 would move
    UPDATES_LOST = "updates_lost"  #: weights or optimizer state in half precision into which no update arrives
    NONFINITE_CARRIED = "nonfinite_carried"  #: a tensor that the loop carries from step to step became inf or NaN
    CARRIED_READ = "nonfinite_carried_read"  #: a step read such a tensor for the first time, and seems well
    EXCEPTION = "exception"  #: an error by which the loop left the step, and the run
    ABSORBED_OVERFLOW = "absorbed_overflow"  #: an inf that vanished again before loss and gradients
    INFORMATION_LOST = "information_lost"  #: a cast to half precision that made few values of many
    LOST_GRADIENT = "lost_gradient"  #: gradients that miss a part of what the same step has in float32


class StateKind(StrEnum):
    """The kind of a tensor that outlives a step (in the evidence of an incident)."""

    WEIGHT = "weight"  #: a parameter that is trained
    BUFFER = "buffer"  #: a buffer of a watched model
    OPTIMIZER = "optimizer_state"  #: what an optimizer keeps of a parameter: a moment, a momentum
    CARRIED = "carried"  #: a tensor of the loop's own that one step leaves to the next
    SETTING = "setting"  #: a number of an optimizer's groups, as its learning rate


class Looked(StrEnum):
    """When in a step state was seen not to be finite (in the evidence of an incident)."""

    AFTER = "after"  #: after its optimizer had stepped
    BEFORE = "before"  #: as its optimizer was about to step
    FORESEEN = "foreseen"  #: on copies, on which its optimizer was stepped first


class ScalerAction(StrEnum):
    """An action of, or upon, a ``GradScaler`` (``scaler_events.action``)."""

    INIT = "init"  #: it came under watch
    GROWTH = "growth"  #: ``update()`` raised the scale after enough finite steps
    BACKOFF = "backoff"  #: ``update()`` lowered the scale after a gradient that was not finite
    SKIP = "skip"  #: ``step()`` left the optimizer's step out
    UNSCALE = "unscale"  #: ``unscale_()``, called by the loop
    UPDATE = "update"  #: ``update(new_scale)`` by hand
    STATE_SAVED = "state_saved"  #: ``state_dict()``
    STATE_LOADED = "state_loaded"  #: ``load_state_dict()``
    SETTER = "setter"  #: ``set_growth_factor`` and its kin; ``detail`` says which


class EventKind(StrEnum):
    """Annotations on a run's time line (``events.kind``)."""

    START = "start"  #: the run began
    RESUME = "resume"  #: a further segment began
    TRACED = "traced"  #: op rows of a step were written
    NOTE = "note"  #: what the loop said with ``scope.note``, or AMPscope noted
    WARNING = "warning"  #: a part of AMPscope switched itself off
    CLOSE = "close"  #: the segment was closed
    UNSEEN = "unseen"  #: steps were made, and no call of a watched model has been seen in this segment
    SEEN = "seen"  #: one was, after all
    CURE = "cure"  #: what healing has changed of the training (``heal=True``); JSON: ``kind`` (a `CureKind`),
    #: ``modules``, ``text``, ``code`` (what makes it permanent), ``optimizer``, ``applied`` (the step's own gradients
    #: were replaced), ``lost`` (why not, in words), ``at_once`` (it holds for the step itself)
    CURE_LIFTED = "cure_lifted"  #: such a change was taken back; JSON: ``kind``, ``modules``, ``cure`` (the step at
    #: which it had been made), ``text``
    SAVED = "saved"  #: a file was written that holds state of the run; JSON: its absolute ``path``, what it ``holds``
    #: (``weights``, ``optimizer``) and of which of these the ``whole``, ``after`` (by number of the optimizer the last
    #: step made before; -1: none), and ``open`` where another step was in progress
    SPIKE = "spike"  #: a loss or gradient norm far out of its band; JSON: ``optimizer``, what is ``out`` (``value``,
    #: ``usual``, ``highest`` and number of ``steps`` of its band), the ``parameters`` with the largest gradients and
    #: their shares, the few ``rows`` that make the gradient, rows of ``inputs`` that stand out, ``replay``


class CureKind(StrEnum):
    """The change that healing may make to a training (``kind`` of a ``cure`` event)."""

    MODULES_FP32 = "modules_fp32"  #: the named modules run in float32 from the next step on
    CONVERSIONS = "conversions"  #: the named modules get float32 where they ask for a half dtype by name
    FORM = "form"  #: one call in the named modules, or the loss code, has another form; an optimizer has another eps
    LOSS_SCALE = "loss_scale"  #: the loss scale is held below the largest one that fits, or raised
    STATE = "state"  #: buffers, attributes hold their last finite values again; optimizer state others
    RUN_AGAIN = "run_again"  #: the gradients of the same step, run again: it had not gone wrong by its own
    WEIGHTS = "weights"  #: elements of weights that were not finite are zero
    ROWS_LEFT_OUT = "rows_left_out"  #: the gradients of the same step without the rows of its batch that are not finite
    LEFT_OUT = "left_out"  #: a step whose data or mathematics are at fault was left out, and the scale kept


#: Stands in ``replays.modules`` for the code outside every watched module.
LOSS_CODE = "(loss)"
