"""The words a diagnosis may use for the cause of a failure; capture and analysis share them."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why a value went wrong, a loop is mistaken, or an oddity is harmless."""

    # range
    FP16_OVERFLOW = "fp16_overflow"
    FP16_UNDERFLOW = "fp16_underflow"
    EPS_UNDERFLOW = "eps_underflow"
    SCALE_OVERFLOW = "scale_overflow"
    LITERAL_OVERFLOW = "literal_overflow"
    BF16_PRECISION = "bf16_precision"
    STAGNATION = "stagnation"
    INFORMATION_LOST = "information_lost"
    # mathematics: fp32 fails too
    LOG_ZERO = "log_zero"
    DIV_ZERO = "div_zero"
    SQRT_NEGATIVE = "sqrt_negative"
    SQRT_GRAD_ZERO = "sqrt_grad_zero"
    POW_GRAD_ZERO = "pow_grad_zero"
    WHERE_GRAD_TRAP = "where_grad_trap"
    ALL_MASKED_SOFTMAX = "all_masked_softmax"
    CTC_INFEASIBLE = "ctc_infeasible"
    DIVERGENCE = "divergence"
    # from outside
    BAD_INPUT = "bad_input"
    BAD_WEIGHT = "bad_weight"
    BAD_BUFFER = "bad_buffer"
    BAD_OPTIMIZER_STATE = "bad_optimizer_state"
    HALF_PARAMS = "half_params"
    RECEIVED = "received"
    EXCEPTION = "exception"
    HARDWARE_TRANSIENT = "hardware_transient"
    COMPILED_ONLY = "compiled_only"
    REPLICA_APART = "replica_apart"
    # warnings
    SPIKE = "spike"
    NEAR_OVERFLOW = "near_overflow"
    TREND_OVERFLOW = "trend_overflow"
    TREND_UNDERFLOW = "trend_underflow"
    SCALE_WINDOW = "scale_window"
    # usage
    MISUSE_CLIP_BEFORE_UNSCALE = "misuse_clip_before_unscale"
    MISUSE_NO_UNSCALE = "misuse_no_unscale"
    MISUSE_UPDATE_EACH_MICROBATCH = "misuse_update_each_microbatch"
    MISUSE_MULTIPLE_SCALERS_UPDATE = "misuse_multiple_scalers_update"
    MISUSE_BACKWARD_UNDER_AUTOCAST = "misuse_backward_under_autocast"
    MISUSE_AUTOCAST_SPANS_STEP = "misuse_autocast_spans_step"
    MISUSE_MISSING_SCALER = "misuse_missing_scaler"
    MISUSE_GRADIENTS_CLEARED = "misuse_gradients_cleared"
    MISUSE_GRADIENTS_KEPT = "misuse_gradients_kept"
    MISUSE_SCHEDULER_ORDER = "misuse_scheduler_order"
    MISUSE_SCALER_STATE_NOT_RESTORED = "misuse_scaler_state_not_restored"
    MISUSE_SCALER_EACH_STEP = "misuse_scaler_each_step"
    MISUSE_CHECKPOINT_AUTOCAST_MISMATCH = "misuse_checkpoint_autocast_mismatch"
    NOTHING_TRAINS = "nothing_trains"
    GRADIENTS_NOT_CLEARED = "gradients_not_cleared"
    RANKS_NOT_REDUCED = "ranks_not_reduced"
    AMP_WITHOUT_EFFECT = "amp_without_effect"
    # harmless
    BENIGN_INITIAL_CALIBRATION = "benign_initial_calibration"
    BENIGN_PERIODIC_GROWTH = "benign_periodic_growth"
    BENIGN_SCALE_ADJUSTMENT = "benign_scale_adjustment"
    BENIGN_SINGLE_SKIP = "benign_single_skip"
    BENIGN_INF_MASK = "benign_inf_mask"
    BENIGN_METRIC_NAN = "benign_metric_nan"
    BENIGN_SATURATED = "benign_saturated"
    BENIGN_MASKED_INTERNAL = "benign_masked_internal"
    # no other one was found
    UNKNOWN = "unknown"

    @property
    def is_benign(self) -> bool:
        """Whether the cause is one of the harmless ones."""
        return self.value.startswith("benign_")

    @property
    def is_ahead(self) -> bool:
        """Whether it tells of what has not happened yet."""
        return self in (Cause.NEAR_OVERFLOW, Cause.TREND_OVERFLOW, Cause.TREND_UNDERFLOW, Cause.SCALE_WINDOW)

    @property
    def is_usage(self) -> bool:
        """Whether the cause is a mistake in how the scaler or autocast is used."""
        without_effect = (Cause.NOTHING_TRAINS, Cause.GRADIENTS_NOT_CLEARED, Cause.RANKS_NOT_REDUCED)
        return self.value.startswith("misuse_") or self in (*without_effect, Cause.AMP_WITHOUT_EFFECT)


