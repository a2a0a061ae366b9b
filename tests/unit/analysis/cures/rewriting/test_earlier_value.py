"""A probability that has a name in one statement, and a logarithm of it in another: one statement from the logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.analysis.cures import own_words
from ampscope.analysis.cures.rewriting.applied import applied
from ampscope.analysis.cures.rewriting.source_file import files_below, read
from ampscope.analysis.results import FormTried, SourceLine
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
        "    p = torch.softmax(net(z), -1)\n    return -torch.log(p)\n",
        "    p = torch.softmax(F.dropout(z), -1)\n    return -torch.log(p)\n",
        "    p = y\n    return -torch.log(p)\n",
        "    return lambda: torch.log(p)\np = torch.softmax(1, -1)\n",
    ],
)
def test_what_the_name_may_not_stand_for_any_more_is_left_alone(tmp_path: Path, body: str) -> None:
    assert changed(tmp_path, body, Form.LOG_SOFTMAX, "torch.log(p)".partition("(")[0].rpartition(".")[2]) is None
