from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampscope.analysis.replay.timeline import Timeline, timeline
from tests.support.paths import APP
from tests.support.scenes import HOSTILE
from tests.support.trace_builder import TraceBuilder
from tests.support.traced_steps import linear_step, recorded


@pytest.fixture(autouse=True)
def _app_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(APP)


def unpacked(raw: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a browser makes of the bytes."""
    body = zlib.decompress(raw[2:])
    length = int.from_bytes(body[:8], "little")
    told = json.loads(body[8 : 8 + length])
    place, columns = 8 + -(-length // 8) * 8, {}
    for name, kind, count in told["columns"]:
        columns[name] = np.frombuffer(body, f"<{kind}", count, place)
        place += -(-columns[name].nbytes // 8) * 8
    return told, columns


def drawn(folder: Path) -> Timeline:
    trace = TraceBuilder(folder / "run")
    linear_step(trace)
    return timeline(recorded(trace))


def test_what_is_packed_can_be_read_again(tmp_path: Path) -> None:
    from blocks.components.step_track import track_bytes, track_height

    step = drawn(tmp_path)
    raw = track_bytes(step, "a step", "a sentence")
    told, columns = unpacked(raw)
    assert int.from_bytes(raw[:2], "little") == track_height(step) == sum(told["lanes"].values())
    assert (told["name"], told["label"], told["count"]) == ("a step", "a sentence", 11)
    assert columns["seq"].cumsum().tolist() == step.seq.tolist()
    assert [told["ops"][at] for at in columns["op"]][:4] == ["x", "weight", "_to_copy", "mm"]
    assert [told["modules"][at - 1] if at else "" for at in columns["module"]][3:6] == ["fc", "head.soft", ""]
    assert (np.arange(11) - columns["back"])[7:10].tolist() == [3, 3, 2]
    assert columns["headroom"][3] / 4 == pytest.approx(step.headroom[3], abs=0.125)
    first = columns["spanFirst"].cumsum()
    names = [told["modules"][at] for at in columns["spanModule"]]
    assert list(zip(names, first.tolist(), columns["spanOps"].tolist(), strict=True))[:2] == [
        ("fc", 0, 3),
        ("head", 4, 0),
    ]


def test_another_step_has_a_lane_and_less_than_no_headroom_is_none(tmp_path: Path) -> None:
    from dataclasses import replace

    from blocks.components.step_track import UNKNOWN, track_bytes, track_height

    step = drawn(tmp_path)
    other = replace(step, other=np.array([-3.0, np.nan] + [1.0] * 9), parted=2)
    told, columns = unpacked(track_bytes(other, "", ""))
    assert columns["other"].tolist() == [0, UNKNOWN] + [4] * 9
    assert told["parted"] == 2
    assert track_height(other) > track_height(step)


def test_a_deep_program_has_rows_for_its_outer_modules_alone(tmp_path: Path) -> None:
    from blocks.components.step_track import track_bytes, track_height

    heights = []
    for depth in (8, 20):
        trace = TraceBuilder(tmp_path / str(depth))
        trace.op(trace.site(module=".".join("abcdefghijklmnopqrst"[:depth])))
        step = timeline(recorded(trace))
        heights.append(track_height(step))
        assert unpacked(track_bytes(step, "", ""))[1]["spanDepth"].max() == 7
    assert heights[0] == heights[1]


def test_names_are_bounded_and_without_what_turns_text_around(tmp_path: Path) -> None:
    from blocks.components.step_track import track_bytes

    trace = TraceBuilder(tmp_path / "run")
    trace.op(trace.site(HOSTILE * 9, module=HOSTILE * 9))
    told, _ = unpacked(track_bytes(timeline(recorded(trace)), "", ""))
    assert all(len(name) <= 80 for name in told["ops"])
    assert all(len(name) <= 200 for name in told["modules"])
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in json.dumps(told, ensure_ascii=False)


def test_a_dtype_whose_range_is_not_known_has_none(tmp_path: Path) -> None:
    from blocks.components.step_track import track_bytes

    trace = TraceBuilder(tmp_path / "run")
    trace.op(trace.site("aten._fft_r2c.default", out_dtypes=("complex64",)))
    told, _ = unpacked(track_bytes(timeline(recorded(trace)), "", ""))
    assert [(name, width) for name, _, width in told["dtypes"]] == [("complex64", 0)]


def test_found_ops_are_a_bit_each() -> None:
    from blocks.components.step_track import found_bits

    bits = np.unpackbits(
        np.frombuffer(zlib.decompress(found_bits(np.array([0, 9, 19]), 20)), np.uint8), bitorder="little"
    )
    assert np.flatnonzero(bits).tolist() == [0, 9, 19]


def test_a_large_step_is_small_on_the_wire(tmp_path: Path) -> None:
    from blocks.components.step_track import track_bytes

    rng = np.random.default_rng(0)
    count, blocks = 50_000, 100
    one = drawn(tmp_path)
    spans = np.arange(0, count, 3)
    large = Timeline(
        seq=np.arange(count),
        ops=tuple((f"aten.op{at}.default", "") for at in range(60)),
        op=np.tile(rng.integers(0, 60, count // blocks), blocks),
        modules=tuple(f"model.layers.{at // 11}.part{at % 11}" for at in range(11 * blocks)),
        module=np.repeat(np.arange(11 * blocks), -(-count // (11 * blocks)))[:count],
        dtypes=("float16", "float32"),
        dtype=np.tile(rng.integers(0, 2, count // blocks), blocks),
        headroom=rng.normal(10, 2, count),
        spread=rng.normal(14, 3, count),
        marks=np.zeros(count, np.int64),
        forward=np.where(np.arange(count) > count // 2, count - np.arange(count), -1),
        spans=type(one.spans)(
            first=spans, last=spans + 2, depth=np.full(len(spans), 3), module=np.arange(len(spans)) % (11 * blocks)
        ),
        phases=(),
        other=rng.normal(10, 2, count),
        parted=None,
    )
    assert len(track_bytes(large, "", "")) < 300_000
