"""A cure written into a line of someone's program: their words, the operand that was meant, the same values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

from ampscope.cures.rewriting.edit import Edit, unified
from ampscope.cures.rewriting.found_call import Asked
from ampscope.cures.rewritten_statement import rewritten
from ampscope.trace.schema import Form


class Line(NamedTuple):
    """A line, what is asked of it, and what becomes of it."""

    code: str
    form: Form
    call: str
    after: str
    argument: int | None = None
    value: float | None = None
    was: float | None = None

    @property
    def edit(self) -> Edit | None:
        return of(self.code, self.form, self.call, argument=self.argument, value=self.value, was=self.was)


def of(code: str, form: Form, call: str, **asked: Any) -> Edit | None:
    where = {name: asked.pop(name) for name in ("row", "scope") if name in asked}
    return rewritten(code, form, Asked(call, **asked), **where)


BOUND, EPS, CONSTANT, FLOAT32 = Form.OPERAND_BOUND, Form.ADDED_EPS, Form.CONSTANT, Form.IN_FLOAT32
MASK = 'x.masked_fill(m, float("-inf"))'

#: Lines that can run: on good values the line that comes out gives what the one that goes in gives.
RUNS = [
    Line("return -torch.log(p).mean()", BOUND, "log", "return -torch.log(p.clamp(min=1e-4)).mean()", value=1e-4),
    Line("return (1.0 - p).log()  # why", BOUND, "log", "return (1.0 - p).clamp(min=1e-4).log()  # why", value=1e-4),
    Line("return torch.log(1 - p)", BOUND, "log", "return torch.log((1 - p).clamp(min=1e-4))", value=1e-4),
    Line("return torch.log(input=p)", BOUND, "log", "return torch.log(input=p.clamp(min=1e-4))", value=1e-4),
    Line(
        "return y * torch.log(p) + (1 - y) * torch.log(1 - p)",
        BOUND,
        "log",
        "return y * torch.log(p.clamp(min=1e-4)) + (1 - y) * torch.log((1 - p).clamp(min=1e-4))",
        value=1e-4,
    ),
    Line(
        "return -torch.log(-torch.log(1 - p))",
        BOUND,
        "log",
        "return -torch.log((-torch.log((1 - p).clamp(min=1e-4))).clamp(min=1e-4))",
        value=1e-4,
    ),
    Line("return x[m].mean()", BOUND, "mean", "return x[m].float().sum() / max(1, x[m].numel())", value=1.0),
    Line("return 2 * x.mean()", BOUND, "mean", "return 2 * (x.float().sum() / max(1, x.numel()))", value=1.0),
    Line(
        "return F.mse_loss(x, c)",
        BOUND,
        "mse_loss",
        'return F.mse_loss(x, c, reduction="sum") / max(1, c.numel())',
        value=1.0,
    ),
    Line(
        "return 2 * F.cross_entropy(x.view(-1, 4), t.view(-1), ignore_index=0)",
        BOUND,
        "cross_entropy",
        'return 2 * (F.cross_entropy(x.view(-1, 4), t.view(-1), ignore_index=0, reduction="sum")'
        " / max(1, (t.view(-1) != 0).sum()))",
        value=1.0,
    ),
    Line(
        "return -torch.log(x.exp().diagonal() / x.exp().sum(dim=1)).mean()",
        Form.LOG_SOFTMAX,
        "log",
        "return -x.log_softmax(dim=1).diagonal().mean()",
    ),
    Line(
        "return torch.log(torch.exp(x / 2) / torch.exp(x / 2).sum(-1, keepdim=True))",
        Form.LOG_SOFTMAX,
        "log",
        "return (x / 2).log_softmax(-1)",
    ),
    Line("return a.sqrt().sqrt()", EPS, "sqrt", "return ((a + 1e-9).sqrt() + 1e-9).sqrt()", value=1e-9),
    Line("return p.clamp(min=1e-12).log()", BOUND, "log", "return p.clamp(min=1e-4).log()", value=1e-4),
    Line("return p.clamp(max=1).log()", BOUND, "log", "return p.clamp(max=1, min=1e-4).log()", value=1e-4),
    Line("return p.clamp_min(eps).log()", BOUND, "log", "return p.clamp_min(max(eps, 1e-4)).log()", value=1e-4),
    Line("return x.exp()", BOUND, "exp", "return x.clamp(max=11.0).exp()", value=11.0),
    Line("return a / b", BOUND, "div", "return a / b.clamp(min=1e-6)", argument=1, value=1e-6),
    Line("a /= b * 2; return a", BOUND, "div", "a /= (b * 2).clamp(min=1e-6); return a", argument=1, value=1e-6),
    Line("y = x.clamp(-1, 1).acos()", BOUND, "acos", "y = x.clamp(-0.999, 0.999).acos()", value=0.999),
    Line("y = torch.acos(c.clip(-0.9, 1.0))", BOUND, "acos", "y = torch.acos(c.clip(-0.9, 0.999))", value=0.999),
    Line("y = x.std(0) + 1e-5", BOUND, "std", "y = x.std(0, correction=min(1, x.shape[0] - 1)) + 1e-5", value=1.0),
    Line("y = torch.var(x)", BOUND, "var", "y = torch.var(x, correction=min(1, x.numel() - 1))", value=1.0),
    Line(
        "s = x.std(dim=-1, keepdim=True)",
        BOUND,
        "std",
        "s = x.std(dim=-1, keepdim=True, correction=min(1, x.shape[-1] - 1))",
        value=1.0,
    ),
    Line("return torch.atanh(p)", BOUND, "atanh", "return torch.atanh(p.clamp(min=-0.999, max=0.999))", value=0.999),
    Line("return a / b.abs()", EPS, "__truediv__", "return a / (b.abs() + 1e-9)", value=1e-9),
    Line("return a / (b - -c) / 2", EPS, "div", "return a / (b - -c + 1e-9) / 2", value=1e-9),
    Line("return torch.div(a, b)", EPS, "div", "return torch.div(a, b + 1e-9)", value=1e-9),
    Line("return a.div(other=b)", EPS, "div", "return a.div(other=b + 1e-9)", value=1e-9),
    Line("return (a * b).sqrt()", EPS, "sqrt", "return (a * b + 1e-9).sqrt()", value=1e-9),
    Line("return a.sum(-1).sqrt()", EPS, "sqrt", "return (a.sum(-1) + 1e-9).sqrt()", value=1e-9),
    Line("return a / (b + 1e-12)", EPS, "div", "return a / (b + 1e-9)", value=1e-9),
    Line("return torch.rsqrt(a + eps)", EPS, "rsqrt", "return torch.rsqrt(a + max(eps, 1e-9))", value=1e-9),
    Line("return F.normalize(x, dim=-1)", CONSTANT, "normalize", "return F.normalize(x, dim=-1, eps=1e-4)", None, 1e-4),
    Line(
        "return F.normalize(x, 2, -1, 1e-12)",
        CONSTANT,
        "normalize",
        "return F.normalize(x, 2, -1, 1e-4)",
        value=1e-4,
        was=1e-12,
    ),
    Line(
        "return x.masked_fill(m, -1e9).softmax(-1)",
        CONSTANT,
        "masked_fill",
        "return x.masked_fill(m, torch.finfo(x.dtype).min).softmax(-1)",
        value=-65504.0,
        was=-1e9,
    ),
    Line(
        "return (a * x).masked_fill(m, value=-1e9).softmax(-1)",
        CONSTANT,
        "masked_fill",
        "return (a * x).masked_fill(m, value=torch.finfo(torch.float16).min).softmax(-1)",
        value=-65504.0,
        was=-1e9,
    ),
    Line("return torch.log(x.softmax(-1))", Form.LOG_SOFTMAX, "log", "return x.log_softmax(-1)"),
    Line(
        "return torch.log(torch.softmax(a * x, dim=1) + 1e-9)",
        Form.LOG_SOFTMAX,
        "log",
        "return torch.log_softmax(a * x, dim=1)",
    ),
    Line("return F.softmax(x, 1).clamp(min=1e-9).log()", Form.LOG_SOFTMAX, "log", "return F.log_softmax(x, 1)"),
    Line("return x.sigmoid().log()", Form.LOGSIGMOID, "log", "return torch.nn.functional.logsigmoid(x)"),
    Line(
        "return F.relu(torch.log(1 - torch.sigmoid(a - x)))",
        Form.LOGSIGMOID,
        "log",
        "return F.relu(F.logsigmoid(-(a - x)))",
    ),
    Line(
        "return F.binary_cross_entropy(torch.sigmoid(x), y, reduction='sum')",
        Form.WITH_LOGITS,
        "binary_cross_entropy",
        "return F.binary_cross_entropy_with_logits(x, y, reduction='sum')",
    ),
    Line(
        "return F.nll_loss(torch.log(F.softmax(x, dim=1)), t)",
        Form.CROSS_ENTROPY,
        "nll_loss",
        "return F.cross_entropy(x, t)",
    ),
    Line(
        "return F.nll_loss(x.softmax(-1).log(), t)",
        Form.CROSS_ENTROPY,
        "nll_loss",
        "return F.nll_loss(x.log_softmax(-1), t)",
    ),
    Line("return x.exp().sum(-1).log()", Form.LOGSUMEXP, "log", "return x.logsumexp(-1)"),
    Line("return torch.log(torch.exp(x).sum())", Form.LOGSUMEXP, "log", "return x.flatten().logsumexp(0)"),
    Line(
        "return torch.log(torch.sum(torch.exp(x - a), dim=-1, keepdim=True))",
        Form.LOGSUMEXP,
        "log",
        "return (x - a).logsumexp(dim=-1, keepdim=True)",
    ),
    Line(
        "return x.exp() / torch.exp(x).sum(-1, True)",
        Form.MAX_OFF,
        "exp",
        "return (x - x.amax(-1, keepdim=True)).exp() / torch.exp(x - x.amax(-1, keepdim=True)).sum(-1, True)",
    ),
    Line("return q @ k.mT / 8", Form.SCALE_FIRST, "matmul", "return (q / 8) @ k.mT"),
    Line("return (q @ k.mT) * (1 / 8)", Form.SCALE_FIRST, "matmul", "return (q * (1 / 8)) @ k.mT"),
    Line(
        "return (q @ (k + 1).mT) / q.shape[-1] ** 0.5",
        Form.SCALE_FIRST,
        "matmul",
        "return (q / q.shape[-1] ** 0.5) @ (k + 1).mT",
    ),
    Line(
        "return eps * torch.matmul(q + q, k.mT)", Form.SCALE_FIRST, "matmul", "return torch.matmul((q + q) * eps, k.mT)"
    ),
    Line("return q.matmul(k.mT) * eps", Form.SCALE_FIRST, "matmul", "return (q * eps).matmul(k.mT)"),
    Line("return q.matmul(k.mT) * eps", Form.SCALE_FIRST, "matmul", "return q.matmul(k.mT * eps)", argument=1),
    Line(
        "return x.pow(2).mean(-1) - x.mean(-1).pow(2)",
        Form.CENTRED,
        "sub",
        "return (x - x.mean(-1, keepdim=True)).square().mean(-1)",
    ),
    Line("return (x * x).mean() - x.mean() ** 2", Form.CENTRED, "sub", "return (x - x.mean()).square().mean()"),
    Line(
        "return torch.where(b > 0, a / b, 0.0)",
        Form.SAFE_WHERE,
        "div",
        "return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)",
    ),
    Line(
        "return torch.where(x <= 0, 0.0, (x + 0).sqrt())",
        Form.SAFE_WHERE,
        "sqrt",
        "return torch.where(x <= 0, 0.0, torch.where(x <= 0, 1.0, x + 0).sqrt())",
    ),
    Line(
        f"return {MASK}.softmax(-1)",
        Form.KEPT_ROWS,
        "softmax",
        'return x.masked_fill(m & ~m.all(-1, keepdim=True), float("-inf")).softmax(-1)'
        ".masked_fill(m.all(-1, keepdim=True), 0.0)",
    ),
    Line(
        "return x.softmax(dim=-1)",
        Form.KEPT_ROWS,
        "softmax",
        "return x.clamp(min=torch.finfo(x.dtype).min).softmax(dim=-1)"
        ".masked_fill((x == -torch.inf).all(-1, keepdim=True), 0.0)",
    ),
    Line("return a / b", Form.SAFE_WHERE, "div", "return a / torch.where(b == 0, 1.0, b)"),
    Line("return torch.log(p)", Form.SAFE_WHERE, "log", "return torch.log(torch.where(p <= 0, 1.0, p))"),
    Line(
        "return p.sqrt().sum()",
        Form.SAFE_WHERE,
        "sqrt",
        "return torch.where(p <= 0, 0.0, torch.where(p <= 0, 1.0, p).sqrt()).sum()",
    ),
    Line("return torch.sum(a * x)", FLOAT32, "sum", "return torch.sum((a * x).float())"),
    Line("return a.sum() + x.sum()", FLOAT32, "sum", "return a.float().sum() + x.float().sum()"),
    Line("return x.pow(2).mean(-1)", FLOAT32, "pow", "return x.float().pow(2).mean(-1)"),
    Line(
        "return q @ k.mT",
        FLOAT32,
        "matmul",
        "with torch.autocast(q.device.type, enabled=False):\n    return q.float() @ k.mT.float()",
    ),
    Line(
        "return F.linear(x, a)",
        FLOAT32,
        "linear",
        "with torch.autocast(x.device.type, enabled=False):\n    return F.linear(x.float(), a.float())",
    ),
    Line(
        "return torch.addmm(c[:, :3], a, b.mT, beta=2)",
        FLOAT32,
        "addmm",
        "with torch.autocast(a.device.type, enabled=False):\n"
        "    return torch.addmm(c[:, :3].float(), a.float(), b.mT.float(), beta=2)",
    ),
    Line(
        "return torch.einsum('ij,kj->ik', x, a)",
        FLOAT32,
        "einsum",
        "with torch.autocast(x.device.type, enabled=False):\n"
        "    return torch.einsum('ij,kj->ik', x.float(), a.float())",
    ),
    Line("return a / b.float()", EPS, "div", "return a / (b.float() + 1e-9)", value=1e-9),
]
#: Heads of blocks, statements of several lines, and what else cannot run by itself.
STANDS = [
    Line("if p.log().isfinite():  # yet", BOUND, "log", "if p.clamp(min=1e-4).log().isfinite():  # yet", value=1e-4),
    Line("elif p.log():", BOUND, "log", "elif p.clamp(min=1e-4).log():", value=1e-4),
    Line("for row in p.log():", BOUND, "log", "for row in p.clamp(min=1e-4).log():", value=1e-4),
    Line("with hold(p.log()) as row:", BOUND, "log", "with hold(p.clamp(min=1e-4).log()) as row:", value=1e-4),
    Line(
        "loss = F.ctc_loss(\n        lp, (t), # )\n        il, tl,\n    )",
        Form.ZERO_INFINITY,
        "ctc_loss",
        "loss = F.ctc_loss(\n        lp, (t), # )\n        il, tl, zero_infinity=True,\n    )",
    ),
    Line("c = nn.CTCLoss(zero_infinity=False)", Form.ZERO_INFINITY, "ctc_loss", "c = nn.CTCLoss(zero_infinity=True)"),
    Line("naïve = p.log()", BOUND, "log", "naïve = p.clamp(min=1e-4).log()", value=1e-4),
    Line("loss = math.log(2) * p.log()", BOUND, "log", "loss = math.log(2) * p.clamp(min=1e-4).log()", value=1e-4),
]
#: Lines that stay as they are: it is not clear what is meant, or they do it already.
STAYS = [
    Line("return x.mean(1)", BOUND, "mean", "", value=1.0),
    Line("return draw(x).mean()", BOUND, "mean", "", value=1.0),
    Line("return F.cross_entropy(x, t, w)", BOUND, "cross_entropy", "", value=1.0),
    Line("return F.cross_entropy(x, t, reduction='sum')", BOUND, "cross_entropy", "", value=1.0),
    Line("return F.cross_entropy(x, next(t))", BOUND, "cross_entropy", "", value=1.0),
    Line("return torch.log(x.exp()[0] / x.exp().sum(1, keepdim=True))", Form.LOG_SOFTMAX, "log", ""),
    Line("return torch.log(x.exp() / x.exp().sum(1))", Form.LOG_SOFTMAX, "log", ""),
    Line("return torch.log(x.exp()[0] / x.exp().sum(1))", Form.LOG_SOFTMAX, "log", ""),
    Line("return torch.log(x.exp() / x.exp().sum(1, keepdim=False))", Form.LOG_SOFTMAX, "log", ""),
    Line("return torch.log(x.exp() / y.exp().sum(1, keepdim=True))", Form.LOG_SOFTMAX, "log", ""),
    Line("return torch.log(x.exp() / x.exp().sum())", Form.LOG_SOFTMAX, "log", ""),
    Line("e = x.exp()", Form.MAX_OFF, "exp", ""),
    Line("return [(a - b).sqrt() for b in c]", Form.SAFE_WHERE, "sqrt", ""),
    Line("return a if b else (a - b).sqrt()", Form.SAFE_WHERE, "sqrt", ""),
    Line("if (a - b).sqrt():", Form.SAFE_WHERE, "sqrt", ""),
    Line("loss = self.log('a', b.log())", BOUND, "log", "", value=1e-4),
    Line("return self.softmax(x)", Form.KEPT_ROWS, "softmax", ""),
    Line("return math.log(x)", BOUND, "log", "", value=1e-4),
    Line("return p.clamp(min=1e-3).log()", BOUND, "log", "", value=1e-4),
    Line("y = x.clamp(-0.5, 0.5).acos()", BOUND, "acos", "", value=0.999),
    Line("y = x.clamp(max=1).acos()", BOUND, "acos", "", value=0.999),
    Line("y = x.std(0, correction=0)", BOUND, "std", "", value=1.0),
    Line("y = x.std(0, False)", BOUND, "std", "", value=1.0),
    Line("y = x.std((0, 1))", BOUND, "std", "", value=1.0),
    Line("y = f(x).std(0)", BOUND, "std", "", value=1.0),
    Line("return p.clamp(1e-3, 1).log()", BOUND, "log", "", value=1e-4),
    Line("return a / b + c / d", BOUND, "div", "", argument=1, value=1e-4),
    Line("return a / (b + 1e-3)", EPS, "div", "", value=1e-4),
    Line("return (q * s) @ k.mT * s", Form.SCALE_FIRST, "matmul", ""),
    Line("return q @ k.mT", Form.SCALE_FIRST, "matmul", ""),
    Line("return torch.log(p)", Form.LOG_SOFTMAX, "log", ""),
    Line("return F.binary_cross_entropy(p, y)", Form.WITH_LOGITS, "binary_cross_entropy", ""),
    Line("return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)", Form.SAFE_WHERE, "div", ""),
    Line("return torch.where(next(m), a / b, 0.0)", Form.SAFE_WHERE, "div", ""),
    Line("return model(x).exp()", Form.MAX_OFF, "exp", ""),
    Line("return x.exp() / (x.exp().sum(-1) + 1e-3)", Form.MAX_OFF, "exp", ""),
    Line("return x.exp() / a.exp().sum(-1)", Form.MAX_OFF, "exp", ""),
    Line("return x.exp() * a.sum(-1)", Form.MAX_OFF, "exp", ""),
    Line("return F.linear(x, w, b)", FLOAT32, "linear", ""),
    Line("return torch.einsum(how, x, a)", FLOAT32, "einsum", ""),
    Line("return x.sum(-1) / n.item()", EPS, "div", "", argument=1, value=1e-6),
    Line("return self.q(x) @ k", FLOAT32, "matmul", ""),
    Line("out=q @ k", FLOAT32, "matmul", ""),
    Line("return x.float().sum()", FLOAT32, "sum", ""),
    Line("return F.normalize(x, eps=1e-3)", CONSTANT, "normalize", "", value=1e-4),
    Line("return x.clamp(1e-8, 1e-8)", CONSTANT, "clamp", "", value=1e-4, was=1e-8),
    Line("return x.masked_fill(m, -1e4).softmax(-1)", Form.KEPT_ROWS, "softmax", ""),
    Line("loss = F.ctc_loss(a, b, c, d, zero_infinity=True)", Form.ZERO_INFINITY, "ctc_loss", ""),
    Line("return p.log_()", BOUND, "log_", "", value=1e-4),
    Line("return torch.log(*both)", BOUND, "log", "", value=1e-4),
    Line("return x", Form.ROWS_LEFT_OUT, "", ""),
]
#: What no line of a program is.
NO_LINES = [
    "",
    ")",
    "x = torch.log(p",
    "\x1b[2Jp.log()",
    "p.log()\rimport os",
    "p.log()\x00",
    "(" * 5000,
    "p.log()" + " " * 9000,
    "-" * 3000 + "p.log()",
    "p.log() +",
    "else",
    "import os;",
    "\u202ep.log()",
]


def name(line: Line) -> str:
    return f"{line.form} {line.code[:40]}"


@pytest.mark.parametrize("line", [*RUNS, *STANDS], ids=name)
def test_a_line_keeps_its_words(line: Line) -> None:
    assert line.edit is not None
    assert line.edit.after == line.after
    assert line.edit.before == line.code


@pytest.mark.parametrize("line", STAYS, ids=name)
def test_what_is_not_clear_or_done_already_stays(line: Line) -> None:
    assert line.edit is None


@pytest.mark.parametrize("code", NO_LINES, ids=range(len(NO_LINES)))
@pytest.mark.parametrize("form", Form)
def test_what_is_no_line_is_left_alone(code: str, form: Form) -> None:
    assert of(code, form, "log", argument=0, value=1e-4, was=1e-8) is None


@pytest.mark.parametrize("line", [*RUNS, *STANDS], ids=name)
def test_what_was_done_is_not_done_again(line: Line) -> None:
    if line.form not in (Form.SCALE_FIRST, Form.MAX_OFF, Form.KEPT_ROWS):  # they show no trace of it, or another one
        assert of(line.after, line.form, line.call, argument=line.argument, value=line.value, was=line.was) is None


@pytest.mark.parametrize("line", RUNS, ids=name)
def test_good_values_stay_what_they_are(line: Line) -> None:
    torch = pytest.importorskip("torch")
    assert line.edit is not None
    before, after = (_run(torch, code) for code in (line.code, line.edit.after))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


def _run(torch: Any, code: str, **given: Any) -> Any:
    """What a line returns, of small random tensors."""
    torch.manual_seed(0)
    names = {
        "torch": torch,
        "F": torch.nn.functional,
        "x": torch.randn(3, 4),
        "p": torch.rand(3, 4) * 0.8 + 0.1,
        "y": torch.rand(3, 4),
        "a": torch.rand(3, 4) + 1,
        "b": torch.rand(3, 4) + 1,
        "c": torch.rand(3, 4) + 1,
        "q": torch.randn(2, 3, 4),
        "k": torch.randn(2, 5, 4),
        "m": torch.tensor([[False, True, False, True]] * 3),
        "t": torch.tensor([0, 1, 3]),
        "eps": 1e-12,
        **given,
    }
    body = "\n".join(f"    {line}" for line in code.split("\n"))
    exec(f"def line({', '.join(names)}):\n{body}", names)  # noqa: S102  # a line of this file
    return names["line"](**{each: value for each, value in names.items() if each in names["line"].__code__.co_varnames})


def test_a_row_without_a_key_gets_one() -> None:
    torch = pytest.importorskip("torch")
    edit = of(f"return {MASK}.softmax(-1)", Form.KEPT_ROWS, "softmax")
    assert edit is not None
    x, m = torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool)
    before, after = (_run(torch, code, x=x, m=m) for code in (edit.before, edit.after))
    assert torch.isnan(before).all()
    assert (after == 0).all()


def test_an_operand_that_is_computed_gets_a_name() -> None:
    torch = pytest.importorskip("torch")
    edit = of("return (a - b).square().sum(-1).sqrt() * 2", Form.SAFE_WHERE, "sqrt", argument=0, value=1.0)
    assert edit is not None
    assert edit.first == ("operand = (a - b).square().sum(-1)",)
    assert edit.after == "return torch.where(operand <= 0, 0.0, torch.where(operand <= 0, 1.0, operand).sqrt()) * 2"
    before, after = (_run(torch, code) for code in (edit.before, "\n".join((*edit.first, edit.after))))
    torch.testing.assert_close(after, before)
    a = torch.ones(1, 2, requires_grad=True)
    _run(torch, "\n".join((*edit.first, edit.after)), a=a, b=torch.ones(1, 2)).sum().backward()
    assert a.grad is not None
    assert torch.isfinite(a.grad).all()
    assert unified(edit, "net.py", 7, indent="  ").splitlines()[2:5] == [
        "@@ -7 +7,2 @@",
        "-  return (a - b).square().sum(-1).sqrt() * 2",
        "+  operand = (a - b).square().sum(-1)",
    ]


def test_the_name_that_is_needed_is_said() -> None:
    used = of("return x.masked_fill(m, -1e9)", CONSTANT, "masked_fill", value=-65504.0, was=-1e9)
    known = of("return torch.masked_fill(x, m, -1e9)", CONSTANT, "masked_fill", value=-65504.0, was=-1e9)
    assert used is not None
    assert known is not None
    assert (used.imports, known.imports) == (("import torch",), ())


def test_a_diff_goes_against_file_and_line() -> None:
    edit = of("y = p.log()", BOUND, "log", value=1e-4)
    assert edit is not None
    assert unified(edit, "src/net.py", 12, indent="    ") == (
        "--- a/src/net.py\n+++ b/src/net.py\n@@ -12 +12 @@\n-    y = p.log()\n+    y = p.clamp(min=1e-4).log()\n"
    )


def test_a_block_keeps_the_indentation_of_its_line() -> None:
    edit = of("return q @ k", FLOAT32, "matmul")
    assert edit is not None
    assert unified(edit, "net.py", 7, indent="  ").splitlines()[2:] == [
        "@@ -7 +7,2 @@",
        "-  return q @ k",
        "+  with torch.autocast(q.device.type, enabled=False):",
        "+      return q.float() @ k.float()",
    ]


@pytest.mark.parametrize("value", [1e-4, 6.103515625e-05, 0.5, 1234567.0, 1e-12, math.inf])
def test_a_number_is_read_back_as_it_was(value: float) -> None:
    edit = of("y = x.clamp(min=-7.0)", CONSTANT, "clamp", value=value, was=-7.0)
    assert edit is not None
    written = edit.after.removeprefix("y = x.clamp(min=").removesuffix(")")
    assert float(written.removeprefix('float("').removesuffix('")')) == value


@pytest.mark.parametrize(
    ("code", "was", "after"),
    [
        ("y = x.clamp(-1 + 1e-7, 1 - 1e-7).acos()", 1 - 1e-7, "y = x.clamp(-0.999, 0.999).acos()"),
        ("y = x.clamp(-0.9999999, 0.9999999).acos()", 0.9999999, "y = x.clamp(-0.999, 0.999).acos()"),
        ("p = p.clamp(1e-8, 1 - 1e-7)", 1 - 1e-7, "p = p.clamp(1e-8, 0.999)"),
        ("p = p.clamp(max=1 - 1e-7)", 1 - 1e-7, "p = p.clamp(max=0.999)"),
    ],
)
def test_both_ends_that_become_one_are_moved(code: str, was: float, after: str) -> None:
    edit = rewritten(code, Form.CONSTANT, Asked("clamp", value=1 - 2.0**-10, was=was))
    assert edit is not None
    assert edit.after == after
