"""Names as the file means them: what its imports, assignments and arguments make of them at a line."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from ampscope.analysis.cures import own_words
from ampscope.analysis.results import FormTried, SourceLine
from ampscope.cures.rewriting.edit import applied
from ampscope.cures.rewriting.names import Kind, scope_at
from ampscope.cures.rewriting.source_file import files_below, read
from ampscope.trace.schema import Form

PROGRAM = textwrap.dedent("""
    from __future__ import annotations
    import torch as T, numpy as np
    from torch import nn
    from torch.nn.functional import softmax as sm
    from . import ops
    import torch.utils.data
    if TYPE_CHECKING:
        import typed
    try:
        import apex
    except ImportError:
        apex = None
    exp = T.exp
    SIZE = 2 * 8
    both = 1
    both = T.ones(3)
    class Net(nn.Module):
        scale = 0.5
        def forward(self, x, F, n: int, eps=1e-8, *rest):
            global counted
            import torch.nn.functional as local
            b, c = x.shape
            m = len(x) + n
            nn = x.sum()
            for i in range(3):
                with x as held: pass
            y = [np for np in x if (found := x)]
            return y
    def later():
        return local
""")


@pytest.mark.parametrize(
    ("name", "kind", "path"),
    [
        ("T", Kind.IMPORTED, "torch"),
        ("np", Kind.IMPORTED, "numpy"),
        ("sm", Kind.IMPORTED, "torch.nn.functional.softmax"),
        ("ops", Kind.IMPORTED, "..ops"),
        ("torch", Kind.IMPORTED, "torch"),
        ("local", Kind.IMPORTED, "torch.nn.functional"),
        ("apex", Kind.IMPORTED, "apex"),
        ("exp", Kind.IMPORTED, "torch.exp"),
        ("typed", Kind.OPEN, ""),
        ("undefined", Kind.OPEN, ""),
        ("scale", Kind.OPEN, ""),
        ("later", Kind.VALUE, ""),
        ("counted", Kind.VALUE, ""),
        ("F", Kind.VALUE, ""),
        ("nn", Kind.VALUE, ""),
        ("rest", Kind.VALUE, ""),
        ("held", Kind.VALUE, ""),
        ("found", Kind.VALUE, ""),
        ("both", Kind.MIXED, ""),
        *((name, Kind.NUMBER, "") for name in ("SIZE", "n", "eps", "b", "c", "m", "i")),
    ],
)
def test_a_name_is_what_the_program_made_it(name: str, kind: Kind, path: str) -> None:
    line = PROGRAM.split("\n").index("        return y") + 1
    assert scope_at(ast.parse(PROGRAM), line).meaning(name) == (kind, path)


@pytest.mark.parametrize(
    ("after", "path", "spelled"),
    [
        ("return y", "torch.where", "T.where"),
        ("return y", "torch.nn.functional.logsigmoid", "local.logsigmoid"),
        ("return y", "torch.nn.functional.softmax", "sm"),
        ("return local", "torch.nn.functional.relu", "nn.functional.relu"),
        ("import torch.nn.functional as local", "torch.nn.functional.relu", "T.nn.functional.relu"),
        ("return y", "apex.amp", ""),  # it may be None
        ("return y", "ampscope.watch", ""),
    ],
)
def test_what_is_written_has_a_name_there(after: str, path: str, spelled: str) -> None:
    line = [row.strip() for row in PROGRAM.split("\n")].index(after) + 1
    assert scope_at(ast.parse(PROGRAM), line).spelled(path) == spelled


class Case(NamedTuple):
    """A program, whose last line is changed, and what becomes of that line."""

    program: str
    form: Form
    call: str
    after: str | None
    asked: Mapping[str, Any] = MappingProxyType({})
    imports: bool = False  #: whether the file gets ``import torch``


BOUND: dict[str, Any] = {"argument": 0, "value": 1e-4}
CASES = [
    Case(
        "from torch.nn.functional import softmax\nimport torch\ny = -torch.log(softmax(z, dim=-1))",
        Form.LOG_SOFTMAX,
        "log",
        "y = -torch.nn.functional.log_softmax(z, dim=-1)",
    ),
    Case(
        "from torch.nn.functional import softmax\nfrom torch import log\ny = -log(softmax(z, dim=-1))",
        Form.LOG_SOFTMAX,
        "log",
        "y = -torch.nn.functional.log_softmax(z, dim=-1)",
        imports=True,
    ),
    Case("from mine import softmax\nimport torch\ny = -torch.log(softmax(z, dim=-1))", Form.LOG_SOFTMAX, "log", None),
    Case(
        "from torch.nn.functional import softmax\ntorch = 1\ny = softmax(z, dim=-1).log()",
        Form.LOG_SOFTMAX,
        "log",
        None,
    ),
    Case(
        "import torch\nB, F = h.shape\ny = torch.log(torch.sigmoid(z)).view(B, F)",
        Form.LOGSIGMOID,
        "log",
        "y = torch.nn.functional.logsigmoid(z).view(B, F)",
    ),
    Case(
        "import torch, torch.nn.functional as F\ny = torch.log(torch.sigmoid(z)).view(B)",
        Form.LOGSIGMOID,
        "log",
        "y = F.logsigmoid(z).view(B)",
    ),
    Case(
        "import torch\nfrom math import log\ny = torch.log(x) - log(8.0)",
        Form.OPERAND_BOUND,
        "log",
        "y = torch.log(x.clamp(min=1e-4)) - log(8.0)",
        BOUND,
    ),
    Case(
        "import torch\nfrom torch import log\ny = torch.log(x) - log(z)",
        Form.OPERAND_BOUND,
        "log",
        "y = torch.log(x.clamp(min=1e-4)) - log(z.clamp(min=1e-4))",
        BOUND,
    ),
    Case("import torch\nfrom own import log\ny = torch.log(x) - log(z)", Form.OPERAND_BOUND, "log", None, BOUND),
    Case("y = log(x) - log(z)", Form.OPERAND_BOUND, "log", None, BOUND),
    Case("y = log(x)", Form.OPERAND_BOUND, "log", "y = log(x.clamp(min=1e-4))", BOUND),
    Case("import torch as T\ny = T.sum(z, -1)", Form.IN_FLOAT32, "sum", "y = T.sum(z.float(), -1)"),
    Case("import torch\nT = torch.ones(3)\ny = T.sum(-1)", Form.IN_FLOAT32, "sum", "y = T.float().sum(-1)"),
    Case("import own as T\ny = T.sum(z, -1)", Form.IN_FLOAT32, "sum", None),
    Case(
        "import torch as T\ny = T.matmul(q, k)",
        Form.IN_FLOAT32,
        "matmul",
        "with T.autocast(q.device.type, enabled=False):\n    y = T.matmul(q.float(), k.float())",
    ),
    Case("import torch as T\ny = T.matmul(q, k) / 8", Form.SCALE_FIRST, "matmul", "y = T.matmul(q / 8, k)"),
    Case(
        "import torch as T\ny = T.div(a, b)",
        Form.OPERAND_BOUND,
        "div",
        "y = T.div(a, b.clamp(min=1e-4))",
        {"argument": 1, "value": 1e-4},
    ),
    Case("y = [T.log() for T in x]", Form.OPERAND_BOUND, "log", "y = [T.clamp(min=1e-4).log() for T in x]", BOUND),
    Case("delta = 1e-8\ny = (d + delta).sqrt()", Form.ADDED_EPS, "sqrt", "y = (d + max(delta, 1e-4)).sqrt()", BOUND),
    Case("delta = a - b\ny = (d + delta).sqrt()", Form.ADDED_EPS, "sqrt", "y = (d + delta + 1e-4).sqrt()", BOUND),
    Case(
        "max = x.amax()\neps = 1e-8\ny = (d + eps).sqrt()", Form.ADDED_EPS, "sqrt", None, BOUND
    ),  # it is not Python's max
    Case(
        "import torch.nn as nn\ny = nn.functional.relu(1 / x)",
        Form.SAFE_WHERE,
        "div",
        "y = nn.functional.relu(1 / torch.where(x == 0, 1.0, x))",
        imports=True,
    ),
    Case("th = 3\nz = 4\ny = 1 / x", Form.SAFE_WHERE, "div", "y = 1 / torch.where(x == 0, 1.0, x)", imports=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.program)
def test_a_line_is_changed_by_its_own_names(tmp_path: Path, case: Case) -> None:
    path, rows = tmp_path / "net.py", case.program.split("\n")
    path.write_text(case.program + "\n")
    place = SourceLine(file="net.py", line=len(rows), function="f", code=rows[-1])
    with files_below(tmp_path):
        diff = own_words.of_form(FormTried(form=case.form, call=case.call, source=place, **case.asked))
        source = read(path)
    assert source is not None
    changed = applied(diff, source) if diff is not None else None
    if case.after is None:
        assert changed is None
    else:
        head = ["import torch"] if case.imports else []
        assert changed == "\n".join([*head, *rows[:-1], case.after, ""])


@pytest.mark.parametrize(
    ("code", "call", "form"),
    [
        ("y = T.sum(z, -1)", "sum", Form.IN_FLOAT32),
        ("y = T.log(z)", "log", Form.OPERAND_BOUND),
        ("y = T.matmul(q, k)", "matmul", Form.IN_FLOAT32),
        ("y = torch.log(z) + log(z)", "log", Form.OPERAND_BOUND),
        ("y = torch.log(softmax(z, -1))", "log", Form.LOG_SOFTMAX),
    ],
)
def test_what_may_be_either_is_not_changed_without_the_file(tmp_path: Path, code: str, call: str, form: Form) -> None:
    place = SourceLine(file="gone.py", line=1, function="f", code=code)
    with files_below(tmp_path):
        assert own_words.of_form(FormTried(form=form, call=call, source=place, argument=0, value=1e-4)) is None
