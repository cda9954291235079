"""Our declarations of Ascend's runtime agree with the headers in torch_npu's wheel."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

import check_acl_headers

API = check_acl_headers.set_up.ROOT / "cpp" / "backends" / "npu" / "acl_api.h"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's headers; fails rather than skips in the full profile."""
    wheel = check_acl_headers.fetched()
    if wheel is None:
        reason = "torch_npu's wheel could not be downloaded when .venv was set up"
        if os.environ.get("RECSDK_TEST_PROFILE") == "full":
            pytest.fail(reason)
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("torch_npu")
    check_acl_headers.unpack(wheel, folder)
    return folder


def test_declarations_agree(unpacked: Path) -> None:
    assert check_acl_headers.compile_check(unpacked) == ""


@pytest.mark.parametrize(
    ("ours", "changed", "name"),
    [
        (
            "(void** device_memory, std::size_t size",
            "(void** device_memory, int size",
            "aclrtMalloc",
        ),
        ("X(Status, aclrtFree, (void*", "X(Status, aclrtFree, (const void*", "aclrtFree"),
        ("kHostToDevice = 1", "kHostToDevice = 3", "ACL_MEMCPY_HOST_TO_DEVICE"),
        ("kRepeatInitialize = 100002", "kRepeatInitialize = 100003", "ACL_ERROR_REPEAT_INITIALIZE"),
        ("MemcpyKind : int {", "MemcpyKind : char {", "aclrtMemcpyKind"),
        ("aclCreateScalar, (void* value", "aclCreateScalar, (float value", "aclCreateScalar"),
        ("aclrtSetDevice, (std::int32_t", "aclrtSetDevice, (std::int64_t", "aclrtSetDevice"),
    ],
)
def test_a_wrong_declaration_is_found(
    unpacked: Path, tmp_path: Path, ours: str, changed: str, name: str
) -> None:
    text = API.read_text()
    assert ours in text
    mutant = tmp_path / "backends" / "npu" / "acl_api.h"
    mutant.parent.mkdir(parents=True)
    mutant.write_text(text.replace(ours, changed))
    assert name in check_acl_headers.compile_check(unpacked, tmp_path)


def test_a_wheel_without_headers_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "torch_npu-0-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch_npu/__init__.py", "")
    with pytest.raises(check_acl_headers.CheckError, match="has not the headers"):
        check_acl_headers.check(wheel)
