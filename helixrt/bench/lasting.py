"""A run that lasts: memory, files, keys and the cost of a restart after a million steps, and the start of many ranks.

One writer proposes the records of so many replicas, one reader follows as another leader does, one as the driver, which
compacts the log; each by the code of a job (`RunLog`, `Log`, `LineageWriter`, `Compaction`), over a store in this process,
under a clock that moves by a second a step. A record in a thousand supersedes the one before. The growth is looked at ten
times: it must be flat. Then many ranks, each a thread, start by the code of a job up to their first exchange
(`_starting_ranks`): what each asks of the store must not grow with their number, but for a quorum over the store.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from helixrt.bench._arguments import add_json
from helixrt.bench._figures import write
from helixrt.bench._starting_ranks import Start, start
from helixrt.job import checkpoint as checkpoints
from helixrt.job.compaction import Compaction
from helixrt.job.lineage_files import LineageWriter, read_log
from helixrt.protocol.step.lineage import CommitRecord, Log, audit, genesis
from helixrt.replica.runlog import RunLog
from helixrt.replica.store import MemoryRunStore

MARKS, STEADY, MOST_GROWTH = 10, 2, 2.2  # looks at the growth; the one that the last is compared with
SUPERSEDED_EVERY = 1000
CHECKPOINT_EVERY, CHECKPOINTS = 100, 2
MOST_S = 1200.0  # of compute for each million records
STARTS, MOST_EACH = (64, 128, 256), 1.5  # ranks that start; what the most of them ask for each, over the fewest


@dataclass(frozen=True)
class Mark:
    """What there is after `step` steps. `restart_*`: of a rank that starts; `resume_s`: of a driver that reads the folder."""

    step: int
    rss_mb: float
    keys: int
    store_mb: float
    files: int
    files_mb: float
    restart_requests: int
    restart_s: float
    resume_s: float


class CountedStore(MemoryRunStore):
    """Counts requests."""

    requests = 0

    def get(self, key: str) -> str | None:
        self.requests += 1
        return super().get(key)

    def size(self) -> tuple[int, int]:
        """How many keys, and their bytes."""
        with self._changed:
            return len(self._values), sum(len(key) + len(value) for key, value in self._values.items())


class Reader:
    """A leader's copy of the log, or the driver's: follows the store, forgets what is not needed."""

    def __init__(self, store: CountedStore, clock: Callable[[], float]) -> None:
        self.runlog = RunLog(store, clock=clock)
        self.log = self.runlog.read()

    def follow(self) -> None:
        for entry in self.runlog.read_from(len(self.log)):
            self.log.append(entry)

    def forget(self) -> None:
        self.log.drop(self.runlog.begin)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=int, default=1_000_000, help="0: the starts alone")
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--start", type=int, nargs="*", default=STARTS, metavar="RANKS", help="start so many emulated ranks")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0 if all is flat, and a million records were fast enough; else 1."""
    begin_s, marks, clean = time.process_time(), list[Mark](), True
    if args.records:
        with tempfile.TemporaryDirectory() as folder:
            marks, clean = live(args.records, args.replicas, Path(folder))
    seconds = time.process_time() - begin_s
    print(f"lasting: {args.records} records of {args.replicas} replicas, one writer, two readers: {seconds:.0f} s of compute")
    for mark in marks:
        print("  " + "  ".join(f"{name} {value:.6g}" for name, value in asdict(mark).items()))
    starts = [start(ranks) for ranks in args.start]
    for one in starts:
        print(
            f"  {one.ranks} ranks: first quorum of {one.members} after {one.first_quorum_s:.2f} s, connected after "
            f"{one.connected_s:.2f} s; each asks for {one.asked / one.ranks:.1f} things (at most {one.asked_most}), and for "
            f"{one.quorum_asked / one.ranks:.1f} to form the quorum over the store, in {one.requests / one.ranks:.1f} requests;"
            f" the server sends {one.by_server / one.ranks:.1f} for each"
        )
    grown = growth(marks) if marks else {}
    print(f"  last mark over mark {STEADY}: {', '.join(f'{k} {v:.2f}' for k, v in grown.items())}" if grown else "")
    settings = {"records": args.records, "replicas": args.replicas, "checkpoint_every": CHECKPOINT_EVERY}
    done, begun = [asdict(mark) for mark in marks], [asdict(one) for one in starts]
    write(args.json, "lasting", settings, {}, marks=done, growth=grown, start=begun, compute_s=seconds)
    flat = all(ratio <= MOST_GROWTH for name, ratio in grown.items() if not name.endswith("_s"))
    fast = args.records < 1_000_000 or seconds <= MOST_S * args.records / 1e6
    return 0 if clean and flat and fast and (not starts or flat_start(starts)) else 1


