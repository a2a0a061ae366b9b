"""Mechanical changes of a loop's text: faults planted without a look at the loop, and changes that mean nothing.

An operator takes a `Host` and gives every mutant that it can make of it, in the order of the text. What a mutant does
is for `oracle` to find out; an operator only says which causes would be a right answer, where its change is the cause.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from ampscope.trace.vocabulary import Cause

#: The iteration at which a mutant that has a moment does its harm.
AT = 20
_ROUNDED = frozenset(
    {
        Cause.FP16_OVERFLOW, Cause.FP16_UNDERFLOW, Cause.EPS_UNDERFLOW, Cause.LITERAL_OVERFLOW, Cause.SCALE_OVERFLOW,
        Cause.LOG_ZERO, Cause.DIV_ZERO, Cause.SQRT_GRAD_ZERO, Cause.INFORMATION_LOST, Cause.STAGNATION,
        Cause.ALL_MASKED_SOFTMAX, Cause.BF16_PRECISION,
    }
)  # fmt: skip
_RAISED = frozenset({Cause.EXCEPTION, Cause.MISUSE_UPDATE_EACH_MICROBATCH, Cause.MISUSE_NO_UNSCALE})
_STANDS = frozenset({Cause.NOTHING_TRAINS, Cause.MISUSE_GRADIENTS_CLEARED})


@dataclass(frozen=True, slots=True)
class Mutant:
    """A loop with one change."""

    operator: str
    what: str  #: the change in words, unique within its operator and host
    source: str
    lines: frozenset[int]  #: of the mutant's text, any of which is a right place
    causes: frozenset[Cause] = frozenset()  #: any of which is right; empty where only the oracle can tell
    null: bool = False  #: whether it is meant to change nothing
    fault: bool = False  #: whether it is one in every arithmetic: a float32 loop with it is no reference


@dataclass(frozen=True, slots=True)
class Host:
    """A loop's text, taken apart."""

    source: str
    tree: ast.Module = field(init=False)
    loop: ast.For = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", ast.parse(self.source))
        object.__setattr__(self, "loop", next(each for each in self.tree.body if isinstance(each, ast.For)))

    def text(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.source, node) or ""

    def statements(self) -> Iterator[ast.stmt]:
        """The statements of the loop, those inside others after these."""
        for node in ast.walk(self.loop):
            if isinstance(node, ast.stmt) and node is not self.loop:
                yield node

    def computed(self) -> Iterator[ast.expr]:
        """Every expression of the loop's own numbers: in a ``forward``, or under autocast."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.With)) and getattr(node, "name", "forward") == "forward":
                yield from (each for each in ast.walk(node) if isinstance(each, ast.expr) and each not in _heads(node))

    def calls(self, method: str) -> Iterator[ast.stmt]:
        """The simple statements of the loop that call this method."""
        for statement in self.statements():
            if isinstance(statement, (ast.Expr, ast.Assign)) and any(
                isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == method
                for each in ast.walk(statement)
            ):
                yield statement

    def replaced(self, node: ast.expr | ast.stmt, text: str) -> str:
        """The source with other text in a node's place."""
        lines = self.source.splitlines(keepends=True)
        start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
        return self.source[:start] + text + self.source[end:]

    def inserted(self, before: int, text: str, indent: int = 4) -> str:
        """The source with further lines before the line of this number."""
        lines = self.source.splitlines()
        new = (" " * indent + each for each in text.splitlines())
        return "\n".join([*lines[: before - 1], *new, *lines[before - 1 :]]) + "\n"

    def steps(self, source: str) -> frozenset[int]:
        """The lines of the loop in a mutant that scale, step or clear: where a mistake in their order may be told."""
        words = ("backward", "scaler.", ".step(", "zero_grad", "clip_grad", "for step in")
        return frozenset(n for n, line in enumerate(source.splitlines(), 1) if any(word in line for word in words))


def _heads(node: ast.FunctionDef | ast.With) -> set[ast.AST]:
    heads: Iterable[ast.AST] = node.items if isinstance(node, ast.With) else [node.args]
    return {each for head in heads for each in ast.walk(head)}


