"""Memory that a NIC may reach: registered once, kept as long as its owner may reuse nothing of it, and let go of in time."""

from __future__ import annotations

import ctypes
import gc
import random
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch

from helixrt.collectives.memory import byte_view
from helixrt.transport.process_memory import address_of
from helixrt.transport.verbs.memory import Registrations

Resize = Callable[[torch.Tensor, int], None]

# ---------------------------------------------------------------- registered memory


class FakeDevice:
    """Registers, and knows what is registered now."""

    def __init__(self) -> None:
        self.alive: dict[int, tuple[int, int]] = {}
        self.count = 0

    def register(self, address: int, length: int, writable: bool) -> FakeRegion:
        self.count += 1
        self.alive[self.count] = (address, address + length)
        return FakeRegion(self, self.count)

    def covers(self, key: int, address: int, length: int) -> bool:
        begin, end = self.alive[key]
        return begin <= address and address + length <= end


class FakeRegion:
    def __init__(self, device: FakeDevice, key: int) -> None:
        self.device, self.lkey, self.rkey = device, key, key

    def close(self) -> None:
        del self.device.alive[self.lkey]


def test_parts_of_one_buffer_are_registered_once_and_in_place() -> None:
    device = FakeDevice()
    table = Registrations(device.register)
    memory = memoryview(bytearray(1 << 20))
    for begin in range(0, 1 << 20, 1 << 17):
        part = memory[begin : begin + (1 << 17)]
        found, address = table.take(part)
        assert address == address_of(part) and device.covers(found.key, address, len(part))
        table.release(found)
    assert table.made == 1 and table.knows(memory[5:7])


def test_what_is_sent_stays_registered_whatever_else_comes(seed: int) -> None:
    """The capacity is kept to, except for what the NIC still reads."""
    rng, device = random.Random(seed), FakeDevice()
    table = Registrations(device.register, capacity_bytes=10_000)
    under_way = []
    for _ in range(300):
        memory = memoryview(bytearray(rng.randrange(1, 12_000)))
        found, address = table.take(memory)
        assert device.covers(found.key, address, len(memory))
        under_way.append((found, address, memory))
        rng.shuffle(under_way)
        while len(under_way) > rng.randrange(1, 4):
            done, *_ = under_way.pop()
            table.release(done)
        assert all(device.covers(f.key, a, len(m)) for f, a, m in under_way)
        idle = sum(end - begin for key, (begin, end) in device.alive.items() if key not in {f.key for f, *_ in under_way})
        assert idle <= 10_000
    for done, *_ in under_way:
        table.release(done)
    table.clear()
    assert not device.alive


class Owner(bytearray):
    """Memory whose end shows."""


def test_remembered_memory_is_kept_and_let_go_of_when_it_makes_room() -> None:
    device = FakeDevice()
    table = Registrations(device.register, capacity_bytes=5000)
    owner = Owner(4000)
    gone = weakref.ref(owner)
    table.remember(memoryview(owner))
    del owner
    gc.collect()
    assert gone() is not None  # nobody else gets its addresses
    table.remember(memoryview(bytearray(4000)))
    gc.collect()
    assert gone() is None and len(device.alive) == 1


def test_memory_of_an_unknown_owner_is_registered_for_one_message() -> None:
    device = FakeDevice()
    table = Registrations(device.register)
    memory = (ctypes.c_ubyte * 5000)()
    bare = memoryview((ctypes.c_ubyte * 5000).from_address(ctypes.addressof(memory))).cast("B")
    for _ in range(3):
        found, address = table.take(bare)
        assert address == ctypes.addressof(memory) and device.covers(found.key, address, 5000)
        table.release(found)
        assert not device.alive
    held = (ctypes.c_ubyte * 5000).from_address(ctypes.addressof(memory))
    held.owner = memory  # type: ignore[attr-defined]
    for _ in range(3):
        table.release(table.take(memoryview(held).cast("B"))[0])
    assert table.made == 4 and len(device.alive) == 1


