"""Settings of `watch` are checked here: how often and at what healthy steps are looked, and on which ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ampscope.capture.torch_support.function_names import operators
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView, is_optimizer
from ampscope.capture.tracing.selection import Filters, Patterns, is_inside, matches, names_of
from ampscope.errors import WatchError

#: Everything that may be changed, by name.
NAMES = ("every", "overhead", "audit_every", *Filters._fields)
#: Patterns for one setting, and characters of one: a step waits while all are tried on all names.
MOST_PATTERNS, LONGEST_PATTERN = 64, 200


def checked(asked: Mapping[str, Any], models: Models) -> dict[str, Any]:
    """Settings as they are used: filters as tuples of patterns.

    Args:
        asked: By name; None for the default.
        models: The watched models.

    Raises:
        WatchError: One of them cannot be honoured.
    """
    unknown = [name for name in asked if name not in NAMES]
    if unknown:
        raise WatchError(f"there is no setting {quoted(unknown[0])}; there are {', '.join(NAMES)}")
    found = dict(asked)
    if "every" in found:
        check_every(found["every"])
    if "overhead" in found:
        check_overhead(found["overhead"])
    if "audit_every" in found:
        check_audit_every(found["audit_every"])
    for name in Filters._fields:
        if found.get(name) is not None:
            found[name] = _patterns(name, found[name], models)
    return found


def check_every(every: Any) -> None:
    """Whether it is a number of steps.

    Raises:
        WatchError: It is not.
    """
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
        raise WatchError(f"every={quoted(every)}: give a whole number of steps, 0 for no tracing, or leave it out")


def check_audit_every(every: Any) -> None:
    """Whether it is a number of steps.

    Raises:
        WatchError: It is not.
    """
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
        raise WatchError(f"audit_every={quoted(every)}: give a whole number of steps, 0 for no audits, or leave it out")


def check_overhead(overhead: Any) -> None:
    """Whether it is a share.

    Raises:
        WatchError: It is not.
    """
    if isinstance(overhead, bool) or not isinstance(overhead, (int, float)) or not 0 <= overhead <= 1:
        raise WatchError(f"overhead={quoted(overhead)}: give the share of time that observing may take, e.g. 0.02")


def _patterns(name: str, given: Any, models: Models) -> Patterns:
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(each, str) for each in patterns):
        raise WatchError(f"{name}={quoted(given)}: give a pattern such as {_EXAMPLES[name]!r}, or a list of them")
    if len(patterns) > MOST_PATTERNS or max(map(len, patterns)) > LONGEST_PATTERN:
        raise WatchError(f"{name}: give at most {MOST_PATTERNS} patterns of {LONGEST_PATTERN} characters")
    for pattern in patterns:
        _check_matches(name, pattern, models)
    return tuple(patterns)


_EXAMPLES = {"modules": "blocks.*.attn", "ops": "*softmax*", "parameters": "*.weight"}


def _check_matches(name: str, pattern: str, models: Models) -> None:
    """Whether a pattern is that of anything.

    Raises:
        WatchError: It is not.
    """
    if name == "modules":
        known = [each for each in models.names.values() if each]
        found = any(is_inside(each, (pattern,)) for each in models.names.values())
    elif name == "parameters":
        known = [each for each, _ in models.parameters.values()]
        found = any(matches(each, (pattern,)) for each in known)
    else:
        known = ["aten.mm.default", "aten._softmax.default"]
        every = operators()
        found = not every or any(matches(each, (pattern,)) for op in every for each in names_of(op))
    if not found:
        raise WatchError(f"{name}={quoted(pattern)} is the name of none; there are {_some(known)}")


def quoted(value: object, most: int = 160) -> str:
    """A value as it was given, cut off where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _some(names: Iterable[str], most: int = 5) -> str:
    given = list(names)
    return ", ".join(given[:most]) + (", ..." if len(given) > most else "") if given else "none"


def check_costs(replay_budget: Any, disk_budget: Any, save_tensors: Any) -> None:
    """Whether these are a number of replays, and of bytes, and whether operands can be kept where that is asked for.

    Raises:
        WatchError: One of them is not.
    """
    if isinstance(replay_budget, bool) or not isinstance(replay_budget, int) or replay_budget < 0:
        raise WatchError(f"replay_budget={replay_budget!r}: give a number of replays per incident, 0 for none")
    if isinstance(disk_budget, bool) or not isinstance(disk_budget, int) or disk_budget < 1 << 20:
        raise WatchError(f"disk_budget={disk_budget!r}: give bytes, at least 1 MiB (1 << 20)")
    if not isinstance(save_tensors, bool):
        raise WatchError(f"save_tensors={save_tensors!r}: give True to keep operands of failed ops, or leave it out")
    if save_tensors and importlib.util.find_spec("safetensors") is None:
        raise WatchError("save_tensors=True needs safetensors; pip install safetensors, or leave it out")


def check_optimizer(optimizer: Any, models: Models) -> None:
    """Whether it is an optimizer of parameters that are watched.

    Raises:
        WatchError: It is not.
    """
    if optimizer is None:
        return
    if not is_optimizer(optimizer):
        raise WatchError(f"optimizer= takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if not models.owns(OptimizerView(optimizer).parameters):
        raise WatchError("the optimizer holds no parameter of the model; pass the model that it trains")


def sampled_ranks(asked: Any, world_size: int) -> tuple[int, ...]:
    """The ranks asked for, ascending.

    Args:
        asked: ``"all"``, a number of ranks that are spread evenly from rank 0 on, or the ranks themselves.
        world_size: How many ranks there are.

    Raises:
        WatchError: It is none of these, or names a rank that the job does not have.
    """
    if asked == "all":
        return tuple(range(world_size))
    if _is_number(asked) and asked > 0:
        count = min(asked, world_size)
        return tuple(number * world_size // count for number in range(count))
    if not isinstance(asked, Sequence) or isinstance(asked, str) or not asked or not all(map(_is_number, asked)):
        raise WatchError(f'ranks={asked!r}: give ranks such as [0, 3], how many of them, or "all"')
    missing = [rank for rank in asked if not 0 <= rank < world_size]
    if missing:
        has = f"the ranks 0 to {world_size - 1}" if world_size > 1 else "rank 0 alone"
        raise WatchError(f"ranks={asked!r}: this job has {has}, as far as its launcher and process group tell")
    return tuple(sorted(set(asked)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
