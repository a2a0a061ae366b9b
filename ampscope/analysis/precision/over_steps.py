"""The dtypes of the ops of all traced steps, and the steps at which a module went over to another dtype."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile

from ampscope.analysis.rounding import ran_in
from ampscope.analysis.tables.lazy_tables import collect_rows, first_rank
from ampscope.analysis.tables.traced_steps import TracedStep, executed, traced_steps
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Cast, Source, Table, execution_of, source_of

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
    """Yields changes of dtype between two steps, by the ops that ran in both: one may have recorded less.

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


#: Executions that are steps of the training, the better first.
_OF_TRAINING = (str(Source.LIVE), str(Source.REPLAY))
#: Kinds of steps that are looked at op by op: steps of one kind ran the same ops in the same order. Where there are
#: more, as many steps are looked at, as far from each other as can be.
MOST_KINDS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionOverSteps(NotebookRepr):
    """The ops of one optimizer's traced steps by dtype; casts are not counted."""

    steps: tuple[int, ...] = ()  #: ascending
    sources: tuple[str, ...] = ()  #: the execution of each that is counted: as it ran where there is that, or a replay
    ops: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  #: by dtype, how many in each step
    changes: tuple[DtypeChange, ...] = ()
    passed_over: int = 0  #: traced steps that were not looked at
    audited: int = 0  #: further steps that were replayed for an audit alone, and are not counted


@dataclass(frozen=True, slots=True)
class _Kind:
    """Counts the dtypes of the ops in steps of one kind, in all and by module."""

    ops: Counter[str]
    modules: Modules


def precision_over_steps(run: Run, *, rank: int | None = None, optimizer: int = 0) -> PrecisionOverSteps:
    """The ops of all traced steps of ``optimizer`` by dtype; an empty result where none was traced.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    rank = first_rank(run) if rank is None else rank
    everything = traced_steps(run, rank=rank)
    traced = _of_training(everything, optimizer)
    audited = {each.step for each in everything if each.source == source_of(Source.AUDIT, optimizer)}
    numbers = _signatures(run, rank)
    known = [(each, numbers[each.step, each.source]) for each in traced if (each.step, each.source) in numbers]
    looked_at = _looked_at(known)
    kinds = {number: _kind(run, each) for number, each in looked_at.items()}
    told = [(each, kinds[number]) for each, number in known if number in kinds]
    dtypes = sorted({dtype for _, kind in told for dtype in kind.ops})
    return PrecisionOverSteps(
        steps=tuple(each.step for each, _ in told),
        sources=tuple(each.source for each, _ in told),
        ops={dtype: tuple(kind.ops[dtype] for _, kind in told) for dtype in dtypes},
        changes=_until(list(_changes(told))),
        passed_over=len(known) - len(told),
        audited=len(audited - {each.step for each in traced}),
    )


def _of_training(traced: Sequence[TracedStep], optimizer: int) -> list[TracedStep]:
    """One execution of each step of an optimizer, the earliest step first."""
    found: dict[int, TracedStep] = {}
    for each in traced:
        execution, number = execution_of(each.source)
        if execution in _OF_TRAINING and (int(number) if number.isdecimal() else 0) == optimizer:
            other = found.get(each.step)
            if other is None or _OF_TRAINING.index(execution) < _OF_TRAINING.index(execution_of(other.source)[0]):
                found[each.step] = each
    return [found[step] for step in sorted(found)]


def _signatures(run: Run, rank: int) -> dict[tuple[int, str], tuple[int, int]]:
    """By step and source, what is the same for those that ran the same program points in the same order."""
    asked = "step, source, count(*), bit_xor(hash(seq, site))"
    found = collect_rows(run.table(Table.OPS, rank=rank), asked, "step, source", where="out = 0")
    return {(step, source): (count, number) for step, source, count, number in found}


def _looked_at(known: Sequence[tuple[TracedStep, tuple[int, int]]]) -> dict[tuple[int, int], TracedStep]:
    """By its signature one step of each kind; of very many kinds, those of steps far from each other."""
    firsts = {number: each for each, number in reversed(known)}
    if len(firsts) <= MOST_KINDS:
        return firsts
    places = sorted({(len(known) - 1) * at // (MOST_KINDS - 1) for at in range(MOST_KINDS)})
    return {known[place][1]: known[place][0] for place in places}


def _kind(run: Run, traced: TracedStep) -> _Kind:
    ops: Counter[str] = Counter()
    modules: dict[str, dict[tuple[str, str], Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for one in executed(run, traced):
        dtype = ran_in(one.site)
        if one.site.cast == Cast.NONE and dtype:
            ops[dtype] += one.count
            modules[one.site.module][one.site.op, one.site.phase][dtype] += one.count
    return _Kind(ops, modules)


def _changes(told: Sequence[tuple[TracedStep, _Kind]]) -> Iterator[DtypeChange]:
    """From each step to the next; what is the same for many pairs is found once."""
    found: dict[tuple[int, int], tuple[DtypeChange, ...]] = {}
    for (earlier, was), (later, now) in pairwise(told):
        if was is not now:
            key = id(was), id(now)
            if key not in found:
                found[key] = tuple(changes_between(was.modules, now.modules))
            yield from (replace(each, step=later.step, before=earlier.step) for each in found[key])


def _until(changes: Sequence[DtypeChange]) -> tuple[DtypeChange, ...]:
    ends: dict[tuple[tuple[str, ...], str, str], int] = {}
    told = []
    for each in reversed(changes):
        told.append(replace(each, until=ends.get((each.modules, each.op, each.now))))
        ends[each.modules, each.op, each.was] = each.step
    return tuple(reversed(told))