# ---------------------------------------------------------------- memory that torch may free under a living tensor


def resized_by_the_storage(tensor: torch.Tensor, size: int) -> None:
    tensor.untyped_storage().resize_(size)


def resized_by_the_typed_storage(tensor: torch.Tensor, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that typed storages are deprecated
        tensor.storage().resize_(size // tensor.element_size())


def resized_by_an_operator(tensor: torch.Tensor, size: int) -> None:
    """Below Python, as compiled FSDP does."""
    torch.ops.inductor.resize_storage_bytes_(tensor, size)


RESIZES = (resized_by_the_storage, resized_by_the_typed_storage, resized_by_an_operator)


@pytest.mark.parametrize("resized", RESIZES)
def test_memory_that_a_resize_freed_is_registered_again_when_another_tensor_gets_its_address(resized: Resize) -> None:
    device = FakeDevice()
    table = Registrations(device.register)
    for attempt in range(2000):  # until the allocator gives an address again: which sizes it does depends on what else runs
        first = torch.empty(100_000 * (1 + attempt % 100))
        address, size = first.data_ptr(), 4 * first.numel()
        table.release(table.take(byte_view(first))[0])
        made = table.made
        resized(first, 0)
        second = torch.empty(size // 4)
        if second.data_ptr() != address:
            continue
        found, _ = table.take(byte_view(second))
        assert table.made == made + 1 and device.covers(found.key, address, size)
        assert [span for span in device.alive.values() if span[0] == address] == [(address, address + size)]
        table.release(found)
        return
    pytest.fail("the allocator never gave the address again: this test shows nothing here")


@pytest.mark.parametrize("resized", RESIZES[:2])
def test_memory_of_a_storage_that_was_freed_and_filled_again_is_registered_again(resized: Resize) -> None:
    """As FSDP does each step: storage, size and mostly the address are what they were; the pages may be others."""
    device = FakeDevice()
    table = Registrations(device.register)
    tensor = torch.zeros(300_000)
    size = 4 * tensor.numel()
    for step in range(5):
        for _ in range(3):
            found, address = table.take(byte_view(tensor))
            assert address == tensor.data_ptr() and device.covers(found.key, address, size)
            table.release(found)
        assert table.made == step + 1 and len(device.alive) == 1
        resized(tensor, 0)
        assert not device.alive  # before its memory is anybody else's
        resized(tensor, size)


@pytest.mark.parametrize("resized", RESIZES)
def test_a_resize_while_the_nic_reads_ends_the_registration_when_it_has_read(resized: Resize) -> None:
    device = FakeDevice()
    table = Registrations(device.register)
    tensor = torch.zeros(300_000)
    found, address = table.take(byte_view(tensor))
    resized(tensor, 0)
    resized(tensor, 8 * tensor.numel())
    again, _ = table.take(byte_view(tensor))
    assert device.covers(found.key, address, 4 * tensor.numel()) and again.key != found.key
    table.release(found)
    assert set(device.alive) == {again.key}
    table.release(again)


def test_watching_a_storage_does_not_keep_it() -> None:
    device = FakeDevice()
    table = Registrations(device.register, capacity_bytes=2_000_000)
    tensor = torch.zeros(300_000)
    gone = weakref.ref(tensor.untyped_storage())
    table.release(table.take(byte_view(tensor))[0])
    del tensor
    assert gone() is not None
    table.clear()
    assert gone() is None  # no cycle: at once


def test_views_of_one_storage_share_what_is_known_of_it() -> None:
    device = FakeDevice()
    table = Registrations(device.register)
    whole = torch.zeros(300_000)
    for part in whole.split(100_000):
        table.release(table.take(byte_view(part))[0])
        assert table.knows(byte_view(part))
    assert table.made == len(device.alive) == 3
    whole.untyped_storage().resize_(0)
    assert not device.alive
