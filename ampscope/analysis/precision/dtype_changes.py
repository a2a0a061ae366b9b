"""Modules that run in another dtype in one step than in another."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

#: Of each module, of each op in it with its phase, how many ran in which dtype.
Modules = Mapping[str, Mapping[tuple[str, str], Counter[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeChange:
    """Modules that went over from one dtype to another."""

    step: int = 0  #: the first traced step with the new one
    before: int = 0  #: the last traced step with the old one
    until: int | None = None  #: the step at which they go back; None where they do not
    modules: tuple[str, ...]
    op: str = ""  #: the one op that did; empty where nothing of the modules stayed in the old one
    was: str
    now: str


def changes_between(was: Modules, now: Modules) -> Iterator[DtypeChange]:
    """What went over from one dtype to another, by what both steps ran: one may have recorded less than the other.

    Args:
        was: What ran in the earlier step.
        now: What ran in the later.
    """
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for module in now:
        for before, after, op in _of_module(was.get(module, {}), now[module]):
            found[before, after, op].append(module)
    for (before, after, op), modules in found.items():
        names = modules if op else _folded(modules, was, before)
        yield DtypeChange(modules=tuple(names), op=op, was=before, now=after)


def _of_module(
    was: Mapping[tuple[str, str], Counter[str]], now: Mapping[tuple[str, str], Counter[str]]
) -> Iterator[tuple[str, str, str]]:
    """From which dtype to which, and the op alone that did; empty where all that ran in the old dtype did."""
    both = [key for key in was if key in now]
    pairs = {key: (_most(was[key]), _most(now[key])) for key in both}
    changed: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for (op, _), (before, after) in pairs.items():
        if before != after:
            changed[before, after][op] = None
    stayed = {before for before, after in pairs.values() if before == after}
    for (before, after), ops in changed.items():
        yield from ((before, after, op) for op in (ops if before in stayed else ("",)))


def _most(counts: Counter[str]) -> str:
    """The dtype of the most."""
    return min(counts, key=lambda dtype: (-counts[dtype], dtype))


def _folded(modules: Collection[str], was: Modules, before: str) -> list[str]:
    """Modules joined to an ancestor that several have, as long as nothing in it stayed in the old dtype."""
    changed = set(modules)
    stayed = [name for name in was if name not in changed and any(before in each for each in was[name].values())]
    return list(dict.fromkeys(_joined(module, modules, stayed) for module in modules))


def _joined(module: str, changed: Collection[str], stayed: Collection[str]) -> str:
    """The nearest ancestor of all the modules that can be told together with one; itself where none can."""
    parts = module.split(".")
    names = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    together = next((_inside(name, changed) for name in names if not _inside(name, stayed)), [module])
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*(name.split(".") for name in together), strict=False))
    return ".".join(names[0] for names in shared)


def _inside(name: str, modules: Collection[str]) -> list[str]:
    return [each for each in modules if f"{each}.".startswith(f"{name}.")]