class MistakeForm(StrEnum):
    """How exactly a usage mistake showed, where one cause has several forms."""

    STEPPED_PAST_SCALER = "stepped_past_scaler"  #: ``optimizer.step`` on gradients that carry the scale
    UNSCALED_BY_HAND = "unscaled_by_hand"  #: the loop divided the scale out, and the scaler does it again
    LOSS_OF_SCALED_GRADIENTS = "loss_of_scaled_gradients"  #: a loss computed from scaled gradients
    DECISION_ON_SCALED = "decision_on_scaled"  #: a comparison with scaled gradients decides something
    KEPT_OF_SCALED = "kept_of_scaled"  #: a value made of scaled gradients is used where the scale is gone
    UNSCALE_EACH_MICROBATCH = "unscale_each_microbatch"  #: ``unscale_`` again after a further backward
    UNSCALE_TWICE = "unscale_twice"  #: ``unscale_`` twice for one step
    UNSCALED_FOR_ANOTHER = "unscaled_for_another"  #: divided already, for another object with the same parameters
    SCALED_TWICE = "scaled_twice"  #: ``scale`` of what it has scaled already
    UPDATE_MISSING = "update_missing"  #: a second step or ``unscale_`` without ``update`` in between
    NOTHING_TO_UPDATE = "nothing_to_update"  #: ``update`` although nothing was unscaled since the last
    UPDATE_IN_BETWEEN = "update_in_between"  #: ``update`` between backward and a step
    ANOTHER_SCALER = "another_scaler"  #: gradients divided by a scaler that did not scale their loss
    LOSS_NOT_SCALED = "loss_not_scaled"  #: gradients divided although no scaler scaled their loss
    NOTHING_SCALED = "nothing_scaled"  #: a step, or ``unscale_``, of a scaler that has scaled no loss
    NO_SCALER = "no_scaler"  #: a float16 forward, and no scaler at all
    ALL_FROZEN = "all_frozen"  #: no parameter of the optimizer requires a gradient
    NO_GRADIENT = "no_gradient"  #: no gradient reaches a parameter of the optimizer
    ZERO_GRADIENTS = "zero_gradients"  #: every gradient that reaches one is exactly zero
    GRADIENTS_ZEROED = "gradients_zeroed"  #: the loop takes gradients away, or makes them zero, before the step
    OTHER_PARAMETERS = "other_parameters"  #: the optimizer holds none of the watched model's parameters
    ROUNDED_AWAY = "rounded_away"  #: updates are too small to change a weight
    NO_LEARNING_RATE = "no_learning_rate"  #: the learning rate is zero throughout
    LEARNING_RATE_ENDED = "learning_rate_ended"  #: the learning rate is zero from a step to the end of the run
    CAST_AND_BACK = "cast_and_back"  #: what is trained was cast to half precision, and back
    AUTOCAST_SWITCHED_OFF = "autocast_switched_off"  #: a region for CUDA where there is none
    AUTOCAST_ELSEWHERE = "autocast_elsewhere"  #: a region for another kind of device than the model's
    AUTOCAST_OUTSIDE = "autocast_outside"  #: no op of the model ran inside a region that is on
    AUTOCAST_FLOAT32 = "autocast_float32"  #: autocast runs every op inside the region in float32


