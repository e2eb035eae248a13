"""The durable store: it is lost and made again under its clients, who notice that it is slow; nobody without the secret gets
in."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from helixrt.errors import Retryable
from helixrt.protocol.store_journal import Identity, Refused, replay
from helixrt.replica import store_file, store_wire
from helixrt.replica.store import address_of, listener_on
from helixrt.replica.store_client import DurableRunStore, run_store
from helixrt.replica.store_file import FILE, StoreFile
from helixrt.replica.store_server import StoreServer
from tests.replica.served_store import ME, SECRET, Served


def test_clients_go_on_where_they_were_when_the_store_is_made_again(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        one, other = served.client(), served.client()
        one.put_if_absent("log/0", "genesis")
        one.set("k", "old")
        one.set("k", "new")
        one.set("gone", "soon")
        one.delete("gone")
        served.lose()
        begun: list[str] = []
        asks = threading.Thread(target=lambda: begun.append(other.put_if_absent("log/0", "another")))
        asks.start()
        time.sleep(0.2)
        assert not begun, "it waits for the store"
        served.make_again()
        asks.join(60)
        assert begun == ["genesis"]
        assert (one.get("k"), one.get("gone"), other.get("log/0")) == ("new", None, "genesis")


def test_many_writers_win_exactly_once_each_while_the_store_is_lost_again_and_again(tmp_path: Path, seed: int) -> None:
    """Each index of a log is won by one writer, who knows it; what a writer knows to have won stays; nothing is won twice."""
    entries, writers = 60, 4
    won: list[list[int]] = [[] for _ in range(writers)]
    with Served(tmp_path) as served:

        def write(me: int) -> None:
            client, draw = served.client(), random.Random(seed + me)
            for index in range(entries):
                value = f"entry {index} of writer {me}"
                if client.put_if_absent(f"log/{index}", value) == value:
                    won[me].append(index)
                client.set(f"progress/{me}", str(index))
                time.sleep(draw.uniform(0.0, 0.01))

        threads = [threading.Thread(target=write, args=(me,)) for me in range(writers)]
        for thread in threads:
            thread.start()
        draw = random.Random(seed)
        while any(thread.is_alive() for thread in threads):
            time.sleep(draw.uniform(0.01, 0.2))
            served.lose()
            served.make_again()
        reader = served.client()
        assert sorted(sum(won, [])) == list(range(entries)), "one winner of each, who was told so"
        for me, indices in enumerate(won):
            assert all(reader.get(f"log/{index}") == f"entry {index} of writer {me}" for index in indices)
            assert reader.get(f"progress/{me}") == str(entries - 1)


def test_a_wait_goes_on_over_the_loss_of_the_store(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        got: list[str] = []
        waits = threading.Thread(target=lambda: got.append(served.client().wait("later", 60.0)))
        waits.start()
        time.sleep(0.1)
        served.lose()
        served.make_again()
        served.client().put_if_absent("later", "now")
        waits.join(60)
        assert got == ["now"]


def test_a_store_that_stays_away_is_retryable_after_the_clients_patience(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        client = served.client()
        client.put_if_absent("k", "v")
        served.lose()
        client._patience_s = 0.3  # now: with it a busy machine would take a store for lost that is there
        for call in (lambda: client.get("k"), lambda: client.put_if_absent("j", "v"), lambda: client.wait("k", 0.1)):
            with pytest.raises(Retryable, match="cannot be reached"):
                call()
        served.make_again()
        client._patience_s = 60.0
        assert client.get("k") == "v"


def test_who_does_not_know_the_secret_changes_nothing(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        with pytest.raises(Retryable, match="secret"):
            DurableRunStore(served.address, "another secret", 2.0).set("k", "theirs")
        with socket.create_connection(("127.0.0.1", int(served.address.rsplit(":", 1)[1])), 60) as stranger:
            stranger.sendall(store_wire.frame([store_wire.SET, "k", "theirs"]) + bytes(200))
            stranger.settimeout(60)
            while stranger.recv(1000):
                pass
        assert served.client().get("k") is None
        assert (served.folder / FILE).stat().st_mode & 0o077 == 0, "values may be secrets of the user"


@pytest.mark.parametrize("said", [b"\xff" * 8, b"\x00\x00\x00\x02{}", b"\x00\x00\x00\x03{{{", store_wire.frame(["put", "k"])])
def test_what_is_no_request_ends_the_connection_and_nothing_else(tmp_path: Path, said: bytes) -> None:
    with Served(tmp_path) as served:
        client = served.client()
        client.set("k", "v")
        client._connection(time.monotonic() + 60)._send(said, time.monotonic() + 60)
        assert client.get("k") == "v"


def test_a_value_is_at_most_a_frame(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        client = served.client()
        large = "x" * (3 << 20)
        client.set("large", large)
        assert served.client().get("large") == large
        with pytest.raises(ValueError, match="bytes for the run's store"):
            client.set("larger", "x" * store_wire.MOST_BYTES)


def test_run_store_is_the_durable_one_where_the_run_has_one(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        served.client().set("k", "v")
        assert run_store("nobody:1", served.address, "the run's secret").get("k") == "v"


# ---------------------------------------------------------------- the file


def changed(file: StoreFile, key: str, value: str) -> None:
    file.values[key] = value
    file.append([store_file.Change(key, value)])


def kept(folder: Path) -> dict[str, str]:
    """What a store that begins again finds."""
    file = StoreFile(folder, ME)
    file.close()
    return file.values


def test_a_journal_stays_small_however_often_a_value_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helixrt.protocol.store_journal.LEAST_BYTES", 2000)
    file = StoreFile(tmp_path, ME)
    for number in range(1000):
        changed(file, f"k{number % 3}", str(number))
        assert (tmp_path / FILE).stat().st_size < 2100
    file.close()
    assert kept(tmp_path) == {"k0": "999", "k1": "997", "k2": "998"}


def test_the_line_that_was_being_written_is_cut_off(tmp_path: Path) -> None:
    file = StoreFile(tmp_path, ME)
    changed(file, "whole", "1")
    file.close()
    with open(tmp_path / FILE, "ab") as journal:
        journal.write(b'0badc0de ["torn","2')
    again = StoreFile(tmp_path, ME)
    assert again.values == {"whole": "1"}
    changed(again, "next", "3")
    again.close()
    assert kept(tmp_path) == {"whole": "1", "next": "3"}


def test_a_full_disk_leaves_no_part_of_a_journal_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store goes on in memory; once there is room again the whole of it is in the journal."""
    now = 0.0
    file = StoreFile(tmp_path, ME, lambda: now)
    changed(file, "k", "1")
    real = os.write
    monkeypatch.setattr(store_file.os, "write", lambda descriptor, data: real(descriptor, bytes(data)[:3]))
    changed(file, "k", "2")
    assert not list(tmp_path.iterdir()), "nobody takes it for the store"
    changed(file, "k", "3")
    monkeypatch.setattr(store_file.os, "write", real)
    now = 60.0
    changed(file, "j", "4")
    file.close()
    assert replay((tmp_path / FILE).read_bytes(), ME)[0] == file.values == {"k": "3", "j": "4"}