Operator = Callable[[Host], Iterator[Mutant]]

#: What may be said of a call of the loop that is not made, or made twice.
_WITHOUT = {
    "zero_grad": frozenset({Cause.GRADIENTS_NOT_CLEARED}),
    "unscale_": frozenset({Cause.MISUSE_CLIP_BEFORE_UNSCALE}),
    "update": _RAISED,
    "step": _STANDS,
    "backward": _RAISED | _STANDS,
    "clip_grad_norm_": frozenset[Cause](),
}


def delete(host: Host) -> Iterator[Mutant]:
    for method, causes in _WITHOUT.items():
        for statement in host.calls(method):
            source = host.replaced(statement, "pass")
            what = f"{host.text(statement)} deleted"
            fault = method in {"zero_grad", "step"}
            yield Mutant("delete", what, source, host.steps(source) | {statement.lineno}, causes, fault=fault)


def duplicate(host: Host) -> Iterator[Mutant]:
    for method in _WITHOUT:
        for statement in host.calls(method):
            text = host.text(statement)
            source = host.replaced(statement, text + "\n" + " " * statement.col_offset + text)
            yield Mutant("duplicate", f"{text} twice", source, host.steps(source))


def swap(host: Host) -> Iterator[Mutant]:
    """Two neighbours in the loop change places."""
    for block in [host.loop.body, *(each.body for each in host.loop.body if isinstance(each, ast.For))]:
        for first, second in pairwise(block):
            if isinstance(first, ast.For) or isinstance(second, ast.For):
                continue
            lines = host.source.splitlines()
            before, middle, after = first.lineno - 1, second.lineno - 1, second.end_lineno or 0
            lines[before:after] = lines[middle:after] + lines[before:middle]
            what = f"line {first.lineno} after {second.lineno}"
            source = "\n".join(lines) + "\n"
            yield Mutant("swap", what, source, host.steps(source) | frozenset(range(before + 1, after + 1)))


def unscaled(host: Host) -> Iterator[Mutant]:
    """The scaler is left out of one statement."""
    for statement in [*host.calls("scale"), *host.calls("step")]:
        text = host.text(statement)
        if text.startswith("scaler.scale("):
            other = text.replace("scaler.scale(", "", 1).replace(").", ".", 1)
        elif text.startswith("scaler.step("):
            other = text.replace("scaler.step(", "", 1).replace(")", ".step()", 1)
        else:
            continue
        source = host.replaced(statement, other)
        causes = frozenset(
            {Cause.MISUSE_NO_UNSCALE, Cause.MISUSE_MISSING_SCALER, Cause.FP16_UNDERFLOW, Cause.EXCEPTION}
        )
        yield Mutant("unscaled", other, source, host.steps(source), causes)


_SUMS = frozenset({"sum", "mean", "softmax", "pow", "amax", "clamp"})


def _operands(host: Host) -> Iterator[ast.expr]:
    """What a reduction, a function or a quotient of the loop reads, each once."""
    for node in host.computed():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if node.func.attr in _SUMS and host.text(owner) not in {"F", "torch"}:
                yield owner
            elif host.text(owner) == "torch" and node.func.attr in {"log", "exp", "sqrt"}:
                yield node.args[0]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.MatMult)):
            yield node.left


def _on_operands(host: Host, operator: str, template: str) -> Iterator[Mutant]:
    for node in _operands(host):
        other = template.format(host.text(node))
        what = f"line {node.lineno}: {other}"
        yield Mutant(operator, what, host.replaced(node, other), frozenset({node.lineno}), _ROUNDED)


def half(host: Host) -> Iterator[Mutant]:
    yield from _on_operands(host, "half", "({}).half()")


def factor(host: Host) -> Iterator[Mutant]:
    yield from _on_operands(host, "factor", "(({0}) * 3e5 / 3e5)")


def half_factor(host: Host) -> Iterator[Mutant]:
    yield from _on_operands(host, "half factor", "(({0}).half() * 2e4 / 2e4)")


