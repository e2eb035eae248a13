"""Places of checkpoints in storages: what an address names, and what is refused before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixrt.errors import ConfigError
from helixrt.job.stored_path import StoredPath, check_storage, check_writable, delete_all, place_in, place_of
from tests.job.object_store import ObjectStore


@pytest.fixture(params=["objects", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StoredPath:
    return StoredPath(f"{request.param}://{tmp_path}/bucket/run")


def test_what_is_put_there_is_found_read_and_deleted(place: StoredPath) -> None:
    assert not place.exists() and not place.is_dir()
    (place / "a" / "one").write_bytes(b"1")
    (place / "a/two").write_bytes(b"22")
    (place / "three").write_bytes(b"333")
    assert [each.name for each in place.iterdir()] == ["a", "three"] and place.is_dir() and not place.is_file()
    assert [str(each) for each in (place / "a").iterdir()] == [f"{place}/a/one", f"{place}/a/two"]
    assert (place / "a/two").read_text() == "22" and (place / "a/two").is_file()
    assert list((place / "three").blocks(2)) == [b"33", b"3"]
    (place / "a/one").unlink()
    (place / "a/one").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (place / "a/one").unlink()
    with pytest.raises(FileNotFoundError):
        (place / "a/one").read_bytes()
    delete_all(place)
    assert not place.is_dir()
    delete_all(place)  # nothing is there


def test_an_address_names_a_folder_or_a_storage(tmp_path: Path) -> None:
    assert place_of("runs/saved") == Path("runs/saved") and place_of(f"file://{tmp_path}") == tmp_path
    assert place_of("s3://bucket/folder/") == StoredPath("s3://bucket/folder")
    assert place_in("s3://bucket", "run-1") == StoredPath("s3://bucket/run-1")
    assert place_in("saved", "run-1") == Path.cwd() / "saved" / "run-1"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("memory://saved", "must be a storage that all ranks share"),
        ("simplecache::s3://bucket/saved", "must be one storage"),
        ("objects://", "must name a place, such as objects://BUCKET/FOLDER"),
        ("nowhere://bucket/saved", "cannot be reached: .*nowhere"),
    ],
)
def test_addresses_that_ranks_cannot_use_are_refused(address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^checkpoint.path={address}: {why}"):
        check_storage("checkpoint.path", address)


def test_folders_and_known_storages_are_not_refused(tmp_path: Path) -> None:
    for address in ("", "saved", str(tmp_path), f"file://{tmp_path}", "objects://bucket/saved"):
        check_storage("checkpoint.path", address)


def test_a_storage_that_cannot_be_written_is_refused_before_a_run_has_a_folder(tmp_path: Path) -> None:
    place = StoredPath(f"objects://{tmp_path}/bucket/run")
    check_writable("checkpoint.path", place)
    assert list(place.iterdir()) == []
    with pytest.raises(ConfigError, match="objects:///nowhere-at-all is not there"):
        check_writable("checkpoint.path", StoredPath("objects:///nowhere-at-all/run"))
    assert not Path("/nowhere-at-all").exists()
    ObjectStore.broken = "403 Forbidden"
    try:
        with pytest.raises(ConfigError, match=r"^checkpoint.path=objects://.*: cannot be written: .*403 Forbidden"):
            check_writable("checkpoint.path", place)
    finally:
        ObjectStore.broken = ""
