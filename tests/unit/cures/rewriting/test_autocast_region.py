"""Autocast regions in another dtype: the region that is meant, however the program makes it, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.analysis.results import CodeLine
from ampscope.cures.rewriting.edit import applied
from ampscope.cures.rewriting.program.around_model_call import in_dtype
from ampscope.cures.rewriting.source_file import files_below, read


def changed(root: Path, text: str, dtype: str) -> str | None:
    """The program with the region around each ``model(x)`` in another dtype; None where nothing was changed."""
    (root / "train.py").write_bytes(text.encode())
    called = [(number, row) for number, row in enumerate(text.splitlines(), start=1) if "model(x)" in row]
    with files_below(root):
        diff = in_dtype([CodeLine("train.py", number, row.strip()) for number, row in called], dtype)
        source = read(root / "train.py")
    assert source is not None
    return applied(diff, source) if diff is not None else None


BODY = "    y = model(x)\n"


@pytest.mark.parametrize(
    ("text", "dtype", "was", "now"),
    [
        ("import torch\nwith torch.autocast('cpu', torch.float16):\n" + BODY, "bfloat16", "torch.float16", None),
        ("import torch\nwith torch.autocast('cuda'):\n" + BODY, "float32", "'cuda')", "'cuda', enabled=False)"),
        (
            "import torch\nwith torch.autocast('cuda', enabled=amp), other():\n" + BODY,
            "float32",
            "enabled=amp",
            "enabled=False",
        ),
        (
            "import torch\nfrom torch.cuda.amp import autocast\nwith autocast(amp):\n" + BODY,
            "float32",
            "(amp)",
            "(False)",
        ),
        (
            "import torch\r\nwith torch.autocast('cuda'):\r\n" + BODY.replace("\n", "\r\n"),
            "float32",
            "'cuda')",
            "'cuda', enabled=False)",
        ),
        (
            "import torch\nctx = torch.amp.autocast('cuda') if gpu else nullcontext()\nwith ctx:\n" + BODY,
            "bfloat16",
            "'cuda')",
            "'cuda', dtype=torch.bfloat16)",
        ),
        (
            "import torch\n@torch.autocast('cuda')\ndef step(x):\n" + BODY,
            "bfloat16",
            "'cuda')",
            "'cuda', dtype=torch.bfloat16)",
        ),
        (
            "import torch\nwith torch.autocast('cuda'):\n    with torch.autocast('cpu'):\n    " + BODY,
            "float32",
            "'cpu')",
            "'cpu', enabled=False)",
        ),
    ],
)
def test_the_region_around_the_call_gets_the_dtype(
    tmp_path: Path, text: str, dtype: str, was: str, now: str | None
) -> None:
    assert changed(tmp_path, text, dtype) == text.replace(was, now or f"torch.{dtype}")


def test_of_two_regions_both_are_changed(tmp_path: Path) -> None:
    text = "import torch\nwith torch.autocast('cuda'):\n" + BODY + "with torch.autocast('cuda'):\n" + BODY
    assert changed(tmp_path, text, "float32") == text.replace("'cuda')", "'cuda', enabled=False)")


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ny = model(x)\nwith torch.autocast('cuda'):\n    pass\n",
        "import torch\nwith torch.autocast('cuda'):\n    def inner(x):\n        return model(x)\n",
        "from mine import autocast\nwith autocast('cuda'):\n" + BODY,
        "import torch\ndef train(torch):\n    with torch.autocast('cuda'):\n    " + BODY,
        "import torch\nwith torch.autocast('cuda', enabled=False):\n" + BODY,
        "import torch\nwith torch.autocast('cuda', **options):\n" + BODY,
        "import torch\nwith accelerator.autocast():\n" + BODY,
        "import torch\nctx = torch.autocast('cuda')\nctx = nullcontext()\nwith ctx:\n" + BODY,
        "import torch\ndef train(ctx=torch.autocast('cuda')):\n    with ctx:\n    " + BODY,
        "import torch\nwith torch.autocast('cuda'):\n" + BODY + "with mine():\n" + BODY,
    ],
)
def test_what_is_not_known_to_be_that_region_is_left_alone(tmp_path: Path, text: str) -> None:
    assert changed(tmp_path, text, "float32") is None