def small(host: Host) -> Iterator[Mutant]:
    """A guard becomes nothing, or nothing in half precision."""
    for node in host.computed():
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value < 1e-3:
            for other in ("0.0", "1e-12"):
                what = f"line {node.lineno}: {node.value} is {other}"
                causes = _ROUNDED | {Cause.DIVERGENCE, Cause.POW_GRAD_ZERO}
                yield Mutant("small", what, host.replaced(node, other), frozenset({node.lineno}), causes)


def small_in_half(host: Host) -> Iterator[Mutant]:
    """The sum of a number and its guard is made in half, in which the guard vanishes."""
    for node in host.computed():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.right, ast.Constant):
            other = f"(({host.text(node.left)}).half() + 1e-8)"
            what = f"line {node.lineno}: {other}"
            yield Mutant("small in half", what, host.replaced(node, other), frozenset({node.lineno}), _ROUNDED)


def unguarded(host: Host) -> Iterator[Mutant]:
    """A clamp, and the maximum taken away before `exp`, are left out."""
    for node in host.computed():
        inner: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "clamp":
            inner = node.func.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and "amax" in host.text(node.right):
            inner = node.left
        if inner is not None:
            what = f"line {node.lineno}: {host.text(inner)} alone"
            yield Mutant("unguarded", what, host.replaced(node, host.text(inner)), frozenset({node.lineno}), _ROUNDED)


def fill(host: Host) -> Iterator[Mutant]:
    for node in host.computed():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "masked_fill":
            for other in ("-1e9", "-6e4", 'float("nan")', 'float("inf")', "scores.min() * 1e4"):
                source = host.replaced(node.args[1], other)
                yield Mutant("fill", f"with {other}", source, frozenset({node.lineno, node.lineno + 1}))


def _guarded(text: str, when: str = f"step == {AT}") -> str:
    return f"if {when}:\n    {text}"


def _first(host: Host) -> int:
    return host.loop.body[0].lineno


def rate(host: Host) -> Iterator[Mutant]:
    """The learning rate is no number, or nothing, from a step on."""
    optimizer = next(name for name in ("optimizer", "judges") if f"{name} = " in host.source)
    for value, causes in {'float("nan")': {Cause.BAD_OPTIMIZER_STATE, Cause.BAD_WEIGHT}, "0.0": _STANDS}.items():
        for when in (f"step == {AT}", f"step >= {AT}", "True"):
            text = _guarded(f'{optimizer}.param_groups[0]["lr"] = {value}', when)
            source = host.inserted(_first(host), text)
            lines = frozenset({_first(host) + 1}) | host.steps(source)
            yield Mutant("rate", f"{value} if {when}", source, lines, frozenset(causes), fault="nan" in value)


def poisoned(host: Host) -> Iterator[Mutant]:
    """A batch has a number that is none."""
    for statement in host.statements():
        text = host.text(statement)
        if not text.startswith(("x = digits", "x, y = digits")):
            continue
        for value in ("nan", "inf"):
            made = _guarded(f'x = x.index_fill(0, torch.tensor([0]), float("{value}"))')
            source = host.inserted((statement.end_lineno or 0) + 1, made, statement.col_offset)
            near = frozenset({statement.lineno, statement.lineno + 2})
            yield Mutant("poisoned", f"x has {value}", source, near, frozenset({Cause.BAD_INPUT}), fault=True)


def _model(host: Host) -> str:
    return next(name for name in ("model", "critic") if f"{name} = " in host.source)


def written(host: Host) -> Iterator[Mutant]:
    """The loop spoils a weight, a buffer or a moment."""
    name = _model(host)
    weight = f"next({name}.parameters()).data.view(-1)[0]"
    spoils = {f'{weight} = float("{value}")': frozenset({Cause.BAD_WEIGHT}) for value in ("nan", "inf")}
    if "BatchNorm" in host.source:
        spoils[f'next({name}.buffers())[0] = float("nan")'] = frozenset({Cause.BAD_BUFFER})
    for text, causes in spoils.items():
        source = host.inserted(_first(host), _guarded(text))
        yield Mutant("written", text, source, frozenset({_first(host) + 1}), causes, fault=True)


def _watch_line(host: Host) -> int:
    return next(n for n, line in enumerate(host.source.splitlines(), 1) if line.startswith("watch("))


