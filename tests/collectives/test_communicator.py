"""Communicators over queues in one process: results, order, errors, aborts, deadlines, and who drives."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from helixrt.collectives.communicator import Communicator
from helixrt.collectives.handle import CollectiveError, End, Handle
from helixrt.collectives.operations import Collectives, How
from helixrt.collectives.reduction import Op, Reduction
from helixrt.errors import Cause, Retryable
from helixrt.protocol.calls import NUMBER
from helixrt.transport.contract import Lost, PeerAborted
from tests.collectives.queue_group import DEADLINE_S, SUM, Group, tensor
from tests.waiting import until


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("group", [1, 2, 3], indirect=True)
def test_collectives_of_all_kinds_at_once(group: Group) -> None:
    """Blocking and asynchronous, all in flight together, waited for in any order."""
    size = group.size

    def run(me: int) -> None:
        calls, rng = group.ranks[me], random.Random(me)
        close = torch.testing.assert_close
        checks: list[tuple[Handle, Callable[[], None]]] = []
        for length in (0, 1, 7, 300, 5000):
            how = How(DEADLINE_S)
            source, out = tensor(me, length), torch.full((length,), torch.nan)
            total = sum((tensor(r, length) for r in range(1, size)), tensor(0, length))
            handle = calls.all_reduce(source, out, Reduction(Op.SUM, size), how)
            checks.append((handle, lambda o=out, t=total: close(o, t / size)))
            inplace = tensor(me, length)
            handle = calls.all_reduce(inplace, inplace, SUM, how)
            checks.append((handle, lambda o=inplace, t=total: close(o, t)))
            gathered = torch.full((size * length,), torch.nan)
            handle = calls.all_gather(source, gathered, [length] * size, how)
            whole = torch.cat([tensor(r, length) for r in range(size)])
            checks.append((handle, lambda o=gathered, w=whole: close(o, w, rtol=0, atol=0)))
            mine = torch.full((length,), torch.nan)
            handle = calls.reduce_scatter(whole.clone(), mine, [length] * size, SUM, how)
            checks.append((handle, lambda o=mine, i=me, n=length: close(o, size * tensor(i, n))))
            sent = tensor(me, length)
            handle = calls.broadcast(sent, size - 1, how)
            checks.append((handle, lambda o=sent, n=length: close(o, tensor(size - 1, n), rtol=0, atol=0)))
            swapped = torch.full((size * length,), torch.nan)
            handle = calls.all_to_all(whole.clone(), swapped, [length] * size, [length] * size, how)
            checks.append((handle, lambda o=swapped, i=me, n=length: close(o, tensor(i, n).repeat(size))))
            checks.append((calls.barrier(how), lambda: None))
        rng.shuffle(checks)
        for handle, check in checks:
            assert handle.wait(DEADLINE_S)
            check()
        blocking = torch.ones(3)
        assert calls.all_reduce(blocking, blocking, SUM, How(DEADLINE_S, waits=True)).wait()
        assert torch.equal(blocking, torch.full((3,), float(size)))

    group.on_each(run)


@pytest.mark.parametrize("group", [1, 3], indirect=True)
def test_source_and_result_share_memory_in_their_place_and_nowhere_else(group: Group) -> None:
    """By whatever tensors they are given: the same memory counts, not the same object."""
    size = group.size

    def of(rank: int, length: int) -> torch.Tensor:
        return tensor(rank, length).mul(4).round()

    def run(me: int) -> None:
        calls, how = group.ranks[me], How(DEADLINE_S)
        for n in (2, 40, 900, 5000):
            total = sum((of(r, n) for r in range(1, size)), of(0, n))
            every = torch.cat([of(r, n) for r in range(size)])
            value = of(me, n)
            calls.all_reduce(value[:], value.view(-1), SUM, how).wait()
            assert torch.equal(value, total)
            value = of(me, n)
            calls.reduce(value[:], value, 0, SUM, how).wait()
            assert torch.equal(value, of(me, n) if me else total)
            whole = torch.full((size * n,), torch.nan)
            mine = whole[me * n : (me + 1) * n]
            mine.copy_(of(me, n))
            calls.all_gather(mine, whole, [n] * size, how).wait()
            assert torch.equal(whole, every)
            calls.reduce_scatter(whole, mine, [n] * size, SUM, how).wait()
            assert torch.equal(mine, size * of(me, n))
            others = [r for r in range(size) if r != me]
            assert all(torch.equal(whole[r * n : (r + 1) * n], of(r, n)) for r in others)
            if me == 0:
                whole.copy_(every)
            calls.scatter(whole if me == 0 else whole[:0], mine, 0, [n] * size, how).wait()
            assert torch.equal(mine, of(me, n))
            mine.mul_(2)
            calls.gather(mine, whole if me == 0 else mine[:0], 0, [n] * size, how).wait()
            assert me or torch.equal(whole, 2 * every)

            shifted = torch.zeros(size * n + 1)
            for refused in (
                lambda s=shifted, k=n: calls.all_reduce(s[:k], s[1 : k + 1], SUM, how),
                lambda s=shifted, k=n: calls.reduce(s[1 : k + 1], s[:k], 0, SUM, how),
                lambda s=shifted, k=n: calls.all_gather(s[1 + me * k :][:k], s[:-1], [k] * size, how),
                lambda s=shifted, k=n: calls.reduce_scatter(s[:-1], s[1 + me * k :][:k], [k] * size, SUM, how),
                lambda s=shifted, k=n: calls.all_to_all(s[:-1], s[:-1], [k] * size, [k] * size, how),
            ):
                with pytest.raises(ValueError, match="overlap.*give a copy of one"):
                    refused()
        calls.barrier(how).wait()  # after refusals all are still in step

    group.on_each(run)


def test_closing_while_a_callback_runs_on_gives_up_waiting_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("helixrt.collectives.background.JOIN_S", 0.05)
    group = Group(2)
    enters, goes_on = threading.Event(), threading.Event()

    def stay() -> None:
        enters.set()
        goes_on.wait(DEADLINE_S)

    waits = group.ranks[0].receive(torch.zeros(1), 1, 0, How(DEADLINE_S))
    waits.then(stay)  # nobody waits: it runs in the communicator's thread
    group.ranks[1].send(torch.ones(1), 0, 0, How(DEADLINE_S)).wait()
    assert enters.wait(DEADLINE_S)
    group.ranks[0].communicator.close()
    assert "a callback takes more than 0.05 s" in caplog.text
    goes_on.set()
    group.close()


@pytest.mark.parametrize("group", [2], indirect=True)
def test_messages_match_by_tag_in_any_order(group: Group) -> None:
    tags = [7, 0, 7, 2**31 - 1, 7]

    def run(me: int) -> None:
        calls, how = group.ranks[me], How(DEADLINE_S)
        lengths = [10, 0, 700, 3000, 1]
        given = [tensor(me * 10 + i, n) for i, n in enumerate(lengths)]
        sent = [calls.send(each, 1 - me, tag, how) for each, tag in zip(given, tags, strict=True)]
        got = [torch.full((n,), torch.nan) for n in lengths]
        order = [3, 0, 1, 2, 4]  # those of one tag in their order, the tags in another
        waiting = [calls.receive(got[i], 1 - me, tags[i], how) for i in order]
        for handle in [*reversed(waiting), *sent]:
            assert handle.wait(DEADLINE_S)
        for i, n in enumerate(lengths):
            assert torch.equal(got[i], tensor((1 - me) * 10 + i, n))

    group.on_each(run)


@pytest.mark.parametrize("group", [3], indirect=True)
def test_a_lost_peer_ends_everything_with_the_first_cause_and_survivors_go_on(group: Group) -> None:
    outs = [torch.zeros(2000) for _ in range(3)]
    handles = {
        r: [group.ranks[r].all_reduce(torch.ones(2000), outs[r], SUM, How(DEADLINE_S)) for _ in range(12)] for r in (0, 1)
    }
    began_s = time.monotonic()
    group.endpoints[2].die()
    for rank in (0, 1):
        errors = []
        for handle in handles[rank]:
            with pytest.raises(CollectiveError) as raised:
                handle.wait(DEADLINE_S)
            errors.append(raised.value)
        assert {str(error) for error in errors} == {"the connection was reset"}
        assert not errors[0].skipped and errors[-1].skipped  # the last were queued behind the window of four
        late = group.ranks[rank].all_reduce(torch.ones(1), torch.ones(1), SUM, How(DEADLINE_S))
        assert late.done and late.error is not None and late.error.skipped
        assert str(group.ranks[rank].communicator.failure) == "the connection was reset"
    assert time.monotonic() - began_s < DEADLINE_S / 2  # none of them waited for a deadline
    group.configure(2, [0, 1])

    def again(rank: int) -> torch.Tensor:
        out = torch.zeros(2000)
        group.ranks[rank].all_reduce(torch.ones(2000), out, SUM, How(DEADLINE_S)).wait()
        return out

    assert all(torch.equal(out, torch.full((2000,), 2.0)) for out in group.on_each(again, [0, 1]))


@pytest.mark.parametrize("group", [3], indirect=True)
def test_the_word_of_an_end_does_not_overtake_what_was_sent_before(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 2 have ended a collective well, and the generation after it, before rank 1 looks at its links."""
    late = group.endpoints[1]
    late.silent = True
    outs = [torch.zeros(6) for _ in range(3)]
    handles = [group.ranks[r].all_gather(torch.full((2,), float(r)), outs[r], [2, 2, 2], How(DEADLINE_S)) for r in range(3)]
    after = group.ranks[1].barrier(How(DEADLINE_S))
    for rank in (0, 2):
        handles[rank].wait()
    group.ranks[0].communicator.abort(Cause("enough"))
    progress, held = late.progress, list[Any]()

    def ends_first(now: float) -> Any:
        outcomes = [*held, *progress(now)]
        held.clear()
        ends = [each for each in outcomes if isinstance(each, Lost | PeerAborted)]
        if not ends:
            return outcomes
        held.extend(each for each in outcomes if each not in ends)
        return ends

    monkeypatch.setattr(late, "progress", ends_first)
    late.silent = False
    assert handles[1].wait(DEADLINE_S)
    assert all(torch.equal(out, torch.tensor([0.0, 0, 1, 1, 2, 2])) for out in outs)
    with pytest.raises(CollectiveError, match="enough"):
        after.wait(DEADLINE_S)


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize("waits", [True, False])
def test_an_abort_from_another_thread_ends_a_wait_here_and_at_the_peer(group: Group, waits: bool) -> None:
    raised: list[BaseException] = []

    def wait(me: int) -> None:
        try:
            calls = group.ranks[me]
            handle = calls.receive(torch.zeros(4), 1 - me, 0, How(DEADLINE_S, waits=waits))
            handle.wait()
        except CollectiveError as error:
            raised.append(error)

    threads = [threading.Thread(target=wait, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    group.ranks[0].communicator.abort(Cause("enough"))
    group.ranks[0].communicator.abort(Cause("too late to be the first"))
    for thread in threads:
        thread.join(DEADLINE_S / 2)
        assert not thread.is_alive()
    assert [str(error) for error in raised] == ["enough", "enough"]


@pytest.mark.parametrize("group", [2], indirect=True)
def test_an_operation_ends_at_its_deadline(group: Group) -> None:
    group.endpoints[1].silent = True
    patient = group.ranks[0].all_reduce(torch.ones(9), torch.zeros(9), SUM, How(DEADLINE_S))
    assert patient.wait(0.01) is False and not patient.done and patient.error is None
    handle = group.ranks[0].all_reduce(torch.ones(9), torch.zeros(9), SUM, How(0.1))
    with pytest.raises(CollectiveError, match="did not end in time; it waits for rank 1") as raised:
        handle.wait(DEADLINE_S)
    assert raised.value.end is End.DEADLINE


@pytest.mark.parametrize("group", [1], indirect=True)
def test_operations_of_a_group_of_one_leave_nothing_behind(group: Group) -> None:
    for _ in range(10_000):
        group.ranks[0].barrier(How(DEADLINE_S)).wait()
    execution = group.ranks[0].communicator._execution
    assert execution is not None and not execution._deadlines


@pytest.mark.parametrize("group", [2], indirect=True)
def test_callbacks_may_submit_and_wait(group: Group) -> None:
    def run(me: int) -> torch.Tensor:
        calls, how = group.ranks[me], How(DEADLINE_S)
        first, second, called = torch.ones(2), torch.ones(2), threading.Event()

        def follow() -> None:
            calls.all_reduce(second, second, SUM, how).wait()
            called.set()

        handle = calls.all_reduce(first, first, SUM, how)
        handle.then(follow)
        handle.wait(DEADLINE_S)
        assert called.wait(DEADLINE_S)
        calls.barrier(how).wait()
        handle.then(called.clear)  # of one that is done: at once
        assert not called.is_set()
        return second

    assert all(torch.equal(second, torch.full((2,), 2.0)) for second in group.on_each(run))


@pytest.mark.parametrize("group", [2], indirect=True)
def test_many_threads_wait_at_once(group: Group) -> None:
    """One drives, the others sleep, and the role passes on; operations nobody waits for go on meanwhile."""

    def run(me: int) -> None:
        calls = group.ranks[me]
        pairs = []
        for i in range(40):
            value = torch.full((100,), float(i))
            pairs.append((value, calls.all_reduce(value, value, SUM, How(DEADLINE_S))))
        with ThreadPoolExecutor(5) as pool:
            list(pool.map(lambda pair: pair[1].wait(DEADLINE_S), random.Random(me).sample(pairs[:30], 30)))
        until(lambda: all(handle.done for _, handle in pairs))
        for i, (value, _) in enumerate(pairs):
            assert torch.equal(value, torch.full((100,), 2.0 * i))

    group.on_each(run)


def test_nothing_before_configure_and_nothing_left_behind() -> None:
    group = Group(2)
    lonely = Collectives(Communicator(group.hub.endpoint()))
    early = lonely.all_reduce(torch.ones(1), torch.ones(1), SUM, How(1.0))
    assert early.done and "not configured" in str(early.error)
    lonely.communicator.close()
    group.close()
    forgotten = Group(2)
    threads = [weakref.ref(rank.communicator) for rank in forgotten.ranks]
    forgotten.pool.shutdown()
    del forgotten
    # A thread has its own reference for the time of a turn: one collection may come too early.
    until(lambda: gc.collect() >= 0 and [reference() for reference in threads] == [None, None])


def test_a_forgotten_communicator_that_its_own_thread_lets_go_of_last_closes_its_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, goes_on, turn = Group(2), threading.Event(), Communicator.background
    entered, pollers = set(), [rank.communicator._poller for rank in group.ranks]

    def hold(communicator: Communicator) -> Any:
        entered.add(communicator.name)
        goes_on.wait(DEADLINE_S)
        return turn(communicator)

    monkeypatch.setattr(Communicator, "background", hold)
    for poller in pollers:
        poller.wake()
    until(lambda: len(entered) == 2)
    group.pool.shutdown()
    del group
    gc.collect()
    goes_on.set()
    until(lambda: gc.collect() >= 0 and all(poller._epoll.closed for poller in pollers))


@pytest.mark.parametrize("group", [2], indirect=True)
def test_an_abort_while_configuring(group: Group) -> None:
    communicator = group.ranks[0].communicator
    communicator.begin()
    communicator.abort(Cause("changed my mind"))
    with pytest.raises(Retryable, match="changed my mind"):
        communicator.configure(3, 0, {1: group.endpoints[1].address()}, DEADLINE_S)
    group.configure(4, [0, 1])


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize("ended", ["begun", "aborted"])
def test_the_thread_sleeps_between_generations_whoever_calls(group: Group, ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is ahead calls already; what it says is for who connects, and would wake the thread again and again."""
    communicator = group.ranks[0].communicator
    if ended == "begun":
        communicator.begin()
    else:
        communicator.abort(Cause("changed my mind"))
    wait, waits = communicator._poller.wait, []

    def count(timeout_s: float) -> None:
        waits.append(timeout_s)
        wait(timeout_s)

    monkeypatch.setattr(communicator._poller, "wait", count)
    group.endpoints[0]._take(3, 1, "credit", 0, 0)
    time.sleep(0.1)
    assert len(waits) <= 3, f"{len(waits)} waits for what nobody takes"
    group.configure(4, [0, 1])


@pytest.mark.parametrize("group", [3], indirect=True)
def test_the_thread_leaves_a_sleeping_caller_what_the_endpoint_brings(group: Group) -> None:
    """Peers ring for who asked last before it sleeps: a turn of the thread would take that back."""
    endpoint, communicator = group.endpoints[0], group.ranks[0].communicator
    endpoint.rung_when_asked = True
    out = torch.zeros(4)
    source, how = torch.ones(4), How(DEADLINE_S, waits=True)
    with ThreadPoolExecutor(3) as pool:

        def sum_up(rank: int, into: torch.Tensor) -> None:
            group.ranks[rank].all_reduce(source, into, SUM, how).wait()

        sums = [pool.submit(sum_up, 0, out)]
        until(lambda: communicator._handoff.resting and endpoint.asked)
        for _ in range(3):
            with communicator._lock:
                communicator._carry_out(communicator._handoff.call(), 0.0)
            until(lambda: not communicator._handoff._called)
        until(lambda: communicator._handoff.resting and endpoint.asked)
        sums += [pool.submit(sum_up, rank, torch.zeros(4)) for rank in (1, 2)]
        for each in sums:
            each.result(DEADLINE_S / 2)
    assert torch.equal(out, torch.full((4,), 3.0))


@pytest.mark.parametrize("group", [2], indirect=True)
def test_an_interrupted_caller_leaves_the_role(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C in a notebook: what is submitted later goes on by itself."""
    calls, wait = group.ranks[0], group.ranks[0].communicator._poller.wait
    pending = calls.receive(torch.zeros(4), 1, 9, How(DEADLINE_S, waits=True))
    me = threading.get_ident()

    def interrupted(timeout_s: float) -> None:
        if threading.get_ident() == me:
            raise KeyboardInterrupt
        wait(timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(calls.communicator._poller, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
    sums = [group.ranks[r].all_reduce(torch.ones(4), torch.zeros(4), SUM, How(DEADLINE_S)) for r in range(2)]
    sent = group.ranks[1].send(torch.ones(4), 0, 9, How(DEADLINE_S))
    until(lambda: pending.done and sent.done and all(each.done for each in sums))
    waits = []
    monkeypatch.setattr(calls.communicator._poller, "wait", lambda timeout_s: (waits.append(timeout_s), wait(timeout_s)))
    time.sleep(0.1)
    assert len(waits) <= 5, f"{len(waits)} waits for a nudge that was meant for the interrupted caller"


def test_aborting_what_is_closed_does_nothing() -> None:
    group = Group(2)
    group.close()
    for rank in group.ranks:
        first = str(rank.communicator.failure)
        assert "closed" in first or "farewell" in first  # of the one that closed first, its peer may hear
        rank.communicator.abort(Cause("too late"))
        assert str(rank.communicator.failure) == first


@pytest.mark.parametrize("group", [2], indirect=True)
def test_a_callback_that_fails_stops_nothing(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("a user's mistake")

    how = How(DEADLINE_S)
    waits = [group.ranks[0].receive(torch.zeros(1), 1, tag, how) for tag in range(2)]
    waits[0].then(fail)
    for tag in range(2):
        group.ranks[1].send(torch.ones(1), 0, tag, how).wait()
        until(lambda done=tag: waits[done].done)
    assert "a user's mistake" in caplog.text


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize("waits", [True, False])
def test_a_caller_whose_peer_is_late_holds_up_nobody(group: Group, waits: bool) -> None:
    """It drives and sleeps; another thread of its rank submits, and waits for what nobody but the sleeper would bring on."""
    late = torch.zeros(4)
    sleeper = threading.Thread(target=lambda: group.ranks[0].receive(late, 1, 9, How(DEADLINE_S, waits=True)).wait())
    sleeper.start()
    time.sleep(0.05)

    def run(me: int) -> torch.Tensor:
        for _ in range(20):
            value = torch.ones(3)
            group.ranks[me].all_reduce(value, value, SUM, How(DEADLINE_S, waits=waits)).wait()
        return value

    assert all(torch.equal(value, torch.full((3,), 2.0)) for value in group.on_each(run))
    assert torch.equal(late, torch.zeros(4))
    group.ranks[1].send(torch.ones(4), 0, 9, How(DEADLINE_S)).wait()
    sleeper.join(DEADLINE_S / 2)
    assert not sleeper.is_alive()
    assert torch.equal(late, torch.ones(4))


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize("who", ["a caller that waits", "a caller", "the thread"])
def test_an_endpoint_that_fails_ends_the_generation_for_all(group: Group, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = group.ranks[0].receive(torch.zeros(1), 1, 0, How(DEADLINE_S))
    theirs = group.ranks[1].receive(torch.zeros(1), 0, 0, How(DEADLINE_S))
    endpoint = group.endpoints[0]
    progress, caller = endpoint.progress, threading.current_thread()

    def fail(now: float) -> Any:
        if (threading.current_thread() is caller) == (who != "the thread"):
            raise OSError("no such device")
        return progress(now)

    monkeypatch.setattr(endpoint, "progress", fail)
    if who == "the thread":
        group.ranks[1].send(torch.ones(1), 0, 0, How(DEADLINE_S))
        until(lambda: pending.done)
    else:
        with pytest.raises(OSError, match="no such device"):
            group.ranks[0].barrier(How(DEADLINE_S, waits=who != "a caller")).wait()
    for handle in (pending, theirs):
        with pytest.raises(CollectiveError, match="the communicator failed.*no such device"):
            handle.wait(DEADLINE_S / 2)


def _refuse(*_: Any, **__: Any) -> Any:
    raise OSError("no such device")


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("where", ["memory", "send", "receive", "sum"])
def test_an_operation_that_cannot_begin_ends_the_generation_for_all(
    group: Group, waits: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the peers would wait for its part, and what is submitted later would meet another operation of theirs."""
    calls, how = group.ranks[0], How(DEADLINE_S, waits=waits)
    pending = calls.receive(torch.zeros(1), 1, 0, How(DEADLINE_S))
    theirs = [group.ranks[1].all_reduce(torch.ones(2000), torch.zeros(2000), SUM, How(DEADLINE_S)) for _ in range(2)]
    with monkeypatch.context() as patch:
        if where == "memory":
            patch.setattr("helixrt.collectives.execution.OperationMemory", _refuse)
        elif where == "sum":
            patch.setattr("helixrt.collectives.execution.CollectiveMachine._begin", _refuse)
        else:
            patch.setattr(group.endpoints[0], where, _refuse)
        with pytest.raises(OSError, match="no such device"):
            calls.all_reduce(torch.ones(2000), torch.zeros(2000), SUM, how)
    for handle in (pending, *theirs):
        with pytest.raises(CollectiveError, match="could not begin.*no such device"):
            handle.wait(DEADLINE_S / 2)
    late = calls.all_reduce(torch.ones(1), torch.ones(1), SUM, how)
    assert late.error is not None and late.error.skipped and not calls.communicator.busy
    group.configure(2, [0, 1])

    def again(rank: int) -> torch.Tensor:
        out = torch.zeros(2000)
        group.ranks[rank].all_reduce(torch.ones(2000), out, SUM, How(DEADLINE_S, waits=waits)).wait()
        return out

    assert all(torch.equal(out, torch.full((2000,), 2.0)) for out in group.on_each(again))


@pytest.mark.parametrize("group", [2], indirect=True)
def test_operations_end_though_the_endpoint_cannot_abort(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = group.ranks[0].all_reduce(torch.ones(2000), torch.zeros(2000), SUM, How(DEADLINE_S))
    with monkeypatch.context() as patch:
        patch.setattr(group.endpoints[0], "abort", _refuse)
        group.ranks[0].communicator.abort(Cause("enough"))
    with pytest.raises(CollectiveError, match="enough"):
        handle.wait(DEADLINE_S / 2)


@pytest.mark.parametrize("group", [2, 3], indirect=True)
def test_the_numbers_of_collectives_have_no_end(group: Group) -> None:
    """A month of them in one generation: more than the bits of a message's name hold."""
    for calls in group.ranks:
        execution = calls.communicator._execution
        assert execution is not None
        execution.submitted = execution._machine._next_op = NUMBER - 1

    def run(me: int) -> list[torch.Tensor]:
        found = []
        for _ in range(4):
            out = torch.zeros(3000)
            assert group.ranks[me].all_reduce(tensor(me, 3000), out, SUM, How(DEADLINE_S)).wait(DEADLINE_S)
            found.append(out)
        return found

    expected = sum((tensor(rank, 3000) for rank in range(1, group.size)), tensor(0, 3000))
    for results in group.on_each(run):
        for result in results:
            torch.testing.assert_close(result, expected)
