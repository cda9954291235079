"""URLs of the files that folders and patterns find."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.utils import infer_storage_options
from hypothesis import given
from hypothesis import strategies as st

from recsdk_pipeline._internal.urls import urls_of
from recsdk_pipeline.data import ParquetData
from recsdk_pipeline.data.text_files import paths_of


class Hosted(MemoryFileSystem):  # type: ignore[misc]
    """Files of several hosts, which URLs name, as those of hdfs, ftp and sftp do."""

    protocol = "hosted"
    cachable = True

    def __init__(self, host: str, **options: Any) -> None:
        super().__init__(**options)
        self.store = _STORES.setdefault(host, {})
        self.pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        whole: str = infer_storage_options(path)["path"]
        return whole.rstrip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        host = infer_storage_options(path).get("host")
        return {"host": host} if host else {}


_STORES: dict[str, dict[str, Any]] = {}


@pytest.fixture(autouse=True)
def hosts() -> Iterator[None]:
    fsspec.register_implementation("hosted", Hosted, clobber=True)
    yield
    clear()


def clear() -> None:
    """Empty all file systems in memory, which caches may hold."""
    for store in (*_STORES.values(), MemoryFileSystem.store):
        store.clear()


def put(host: str, path: str, content: bytes) -> None:
    with fsspec.filesystem("hosted", host=host).open(path, "wb") as file:
        file.write(content)


def clicks(ids: list[int]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": ids, "label": [1.0] * len(ids)}), file)
    return file.getvalue()


@pytest.mark.parametrize(
    "source",
    [
        "hosted://b:8020/data",
        "hosted://b:8020/data/",
        "hosted://b:8020/data/*.parquet",
        "hosted://b:8020/d*/*",
        "hosted://b:8020/data/[a].parquet",
        "hosted://b:8020/data/a.parquet",
        "hosted://b:8020",
        "hosted://b:8020/",
        "simplecache::hosted://b:8020/data/*.parquet",
        "simplecache::hosted://b:8020/data",
    ],
)
def test_files_are_those_of_the_host_that_a_url_names(source: str) -> None:
    put("a", "/data/a.parquet", clicks([1, 2]))
    put("b", "/data/a.parquet", clicks([3, 4, 5]))
    data = ParquetData(source, ids=["id"], labels="label", batch_size=9, shuffle=False)
    assert [n for batch in data for n in batch.sparse.values().tolist()] == [3, 4, 5]


@pytest.mark.parametrize("source", ["hosted://b/logs/*.txt", "simplecache::hosted://b/logs/*.txt"])
def test_so_are_files_of_lines(source: str) -> None:
    put("b", "/logs/1.txt", b"one\n")
    put("b", "/logs/2.txt", b"two\n")
    found = paths_of(source, {})
    assert found == [source.replace("*", "1"), source.replace("*", "2")]


names = st.text("ab.x", min_size=1, max_size=3).filter(lambda name: name.strip("."))
places = st.lists(names, min_size=1, max_size=3)


@given(
    files=st.lists(places, min_size=1, max_size=6, unique_by=tuple),
    chosen=st.integers(0, 5),
    depth=st.integers(0, 3),
    stars=st.sets(st.integers(0, 2)),
    slash=st.sampled_from(["", "/"]),
    chain=st.sampled_from(["hosted://a:1/", "memory://", "zip://"]),
)
def test_each_url_leads_to_the_file_that_was_found(
    files: list[list[str]], chosen: int, depth: int, stars: set[int], slash: str, chain: str
) -> None:
    files = [f for f in files if not any(g[: len(f)] == f and g != f for g in files)]
    memory = fsspec.filesystem("memory")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        for each in files:
            packed.writestr("/".join(each), "/".join(each))
    memory.pipe("/archives/all.zip", archive.getvalue())
    for each in files:
        content = "/".join(each).encode()
        put("a", "/" + "/".join(each), content)
        memory.pipe("/" + "/".join(each), content)
    path = files[chosen % len(files)][: depth or None]
    is_pattern = any(n < len(path) for n in stars)
    path = ["*" if n in stars else name for n, name in enumerate(path)]
    source = chain + "/".join(path) + ("" if is_pattern else slash)
    if chain == "zip://":
        source += "::memory://archives/all.zip"
    try:
        fs, inner = fsspec.core.url_to_fs(source)
        found = sorted(fs.glob(inner) if is_pattern else fs.find(inner))
        found = [each for each in found if fs.isfile(each)]
        urls = urls_of(found, source, inner)
        for each, url in zip(found, urls, strict=True):
            with fsspec.open(url, "rb") as file:
                assert file.read() == fs.cat_file(each)
    finally:
        clear()


def test_local_files_have_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.parquet").write_bytes(clicks([1]))
    monkeypatch.chdir(tmp_path)
    for source in ("data", "data/*", f"file://{tmp_path}/data", "local://data/*.parquet"):
        fs, path = fsspec.core.url_to_fs(source)
        found = sorted(fs.glob(path) if "*" in path else fs.find(path))
        assert urls_of(found, source, path) == [f"{tmp_path}/data/a.parquet"]
