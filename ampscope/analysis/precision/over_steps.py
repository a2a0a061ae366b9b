"""What the ops of all traced steps ran in, and at which steps a module went over to another dtype."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ampscope.analysis.numerics.dtypes import ran_in
from ampscope.analysis.precision.dtype_changes import DtypeChange, Modules, changes_between
from ampscope.analysis.tables.lazy_tables import collect_groups, first_rank, rank_table
from ampscope.analysis.tables.traced_steps import TracedStep, executed, traced_steps
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Cast, Source, Table, execution_of, source_of

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
    """What ran in steps of one kind."""

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
    found = collect_groups(rank_table(run, Table.OPS, rank), asked, "step, source", where="out = 0")
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
    """With the step at which each is over."""
    ends: dict[tuple[tuple[str, ...], str, str], int] = {}
    told = []
    for each in reversed(changes):
        told.append(replace(each, until=ends.get((each.modules, each.op, each.now))))
        ends[each.modules, each.op, each.was] = each.step
    return tuple(reversed(told))
