"""Changes beside the line that failed: a scaling in a later one, the call of ``watch``, a conversion."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.analysis.cures import own_words
from ampscope.analysis.cures.own_words import Program
from ampscope.analysis.results import FormTried, SourceLine
from ampscope.cures.rewriting.dtype_words import converted
from ampscope.cures.rewriting.edit import applied
from ampscope.cures.rewriting.source_file import files_below, read
from ampscope.trace.schema import LOSS_CODE, Form

HEAD = "import torch\n\n\ndef forward(self, q, k, v):\n"


def place(line: int, text: str) -> SourceLine:
    return SourceLine(file="net.py", line=line, function="f", code=text.splitlines()[line - 1].strip())


def scaled(root: Path, body: str) -> str | None:
    """A body with the scale of its first line's product put first; None where it stays."""
    (root / "net.py").write_text(HEAD + body)
    with files_below(root):
        form = FormTried(form=Form.SCALE_FIRST, call="bmm", source=place(5, HEAD + body), argument=0, value=0.125)
        diff, source = own_words.of_form(form), read(root / "net.py")
    assert source is not None
    text = applied(diff, source) if diff is not None else None
    return text.removeprefix(HEAD) if text is not None else None


@pytest.mark.parametrize(
    ("body", "after"),
    [
        (
            "    y = torch.bmm(q, k.mT)  # large\n    return torch.bmm((y / q.shape[-1] ** 0.5).softmax(-1), v)\n",
            "    y = torch.bmm(q / q.shape[-1] ** 0.5, k.mT)  # large\n    return torch.bmm(y.softmax(-1), v)\n",
        ),
        ("    y = q @ k.mT\n    y = y * self.scale\n", "    y = (q * self.scale) @ k.mT\n    y = y\n"),
        (
            "    y = q.bmm(k)\n    return softmax(y / 8)\n",
            "    y = (q / 8).bmm(k)\n    return softmax(y)\n",
        ),
        ("    y = q @ k.mT\n    print(y)\n    return y / 8\n", None),
        ("    y = q @ k.mT\n    s = q.size(0)\n    return y / s\n", None),
        ("    y = q @ k.mT\n    return y / self.temperature(q)\n", None),
        ("    y = q @ k.mT\n    return 8 / y\n", None),
        ("    y = q @ k.mT + 1\n    return y / 8\n", None),
        ("    y = (q * 8) @ k.mT\n    return y / 8\n", None),
    ],
)
def test_a_scale_of_a_later_line_goes_before_the_product(tmp_path: Path, body: str, after: str | None) -> None:
    assert scaled(tmp_path, body) == after


def kept(root: Path, text: str, line: int, *modules: str) -> str | None:
    (root / "net.py").write_text(text)
    with files_below(root):
        diff, source = own_words.of_kept(modules, Program(watched_at=place(line, text))), read(root / "net.py")
    assert source is not None
    return applied(diff, source) if diff is not None else None


@pytest.mark.parametrize(
    ("text", "line", "modules", "after"),
    [
        (
            "import ampscope\nif True:\n    scope = ampscope.watch(\n        self.net, s\n    )\n",
            4,
            ("a", "b.0"),
            (
                'import ampscope\nif True:\n    ampscope.keep_fp32(self.net, ["a", "b.0"])\n'
                "    scope = ampscope.watch(\n        self.net, s\n    )\n"
            ),
        ),
        (
            "from ampscope import watch\nwith watch(model=net) as scope:\n    pass\n",
            2,
            ("a",),
            (
                'import ampscope\nfrom ampscope import watch\nampscope.keep_fp32(net, ["a"])\n'
                "with watch(model=net) as scope:\n    pass\n"
            ),
        ),
        (
            "import ampscope as scopes\nwatched = scopes.watch(net)\n",
            2,
            ("a",),
            'import ampscope as scopes\nscopes.keep_fp32(net, ["a"])\nwatched = scopes.watch(net)\n',
        ),
        ("import ampscope\nnet = Net(); scope = ampscope.watch(net)\n", 2, ("a",), None),
        ("import ampscope\nscope = ampscope.watch(net := Net())\n", 2, ("a",), None),
        ("from own import watch\nwatch(net, s)\n", 2, ("a",), None),
        ("from ampscope import watch\nampscope = 1\nwatch(net, s)\n", 3, ("a",), None),
        (
            "import ampscope\nampscope.watch([gen, disc], s)\n",
            2,
            ("Gen[0].a", "Disc[1].b", "Disc[1]"),
            (
                'import ampscope\nampscope.keep_fp32(gen, ["a"])\nampscope.keep_fp32(disc, ["b", ""])\n'
                "ampscope.watch([gen, disc], s)\n"
            ),
        ),
        ("import ampscope\nampscope.watch(make(), s)\n", 2, ("a",), None),
        ("import ampscope\nampscope.watch([gen], s)\n", 2, ("Disc[1].b",), None),
        ("import ampscope\nwatched(net, s)\n", 2, ("a",), None),
        ("import ampscope\nampscope.watch(net, s)\n", 2, ("a", LOSS_CODE), None),
    ],
)
def test_modules_are_kept_where_the_model_is_watched(
    tmp_path: Path, text: str, line: int, modules: tuple[str, ...], after: str | None
) -> None:
    assert kept(tmp_path, text, line, *modules) == after


def test_a_name_of_a_module_is_a_text(tmp_path: Path) -> None:
    hostile = 'a"])\nimport os'
    text = kept(tmp_path, "import ampscope\nampscope.watch(net, s)\n", 2, hostile)
    assert text == 'import ampscope\nampscope.keep_fp32(net, ["a\\"])\\nimport os"])\nampscope.watch(net, s)\n'


@pytest.mark.parametrize(
    ("code", "dtype", "after"),
    [
        ("y = x.half().exp()", "float32", "y = x.float().exp()"),
        ("y = x.half().exp()", "bfloat16", "y = x.bfloat16().exp()"),
        ("y = x.to(torch.bfloat16)", "float32", "y = x.to(torch.float32)"),
        ("y = x.to(torch.bfloat16)", "bfloat16", None),
        ('y = x.half()  # ".half()" is small', "float32", 'y = x.float()  # ".half()" is small'),
        ("y = cut.half(3)", "float32", None),
        ("y = x.to(y.dtype)", "float32", "y = x.to(torch.float32)"),
        ("y = x.to(device, dtype=dtype)", "bfloat16", "y = x.to(device, dtype=torch.bfloat16)"),
        ("y = x.to(y.dtype) + z.to(dtype)", "float32", None),
        ("y = x.to(device)", "float32", None),
        ("y = x.half(", "float32", None),
    ],
)
def test_a_conversion_names_another_dtype(code: str, dtype: str, after: str | None) -> None:
    edit = converted(code, dtype)
    assert (edit.after if edit is not None else None) == after
