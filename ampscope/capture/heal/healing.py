"""`Healing`: the settings of what a run may change of its own training, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.errors import WatchError
from ampscope.trace.schema import CureKind

#: What is said as a run begins.
BEGINS = "healing is on: where a replay proves a cure, this training is changed, and each change is told"
#: What is said where nothing can be changed alike on all ranks.
OF_RANKS = "healing is off: its ranks cannot agree before init_process_group; call ampscope.watch after that"


@dataclass(frozen=True, slots=True, kw_only=True)
class Healing:
    """The settings of what ``ampscope.watch(model, scaler, heal=...)`` may change; ``heal=True`` is ``Healing()``.

    Nothing is changed until a step goes bad, and then only what a replay of that very step has proved.

    Attributes:
        max_cures: Changes in force at a time, of those that last; what a run needs beyond them is not done.
        max_slowdown: Share of the time of a step that a change may cost, as replays of a good step with it and without
            it measure it; what costs less than a millisecond is not told from noise.
        kinds: Which kinds there may be: ``"modules_fp32"``, ``"conversions"``, ``"form"``, ``"loss_scale"``,
            ``"state"``, ``"run_again"``, ``"weights"``, ``"rows_left_out"``, ``"left_out"``. Default: all.
        quiet_steps: Good steps after which a change is tried without, on a replay; three such looks that are finite
            lift it. 0: never.
    """

    max_cures: int = 8
    max_slowdown: float = 0.05
    kinds: Sequence[str] = tuple(CureKind)
    quiet_steps: int = 64

    def __post_init__(self) -> None:
        known = [str(kind) for kind in CureKind]
        kinds = (self.kinds,) if isinstance(self.kinds, str) else self.kinds
        if unknown := [kind for kind in kinds if kind not in known]:
            raise WatchError(f"there is no kind of cure {str(unknown[0])!r}; there are {', '.join(known)}")
        _check_count("max_cures", self.max_cures)
        _check_count("quiet_steps", self.quiet_steps)
        slowdown: object = self.max_slowdown
        if isinstance(slowdown, bool) or not isinstance(slowdown, (int, float)) or not slowdown >= 0:
            raise WatchError(f"max_slowdown={slowdown!r}: give a share of a step's time, e.g. 0.05")
        object.__setattr__(self, "kinds", tuple(str(kind) for kind in kinds))

    def allows(self, kind: CureKind) -> bool:
        """Whether there may be changes of a kind."""
        return kind in self.kinds


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise WatchError(f"{name}={value!r}: give a whole number, 0 or more")


def asked_for(heal: object) -> Healing | None:
    """The settings that ``heal=`` asks for; None where there is to be none.

    Raises:
        WatchError: It is neither a bool nor a `Healing`.
    """
    if heal is None or isinstance(heal, bool):
        return Healing() if heal else None
    if not isinstance(heal, Healing):
        raise WatchError(f"heal={heal!r}: give True, or ampscope.Healing(...)")
    return heal


def configured(healing: Healing | None) -> dict[str, bool]:
    """Returns what the run's manifest says of healing; nothing where there is none."""
    return {"heal": True} if healing is not None else {}
