"""What of healthy steps a run was asked to record, where that is not everything."""

from __future__ import annotations

from ampscope.trace.read.run import Run

#: The settings that choose by name, and what each chooses.
_CHOOSING = ("modules", "ops", "parameters")
#: Names that are told one by one.
_NAMED = 3


def only_recorded(run: Run) -> str:
    """A note that values elsewhere could not be judged before anything broke; empty where all is recorded."""
    asked = {name: run.manifest.configuration.get(name) for name in _CHOOSING}
    told = [f"{name}={_named(patterns)}" for name, patterns in asked.items() if patterns]
    if not told:
        return ""
    return (
        f"Of healthy steps only a part is recorded ({', '.join(told)}): how near values elsewhere come to overflow, or "
        "to vanishing, is not known."
    )


def _named(patterns: object) -> str:
    """Patterns as they were given to `watch`."""
    if not isinstance(patterns, list):
        return repr(patterns)
    shown = ", ".join(map(repr, patterns[:_NAMED])) + (", ..." if len(patterns) > _NAMED else "")
    return shown if len(patterns) == 1 else f"[{shown}]"