#: Each usage mistake as a noun phrase: the terminal beside the training and the diagnosis say the same.
MISTAKES_IN_WORDS: dict[Cause, str] = {
    Cause.HALF_PARAMS: "parameters kept in half precision",
    Cause.MISUSE_CLIP_BEFORE_UNSCALE: "gradients clipped before they were unscaled",
    Cause.MISUSE_NO_UNSCALE: "gradients used while still scaled",
    Cause.MISUSE_UPDATE_EACH_MICROBATCH: "scaler.update called for each micro-batch",
    Cause.MISUSE_MULTIPLE_SCALERS_UPDATE: "several scalers, unscalings or updates for one step",
    Cause.MISUSE_BACKWARD_UNDER_AUTOCAST: "backward run under autocast",
    Cause.MISUSE_AUTOCAST_SPANS_STEP: "an autocast region that spans the optimizer step",
    Cause.MISUSE_MISSING_SCALER: "float16 without a gradient scaler",
    Cause.MISUSE_GRADIENTS_CLEARED: "gradients cleared before the optimizer stepped",
    Cause.MISUSE_GRADIENTS_KEPT: "gradients of a skipped step that are not cleared",
    Cause.MISUSE_SCHEDULER_ORDER: "a scheduler that steps though the optimizer step was skipped",
    Cause.MISUSE_SCALER_STATE_NOT_RESTORED: "a resumed run whose scaler started afresh",
    Cause.MISUSE_SCALER_EACH_STEP: "a new scaler made for every step",
    Cause.MISUSE_CHECKPOINT_AUTOCAST_MISMATCH: "a checkpointed block recomputed in another precision",
    Cause.NOTHING_TRAINS: "nothing trains",
    Cause.GRADIENTS_NOT_CLEARED: "gradients that are never cleared",
    Cause.RANKS_NOT_REDUCED: "gradients that are not reduced across ranks",
    Cause.AMP_WITHOUT_EFFECT: "mixed precision without effect",
}


class Severity(StrEnum):
    """How much an incident or finding matters."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Verdict(StrEnum):
    """The one word on a run."""

    HEALTHY = "healthy"
    AT_RISK = "at_risk"  #: nothing is wrong yet, and something measured says that it will be
    PROBLEM = "problem"
    PARTLY_OBSERVED = (
        "partly_observed"  #: nothing is wrong in what was looked at, which is not all that should have been
    )
    NOT_OBSERVED = "not_observed"  #: nothing was seen that would allow a verdict


#: Why the same run again proves nothing of a device: what is written into a trial, and asked for when it is read.
NOT_DETERMINISTIC = "two replays of the step differ: it is not deterministic"
#: ``reason`` of a form that was tried together with the latest before it that was tried alone.
TOGETHER = "together with the form before it, which only moved the failure"

#: Share by which the loss of a step may lie apart from that in float32: what half precision rounds is far less.
LOSS_APART = 0.25

#: Steps after which a failure that comes back may be another one that looks the same.
FORGOTTEN_AFTER = 10

#: ``incidents.replay_reason`` of what the trace of the real step shows by itself.
SEEN_LIVE = "seen as it happened, in the trace of the real step"
#: The environment variable by which ``ampscope verify`` says where a training is to be recorded.
VERIFY_FOLDER = "AMPSCOPE_VERIFY_FOLDER"
#: What a warning on the time line says of a part of capture that a fault has ended, after the part's name.
SWITCHED_OFF = "switched itself off"
#: Why, where what the training ran on its device has failed, and every later call meets that.
DEVICE_FAILED = "for the device had failed in what the training ran on it"
#: The part of capture that follows the loop, judges its steps and writes them.
STEP_RECORD = "the step record"
#: The part of capture that keeps a step's calls: what looks into a step, bad or not, needs it.
STEP_TAPE = "the step tape"
#: The part of capture that reads weights and optimizer state from time to time.
STATE_LOOK = "the look at the state"
#: It does so after one step in this many, and after steps 0, 1, 2, 4, ... before that.
LOOK_EVERY = 64
#: Kinds of state that a file holds which the loop has saved.
HELD_WEIGHTS, HELD_OPTIMIZER = "weights", "optimizer"
#: How parts of capture are called that tell others of a run, or keep files beside it: without them no less is seen.
BESIDE = ("the tracker ", "on_incident ", "the webhook ", "the diagnosis of alerts ", "the keeping of operands ")
#: How notes on the time line begin that tell of ranges while the run trains: of a value that may overflow at any step,
#: and of one that grows.
RANGE_ALARMS = NEAR_OVERFLOW, OVERFLOW_AHEAD = "near overflow", "overflow ahead"