def stopped(host: Host) -> Iterator[Mutant]:
    """Nothing gets a gradient, or the optimizer has other weights."""
    name, line = _model(host), _watch_line(host)
    frozen = host.inserted(line, f"{name}.requires_grad_(False)", 0)
    yield Mutant("stopped", "all frozen", frozen, host.steps(frozen) | {line}, _RAISED | _STANDS, fault=True)
    for wanted in (f"({name}.parameters(), ", f"({name}.parameters()"):
        if wanted in host.source:
            source = host.source.replace(wanted, wanted.replace(name, f"copy.deepcopy({name})"), 1)
            lines = host.steps(source) | {n for n, text in enumerate(source.splitlines(), 1) if "deepcopy(" in text}
            causes = _STANDS | _RAISED
            yield Mutant("stopped", "an optimizer of a copy", source, lines, causes, fault=True)
            return


def cast(host: Host) -> Iterator[Mutant]:
    """Weights or buffers go through half precision, once or in each step."""
    name, last = _model(host), (host.loop.end_lineno or 0) + 1
    causes = frozenset({Cause.STAGNATION, Cause.NOTHING_TRAINS, Cause.HALF_PARAMS, Cause.INFORMATION_LOST})
    before = _watch_line(host)
    once = host.inserted(before, f"{name}.half().float()", 0)
    yield Mutant("cast", "once", once, frozenset({before}), causes)
    yield Mutant("cast", "in each step", host.inserted(last, f"{name}.half().float()"), frozenset({last}), causes)
    source = host.inserted(before, f"{name}.half()", 0)
    yield Mutant("cast", "kept in half", source, host.steps(source) | {before}, causes | _RAISED)


def harmless(host: Host) -> Iterator[Mutant]:
    """What any loop may have besides."""
    name, first, last = _model(host), _first(host), (host.loop.end_lineno or 0) + 1
    batch = "tokens" if name == "model" and "tokens =" in host.source else "x"
    seen = f"{name}.eval()\n    seen = {name}({batch}).float().std().item()\n    {name}.train()"
    evaluation = f"with torch.no_grad():\n    {seen}"
    texts = {
        "a comment": (first, "# the batch"),
        "an evaluation": (last, evaluation),
        "a metric that is NaN": (last, "with torch.no_grad():\n    ratio = torch.zeros(3) / torch.zeros(3)"),
        "a log of zero in a metric": (last, "with torch.no_grad():\n    entropy = torch.log(torch.zeros(3)).sum()"),
        "a clamp that never binds": (last, f"for p in {name}.parameters():\n    p.data.clamp_(-1e4, 1e4)"),
        "a checkpoint": (last, f"kept = copy.deepcopy({name}.state_dict())"),
        "a norm of all weights": (last, f"size = sum(p.detach().norm() for p in {name}.parameters())"),
        "a mask of infinities in a metric": (last, "top = torch.where(torch.eye(4) > 0, float('-inf'), 1.0).amax()"),
        "a count in half": (last, "seen = torch.ones(100, dtype=torch.float16).sum()"),
        "a stop that never comes": (first, "if step < 0:\n    break"),
        "an exception that is caught": (first, "try:\n    {}['none']\nexcept KeyError:\n    pass"),
    }
    for what, (line, text) in texts.items():
        yield Mutant("harmless", what, host.inserted(line, text), frozenset(), null=True)
    for old, new in (("loss", "objective"), ("scaler", "grad_scaler"), ("optimizer", "opt")):
        names = [n for n in ast.walk(host.tree) if isinstance(n, ast.Name) and n.id == old]
        source = host.source
        for node in sorted(names, key=lambda n: (n.lineno, n.col_offset), reverse=True):
            source = Host(source).replaced(node, new)
        if names:
            yield Mutant("harmless", f"{old} is named {new}", source, frozenset(), null=True)


OPERATORS: tuple[Operator, ...] = (
    delete, duplicate, swap, unscaled, half, factor, half_factor, small, small_in_half, unguarded, fill, rate,
    poisoned, written, stopped, cast, harmless,
)  # fmt: skip
