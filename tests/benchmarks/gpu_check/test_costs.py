"""What watching costs is measured for each training and variant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_check import costs, page

SETTINGS = costs.settings(tiny=True)


@pytest.mark.parametrize("title", SETTINGS)
def test_each_variant_and_an_incident_are_measured(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "WARM_UP", 1)
    monkeypatch.setattr(costs, "BLOCK", 1)

    rows = costs.measure(replace(SETTINGS[title], rounds=2), torch.device("cpu"))

    incident = ["an incident, in steps"] if SETTINGS[title].half is torch.float16 else []
    assert list(rows) == ["unwatched", "ampscope", "ampscope every=1", "detect_anomaly", *incident]
    assert rows["unwatched"]["ratio"] == [1.0, 1.0, 1.0]
    assert "detect_anomaly" in page.costs({title: rows})
