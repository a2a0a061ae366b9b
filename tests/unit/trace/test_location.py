from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from ampscope.errors import RunUnreachable
from ampscope.trace.files.layout import list_table, ranks
from ampscope.trace.location import BucketPath, location
from ampscope.trace.schema import Table
from tests.support.stores.buckets import memory_bucket


@pytest.fixture
def bucket() -> Iterator[str]:
    with memory_bucket() as url:
        yield url


def test_a_url_is_a_path_that_keeps_its_text() -> None:
    run = location("s3://bucket/prefix/run/")
    assert str(run) == "s3://bucket/prefix/run"
    assert str(run / "rank=0" / "steps") == "s3://bucket/prefix/run/rank=0/steps"
    assert run.parent == location("s3://bucket/prefix")
    assert run.name == "run"
    assert run.with_name("other") == location("s3://bucket/prefix/other")
    assert run.relative_to(location("s3://bucket")).as_posix() == "prefix/run"
    assert (run.resolve(), run.absolute(), run.expanduser()) == (run, run, run)
    assert {copy.deepcopy(run): 1}[location("s3://bucket/prefix/run")] == 1


def test_a_path_that_pathlib_made_of_a_url_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert location(Path("s3://bucket/run")) == location("s3://bucket/run")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    assert not isinstance(location(Path("s3://bucket")), BucketPath)  # there is a folder of that name
    assert isinstance(location("s3://bucket"), BucketPath)


@pytest.mark.parametrize("text", ["runs/one", "/runs/one", "C:/runs", "C:\\runs", ".", "s3:", "s3://", "run@3:1"])
def test_other_texts_are_folders(text: str) -> None:
    assert not isinstance(location(text), BucketPath)
    assert location(text) == Path(text)


def test_a_file_url_is_a_folder() -> None:
    assert location("file:///runs/one") == Path("/runs/one")


@pytest.mark.parametrize(
    "text", ["s3://key:secret@bucket/run", "https://host/run?X-Amz-Signature=secret", "s3://b/r#secret"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(RunUnreachable, match="environment") as refused:
        location(text)
    assert "secret" not in str(refused.value)


def test_a_container_of_an_account_is_no_password() -> None:
    assert str(location("abfs://container@account.dfs.core.windows.net/run")).startswith("abfs://container@account")


def test_an_unknown_kind_of_store_says_so() -> None:
    with pytest.raises(RunUnreachable, match="no kind of store"):
        location("nowhere://bucket/run").exists()


def test_a_missing_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ImportError

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(RunUnreachable, match=r"pip install 'ampscope\[s3\]'"):
        location("s3a://bucket/run").exists()


def test_what_lies_in_a_bucket_is_looked_up_like_files(bucket: str) -> None:
    files = fsspec.filesystem("memory")
    for name, content in (("run.json", b"{}"), ("rank=0/steps/part-000000.parquet", b"12345"), ("rank=12/x", b"")):
        files.pipe_file(f"{bucket}/one/{name}", content)
    run = location(f"{bucket}/one")
    assert run.is_dir()
    assert run.exists()
    assert not run.is_file()
    assert (run / "run.json").is_file()
    assert (run / "run.json").read_text() == "{}"
    assert not (run / "other.json").exists()
    assert not (location(bucket) / "two").exists()
    assert ranks(run) == [0, 12]
    part = run / "rank=0" / "steps" / "part-000000.parquet"
    assert part.stat().st_size == 5
    assert part.read_bytes() == b"12345"
    assert part.stat().st_mtime > 1e9
    assert list_table(run / "rank=0" / "steps").parts == {0: part}
    assert not list_table(run / "rank=0" / Table.OPS.value).parts
    assert [path.name for path in run.glob("rank=*")] == ["rank=0", "rank=12"]
    assert list(run.glob("rank=*/*/*")) == [part]
    with pytest.raises(FileNotFoundError):
        (run / "rank=0" / "steps" / "part-000001.parquet").open("rb")
    with pytest.raises(OSError, match="only read"):
        part.open("wb")
