"""Fingerprints of calls: what a name says, and which differences each end of a link notices, in every order of events."""

from __future__ import annotations

import itertools
import random

from helixrt.protocol.calls import COLLECTIVES, DTYPES, KEPT, NUMBER, REDUCTIONS, Agreement, describe, fingerprint


def test_a_name_says_its_call_and_fits_a_signed_word() -> None:
    for collective, dtype, reduction in itertools.product(COLLECTIVES[1:], DTYPES[1:], REDUCTIONS):
        operation = NUMBER | fingerprint(collective, dtype, reduction, ("plan", 7))
        assert operation < 1 << 63 and operation & NUMBER == NUMBER
        assert describe(operation) == f"{collective} of {dtype}" + (f" by {reduction}" if reduction else "")


def test_garbage_has_a_description(seed: int) -> None:
    rng = random.Random(seed)
    assert all(describe(rng.randrange(1 << 63)) for _ in range(1000))


def test_whoever_hears_last_notices_whatever_came_first(seed: int) -> None:
    """Two ends whose operations differ from some number on; each begins its own in order, and hears the other's late."""
    rng = random.Random(seed)
    for _ in range(300):
        ends, same = (Agreement(), Agreement()), rng.randrange(6)
        calls = [[fingerprint("all-reduce", plan=min(n, same) if end else n) | n for n in range(10)] for end in range(2)]
        agreed = [n for n in range(10) if calls[0][n] == calls[1][n]]
        waiting: list[list[int]] = [[], []]  # what an end has not heard yet
        begun, found = [0, 0], set[int]()
        while min(begun) < 10 or any(waiting):
            end = rng.randrange(2)
            if waiting[end] and rng.random() < 0.5:
                operation = waiting[end].pop(0)
                said = ends[end].unexpected(operation)
            elif begun[end] < 10:
                operation = calls[end][begun[end]]
                begun[end] += 1
                said = ends[end].begin(operation)
                waiting[1 - end].append(operation)
            else:
                continue
            if said:
                assert operation & NUMBER not in agreed
                found.add(operation & NUMBER)
        assert found == set(range(10)) - set(agreed)


def test_point_to_point_and_operations_without_a_fingerprint_are_not_compared() -> None:
    agreement = Agreement()
    for operation in (-1, -5, 0, 7, NUMBER):
        assert not agreement.begin(operation) and not agreement.unexpected(operation)


def test_what_a_peer_says_of_operations_that_never_begin_takes_bounded_memory() -> None:
    agreement = Agreement()
    for number in range(10 * KEPT):
        agreement.unexpected(fingerprint("barrier") | number + 1_000_000)
        agreement.begin(fingerprint("barrier") | number)
    assert len(agreement._early) <= KEPT and len(agreement._begun) <= KEPT