def test_a_journal_that_can_be_neither_written_nor_deleted_is_not_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError("refused")

    file = StoreFile(tmp_path, ME)
    changed(file, "k", "1")
    with monkeypatch.context() as disk:
        disk.setattr(store_file.os, "write", refuse)
        disk.setattr(Path, "unlink", refuse)
        changed(file, "k", "2")
        changed(file, "k", "3")
    with pytest.raises(Refused, match="it is empty"):
        StoreFile(tmp_path, ME, begun=True)
    file.close()


def test_a_store_whose_journal_is_missing_does_not_begin_again_empty(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"journal is missing"):
        StoreFile(tmp_path, ME, begun=True)
    StoreFile(tmp_path, ME).close()
    StoreFile(tmp_path, ME, begun=True).close()


def test_a_log_that_cannot_be_written_costs_nothing_but_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is mostly on the file system of the journal."""

    class Full:
        def write(self, text: str) -> int:
            raise OSError("no space")

        flush = write

    file = StoreFile(tmp_path, ME)
    monkeypatch.setattr(store_file.os, "write", lambda descriptor, data: 0)
    monkeypatch.setattr(sys, "stderr", Full())
    changed(file, "k", "1")
    assert file.values == {"k": "1"} and not list(tmp_path.iterdir())


def test_a_server_whose_thread_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    file = StoreFile(tmp_path, ME)
    listener = listener_on("127.0.0.1", 0)
    server = StoreServer(listener, SECRET, file, failed.set)
    client = DurableRunStore(address_of(listener, "127.0.0.1"), SECRET, 0.5)

    def fail(changes: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(file, "append", fail)
    for _ in range(100):  # again, where it did not reach the store within its patience
        with pytest.raises(Retryable):
            client.set("k", "1")
        if failed.is_set():
            break
    assert failed.is_set()
    server.close()


def test_the_journal_of_another_life_is_refused_with_its_place(tmp_path: Path) -> None:
    StoreFile(tmp_path, ME).close()
    with pytest.raises(Refused, match=rf"{tmp_path}.*life 0 of run run"):
        StoreFile(tmp_path, Identity("run", 1, "boot"))