def live(records: int, replicas: int, folder: Path) -> tuple[list[Mark], bool]:
    """The marks, and whether the audit of the whole run is clean and complete."""
    now_s = 0.0
    store = CountedStore()
    first = genesis("lasting", replicas)
    driver_log = RunLog(store, clock=lambda: now_s)
    compaction = Compaction(driver_log, folder, replicas)
    compaction.restore(Log([first]))
    writer, follower, driver = (Reader(store, lambda: now_s) for _ in range(3))
    lineage = LineageWriter(folder / "lineage", again=writer.runlog.read_from)
    lineage.append(0, first)
    marks, batches = list[Mark](), 0
    try:
        for number in range(1, records + 1):
            now_s += 1.0
            head = writer.log.head
            back = number % SUPERSEDED_EVERY == 0
            base = writer.log.get(head.parent) if back else head
            assert base is not None
            batches += 0 if back else replicas
            writer.forget()
            put(writer, lineage, next_record(base, head.generation))
            follower.follow()
            follower.forget()
            driver.follow()
            head = writer.log.head
            if head.step % CHECKPOINT_EVERY == 0:
                lineage.flush()
                made = folder / "checkpoints" / checkpoints.folder_name(head)
                made.mkdir(parents=True, exist_ok=True)
                (made / checkpoints.MANIFEST).write_text("{}")
                checkpoints.prune(folder / "checkpoints", CHECKPOINTS, head.step)
            compaction.look(driver.log, 1)
            if number % max(1, records // MARKS) == 0:
                lineage.flush()
                compaction.settle()
                marks.append(mark(store, folder, head.step))
    finally:
        lineage.close()
        compaction.close()
    found = audit(driver.log.chain(), 1, driver.log.behind.audit)
    superseded = driver.log.behind.superseded + len(driver.log.superseded())
    return marks, found.clean and found.batches == batches and superseded == records // SUPERSEDED_EVERY


def next_record(base: CommitRecord, generation: int) -> CommitRecord:
    return CommitRecord(
        base.step + 1,
        generation + 1,
        base.hash,
        tuple((replica, 0) for replica in base.positions),
        {replica: position + 1 for replica, position in base.positions.items()},
        base.run,
    )


def put(writer: Reader, lineage: LineageWriter, record: CommitRecord) -> None:
    """As a leader at a commit: what the log has, the append, its copy, the file."""
    writer.follow()
    index = len(writer.log)
    stands = writer.runlog.append(index, record)
    writer.log.append(stands)
    lineage.append(index, stands)


def mark(store: CountedStore, folder: Path, step: int) -> Mark:
    before, begin_s = store.requests, time.perf_counter()
    RunLog(store).read()
    restart_requests, restart_s = store.requests - before, time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    read_log(folder / "lineage")
    resume_s = time.perf_counter() - begin_s
    keys, stored = store.size()
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return Mark(
        step, rss_mb(), keys, stored / 1e6, len(sizes), sum(sizes) / 1e6, restart_requests, restart_s, resume_s
    )  # fmt: skip


def growth(marks: list[Mark]) -> dict[str, float]:
    """The last mark over an early one: `MARKS` / `STEADY` for what grows with the steps, at most 2 for what is cut to half when
    it is full."""
    early, last = asdict(marks[STEADY - 1]), asdict(marks[-1])
    return {name: last[name] / early[name] for name in last if name != "step"}


def flat_start(starts: Sequence[Start]) -> bool:
    """Whether all came together, and ranks on average ask for no more where there are more of them, but for the quorum."""
    each = [one.asked / one.ranks for one in starts]
    return all(one.members == one.ranks for one in starts) and max(each) <= MOST_EACH * min(each)


def rss_mb() -> float:
    """Of this process, now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
