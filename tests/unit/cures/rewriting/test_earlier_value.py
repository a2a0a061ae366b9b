"""A probability that has a name in one statement, and a logarithm of it in another: one statement from the logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ampscope.analysis.cures import own_words
from ampscope.analysis.results import FormTried, SourceLine
from ampscope.cures.rewriting.edit import applied
from ampscope.cures.rewriting.source_file import files_below, read
from ampscope.trace.schema import Form

HEAD = "import torch\nimport torch.nn.functional as F\n\n\ndef loss(z, y, t):\n"


def changed(root: Path, body: str, form: Form, call: str) -> str | None:
    """The body with the call on its last line that names ``p`` in that form; None where it stays."""
    (root / "net.py").write_text(HEAD + body)
    rows = (HEAD + body).splitlines()
    number = max(at for at, row in enumerate(rows, start=1) if call in row)
    place = SourceLine(file="net.py", line=number, function="loss", code=rows[number - 1].strip())
    with files_below(root):
        diff = own_words.of_form(FormTried(form=form, call=call, source=place))
        source = read(root / "net.py")
    assert source is not None
    text = applied(diff, source) if diff is not None else None
    return text.removeprefix(HEAD) if text is not None else None


P = "    p = torch.softmax(z / t, -1)\n"


@pytest.mark.parametrize(
    ("body", "form", "call", "change"),
    [
        (P + "    return -torch.log(p)\n", Form.LOG_SOFTMAX, "log", ("torch.log(p)", "torch.log_softmax(z / t, -1)")),
        (
            "    p = z.softmax(-1).half()\n    return -p.clamp(min=1e-8).log().gather(1, y)\n",
            Form.LOG_SOFTMAX,
            "log",
            ("p.clamp(min=1e-8).log()", "z.log_softmax(-1)"),
        ),
        (
            "    e = torch.exp(z / t)\n    p = e.diagonal()\n    return -torch.log(p / e.sum(dim=1)).mean()\n",
            Form.LOG_SOFTMAX,
            "log",
            ("-torch.log(p / e.sum(dim=1))", "-(z / t).log_softmax(dim=1).diagonal()"),
        ),
        (
            "    p = z.sigmoid()\n    if y is None:\n        q = torch.log(1 - p)\n    return q\n",
            Form.LOGSIGMOID,
            "log",
            ("torch.log(1 - p)", "F.logsigmoid(-z)"),
        ),
        (
            "    p = torch.sigmoid(z)\n    return F.binary_cross_entropy(p, y)\n",
            Form.WITH_LOGITS,
            "binary_cross_entropy",
            ("F.binary_cross_entropy(p, y)", "F.binary_cross_entropy_with_logits(z, y)"),
        ),
    ],
)
def test_it_is_computed_from_the_logits(
    tmp_path: Path, body: str, form: Form, call: str, change: tuple[str, str]
) -> None:
    after = changed(tmp_path, body, form, call)
    assert after == body.replace(*change)


@pytest.mark.parametrize(
    "body",
    [
        P + "    z = z + 1\n    return -torch.log(p)\n",
        P + "    t.mul_(2)\n    return -torch.log(p)\n",
        P + "    z[0] = 0\n    return -torch.log(p)\n",
        P + "    z += 1\n    return -torch.log(p)\n",
        P + "    p = p / 2\n    return -torch.log(p)\n",
        P + "    for z in y:\n        q = torch.log(p)\n    return q\n",
        "    if t:\n        p = torch.softmax(z, -1)\n    return -torch.log(p)\n",
        "    p = torch.softmax(z, net(z))\n    return -torch.log(p)\n",
        "    p_logits = y\n    p = torch.softmax(net(z), -1)\n    return -torch.log(p)\n",
        P + "    return -torch.log(p) * torch.log(y)\n",
        "    return -torch.softmax(z, -1).log() * y.log()\n",
        "    p = y\n    return -torch.log(p)\n",
        "    return lambda: torch.log(p)\np = torch.softmax(1, -1)\n",
    ],
)
def test_what_the_name_may_not_stand_for_any_more_is_left_alone(tmp_path: Path, body: str) -> None:
    assert changed(tmp_path, body, Form.LOG_SOFTMAX, "torch.log(p)".partition("(")[0].rpartition(".")[2]) is None


@pytest.mark.parametrize("given", ["net(z)", "F.dropout(z)"])
def test_what_is_computed_once_gets_a_name(tmp_path: Path, given: str) -> None:
    before = f"    p = torch.softmax({given}, -1).half()\n    z = z + 1\n    return -torch.log(p + 1e-8) * p\n"
    assert changed(tmp_path, before, Form.LOG_SOFTMAX, "log") == (
        f"    p_logits = {given}\n"
        "    p = torch.softmax(p_logits, -1).half()\n"
        "    z = z + 1\n"
        "    return -torch.log_softmax(p_logits, -1) * p\n"
    )


def test_every_logarithm_of_a_line_is_computed_from_its_logits(tmp_path: Path) -> None:
    before = "    q = torch.softmax(net(z), -1)\n    p = y.softmax(-1)\n    return (p * (p.log() - q.log())).sum()\n"
    assert changed(tmp_path, before, Form.LOG_SOFTMAX, "log") == (
        "    q_logits = net(z)\n"
        "    q = torch.softmax(q_logits, -1)\n"
        "    p = y.softmax(-1)\n"
        "    return (p * (y.log_softmax(-1) - torch.log_softmax(q_logits, -1))).sum()\n"
    )


MEAN = "    m = x.mean(-1, keepdim=True)\n"


@pytest.mark.parametrize(
    ("body", "change"),
    [
        (
            MEAN + "    v = (x * x).mean(-1, keepdim=True) - m**2\n    return (x - m) / v\n",
            ("(x * x).mean(-1, keepdim=True) - m**2", "(x - m).square().mean(-1, keepdim=True)"),
        ),
        (
            "    q = x.pow(2).mean(0)\n    m = x.mean(0)\n    v = q - m * m\n    return v\n",
            ("q - m * m", "(x - x.mean(0, keepdim=True)).square().mean(0)"),
        ),
    ],
)
def test_a_variance_of_named_means_is_that_of_centred_squares(
    tmp_path: Path, body: str, change: tuple[str, str]
) -> None:
    assert changed(tmp_path, body, Form.CENTRED, "v =") == body.replace(*change)


@pytest.mark.parametrize(
    "body",
    [
        MEAN + "    x = x + 1\n    v = (x * x).mean(-1, keepdim=True) - m**2\n    return v\n",
        MEAN + "    v = (x * x).mean(0, keepdim=True) - m**2\n    return v\n",
        "    m = net(x).mean(-1)\n    v = net(x).square().mean(-1) - m**2\n    return v\n",
    ],
)
def test_a_mean_of_something_else_makes_no_variance(tmp_path: Path, body: str) -> None:
    assert changed(tmp_path, body, Form.CENTRED, "v =") is None


def test_two_calls_of_one_line_are_changed_together(tmp_path: Path) -> None:
    body = "    return (torch.log(y) + z**2 / y).mean()\n"
    (tmp_path / "net.py").write_text(HEAD + body)
    row = (HEAD + body).count("\n")
    place = SourceLine(file="net.py", line=row, function="loss", code=body.strip())
    bound = FormTried(form=Form.OPERAND_BOUND, call="log", source=place, argument=0, value=1e-4)
    with files_below(tmp_path):
        diff = own_words.of_forms([bound, replace(bound, call="div", argument=1)])
        source = read(tmp_path / "net.py")
        assert own_words.of_forms([bound, replace(bound, call="sqrt")]) is None, "one is not there"
    assert diff is not None
    assert source is not None
    after = "    return (torch.log(y.clamp(min=1e-4)) + z**2 / y.clamp(min=1e-4)).mean()\n"
    assert applied(diff, source) == HEAD + after
