"""What the process group tells, and that asking it never fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ampscope.capture.torch_support import process_group

PRIVATE = ["_get_default_store", "_world"]


def test_without_one() -> None:
    assert not process_group.is_joined()
    assert process_group.rank_of() is None
    assert process_group.agreed("key", "mine") is None
    assert process_group.collectives_so_far() == 0


@pytest.mark.usefixtures("alone")
class TestWithOne:
    def test_the_first_answer_is_everybodys(self) -> None:
        assert process_group.agreed("key", "mine") == "mine"
        assert process_group.agreed("key", "that of a rank which comes later") == "mine"
        assert process_group.agreed("another key", "theirs") == "theirs"

    def test_rank(self) -> None:
        assert process_group.rank_of() == (0, 1)

    def test_a_collective_is_counted_in_whichever_group(self) -> None:
        group = dist.new_group([0])
        before = process_group.collectives_so_far()
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=group)
        after = process_group.collectives_so_far()
        assert before is not None
        assert after == before + 2

    @pytest.mark.parametrize("name", PRIVATE)
    def test_a_torch_without_a_private_name(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.delattr(dist.distributed_c10d, name)
            answers: list[Any] = [process_group.agreed("key", "mine")]
            if name == "_world":  # without which torch itself does not know whether there is a group
                return
            answers.append(process_group.collectives_so_far())
        assert answers[0] is None
