"""Orders of a replica's schedule: kept under their hash where every rank finds them, and taken up by a rank's engine.

In: schedules that the leader decides on, hashes that come with the leader's commands. Out: the same order on all ranks of the
replica, also on those of a replica that starts again and in a run that is resumed.
"""

from __future__ import annotations

from pathlib import Path

from helixrt.engines.pipeline import PipelineEngine
from helixrt.errors import ConfigError, HelixError, Retryable
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import order_key
from helixrt.schedule.check import check_microbatch_order
from helixrt.schedule.exchange.as_json import key_of, order_text, read
from helixrt.schedule.ir import Schedule, ScheduleError


class OrderBook:
    """Of a run. In its store each order stands for as long as the run lives, in its folder for good."""

    def __init__(self, store: RunStore, folder: Path) -> None:
        self._store, self._folder = store, folder / "schedules"

    def put(self, order: Schedule) -> str:
        """Keep the order; returns its hash. Raises Retryable without the store."""
        text = order_text(order)
        key = key_of(text)
        self._folder.mkdir(parents=True, exist_ok=True)
        whole, part = self._folder / f"{key}.json", self._folder / f"{key}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(whole)
        self._store.put_if_absent(order_key(key), text)
        return key

    def get(self, key: str) -> Schedule:
        """The order with this hash. Raises Retryable without the store, ConfigError if neither store nor folder has it."""
        text = self._store.get(order_key(key))
        if text is None:
            try:
                text = (self._folder / f"{key}.json").read_text(encoding="utf-8")
            except OSError:
                rule = f"is neither in the run's store nor in {self._folder}; copy that folder to where the run goes on"
                raise ConfigError("schedule order", key, rule) from None
            if key_of(text) != key:
                raise ConfigError("schedule order", key, f"its file in {self._folder} was changed; delete the file")
            self._store.put_if_absent(order_key(key), text)  # for ranks of other machines
        return read(text, f"order {key}")


class RankOrders:
    """One rank's side: the hooks of its worker, called in its main thread at the same points on all ranks of the replica."""

    def __init__(self, engine: PipelineEngine, book: OrderBook) -> None:
        self.engine, self.book = engine, book
        self.first = engine.schedule
        self._read: dict[str, Schedule] = {}

    def prepare(self, order: str, again: bool = False) -> None:
        """Make the order with this hash ready, "" for the first one; `again`: from its text on, also if it is ready. Raises
        HelixError if this rank cannot work by it."""
        try:
            found = self._of(order)
            self.engine.prepare_schedule(read(order_text(found), "again") if again else found, again)
        except ValueError as error:
            raise ConfigError("schedule order", order, str(error)) from error

    def use(self, order: str) -> None:
        """From the next step on; makes it ready if it is not. Raises Retryable if this rank cannot."""
        try:
            self.engine.use_schedule(self._of(order))
        except (ValueError, HelixError) as error:
            if isinstance(error, Retryable):
                raise
            raise ConfigError("schedule order", order, f"cannot be used by this rank: {error}") from error

    def fits(self, order: str) -> str:
        """Why the engine cannot work by the order with this hash, "" if it can; not whether its graphs can be made."""
        try:
            found = self._of(order)
        except ConfigError as error:
            return str(error)
        first = self.first
        if (found.placement, found.microbatches) == (first.placement, first.microbatches):
            try:
                check_microbatch_order(found)
            except ScheduleError as error:
                return str(error)
            return ""
        return f"it is for chunks on stages {list(found.placement)} and {found.microbatches} micro-batches"

    def _of(self, order: str) -> Schedule:
        if not order:
            return self.first
        if order not in self._read:
            self._read[order] = self.book.get(order)
        return self._read[order]

    def schedule(self, order: str) -> Schedule:
        """The order with this hash, "" for the first one. Raises as `OrderBook.get`."""
        return self._of(order)
