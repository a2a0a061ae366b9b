from __future__ import annotations

import io
import random
from typing import Any

import pytest

from ampscope.trace import object_store
from ampscope.trace.object_store import BLOCK, WHOLE, Blocks, ObjectState, RangedFile

CONTENT = random.Random(0).randbytes(40 * BLOCK + 17)


class CountingStore:
    """Answers with bytes of `CONTENT` and takes down which were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def read(self, _: str, start: int, end: int) -> bytes:
        self.asked.append((start, end))
        return CONTENT[start:end]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    found = CountingStore()
    monkeypatch.setattr(object_store, "store_of", lambda _: found)
    monkeypatch.setattr(object_store, "_blocks", Blocks())
    return found


def opened(size: int = len(CONTENT), written: float = 1.0) -> RangedFile:
    return RangedFile("s3://bucket/part", ObjectState(size, written))


def test_it_reads_like_a_file(store: CountingStore) -> None:
    file, same = opened(), io.BytesIO(CONTENT)
    chance = random.Random(1)
    for _ in range(200):
        place, count = chance.randrange(len(CONTENT) + 9), chance.randrange(3 * BLOCK)
        assert file.seek(place) == same.seek(place)
        assert file.read(count) == same.read(count)
        assert file.tell() == same.tell()
    assert file.seek(-5, io.SEEK_END) == len(CONTENT) - 5
    assert file.read() == CONTENT[-5:]
    buffer = bytearray(10)
    file.seek(3)
    assert file.readinto(buffer) == 10
    assert buffer == CONTENT[3:13]


def test_only_blocks_that_are_asked_for_are_fetched_and_once(store: CountingStore) -> None:
    file = opened()
    file.seek(10 * BLOCK + 5)
    file.read(2 * BLOCK)
    assert store.asked == [(10 * BLOCK, 13 * BLOCK)]
    file.seek(9 * BLOCK)
    file.read(6 * BLOCK)  # of which three blocks are known
    assert store.asked[1:] == [(9 * BLOCK, 10 * BLOCK), (13 * BLOCK, 15 * BLOCK)]
    opened().read(1)
    assert store.asked[3:] == [(0, BLOCK)]


def test_a_small_file_is_fetched_whole(store: CountingStore) -> None:
    file = opened(WHOLE)
    file.read(1)
    file.seek(-1, io.SEEK_END)
    file.read(1)
    assert store.asked == [(0, WHOLE)]


def test_a_file_that_was_written_anew_is_another(store: CountingStore) -> None:
    opened(written=1.0).read(1)
    opened(written=2.0).read(1)
    assert len(store.asked) == 2


def test_what_is_shorter_than_it_was_listed_is_gone(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(_: str, start: int, end: int) -> bytes:
        return CONTENT[start : end - 1]

    monkeypatch.setattr(store, "read", short)
    with pytest.raises(FileNotFoundError):
        opened().read(1)


def test_the_oldest_blocks_go(store: CountingStore) -> None:
    blocks, state = Blocks(most=4 * BLOCK), ObjectState(len(CONTENT), 1.0)
    reads: list[Any] = [blocks.read("s3://b/p", state, number * BLOCK, number * BLOCK + 1) for number in range(5)]
    assert len(reads) == len(store.asked) == 5
    blocks.read("s3://b/p", state, 4 * BLOCK, 4 * BLOCK + 1)
    assert len(store.asked) == 5
    blocks.read("s3://b/p", state, 0, 1)
    assert len(store.asked) == 6
