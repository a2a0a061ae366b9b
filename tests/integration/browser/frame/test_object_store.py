"""Runs in an object store, in the browser: read where they lie; a store that does not answer is told of, calmly."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")
pytest.importorskip("s3fs", reason="needs the extra for S3")

from playwright.sync_api import expect

from tests.integration.browser.driver import goto, serve
from tests.integration.browser.watched import Watched
from tests.support.scenes import overflow
from tests.support.stores.s3_server import BUCKET, S3Server, client, s3_server

pytestmark = [pytest.mark.browser, pytest.mark.slow]

URL = f"s3://{BUCKET}/runs"


def put_run(server: S3Server, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            key = f"runs/{folder.name}/{path.relative_to(folder).as_posix()}"
            client(server).put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())


def test_a_run_in_a_bucket_is_opened_and_a_store_that_is_gone_is_told(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = watched.page
    with s3_server() as server:
        put_run(server, overflow(tmp_path / "overflow").close())
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        with serve(tmp_path, URL) as address:
            goto(page, address, "", run="overflow")
            expect(page.locator(".amp-card.error")).to_be_visible(timeout=30_000)
            goto(page, address, "incident", run="overflow")
            expect(page.get_by_role("heading", name="Incident")).to_be_visible()
            expect(page.get_by_text("What happened")).to_be_visible()
            assert page.get_by_test_id("stException").count() == 0
            page.goto("about:blank")  # it would ask for a server that is gone
    with serve(tmp_path, URL) as address:
        goto(page, address, "", run="overflow")
        expect(page.get_by_text(f"Runs in {URL} cannot be listed")).to_be_visible(timeout=60_000)
        expect(page.get_by_text("Could not connect")).to_be_visible()
        expect(page.get_by_text("there is no run of yours in")).to_have_count(0)
        assert page.get_by_test_id("stException").count() == 0
    assert watched.complaints == []
