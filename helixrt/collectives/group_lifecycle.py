"""Life cycle of a process group: configured for one generation after another, aborted, shut down.

In: a c10d store that all ranks of the generation share. Out: connected `Collectives`. Used by the c10d backend, which
configures once, and by the torchft group, which does again and again; every generation has an
endpoint and a thread of its own, so nothing of an earlier one can reach into it.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import torch.distributed as dist

from helixrt.collectives.deadline import Deadline
from helixrt.collectives.endpoints import Reach, communicator_over, open_endpoint, towards
from helixrt.collectives.group_collectives import GroupCollectives
from helixrt.collectives.operations import Collectives
from helixrt.collectives.rendezvous import agreed_secret, all_connected, meet
from helixrt.collectives.staging import Staging
from helixrt.collectives.work import GroupError
from helixrt.errors import Cause, Retryable
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.transport.contract import Endpoint
from helixrt.transport.monitor import client as monitor
from helixrt.transport.monitor.client import Monitor

SECRET_VARIABLE = "HELIXRT_SECRET"  # the run's secret; without it the ranks agree on one
TRANSPORT_VARIABLE = "HELIXRT_TRANSPORT"  # "auto", "tcp", "shared_memory", "verbs" or "native"; the same on all ranks
HUGE_PAGES_VARIABLE = "HELIXRT_HUGE_PAGES"  # "1": tensors that are used again and again may get huge pages


class GroupLifecycle(GroupCollectives):
    """One rank's group: `join` begins a generation."""

    _tuning: Tuning | None = None
    _heartbeat_s = 1.0

    def _unconfigured(self, timeout: timedelta) -> None:
        self._collectives: Collectives | None = None
        self._timeout_s = timeout.total_seconds()
        self._generation = 0
        self._aborted = threading.Event()  # since the last `_join` began
        self._staging = Staging()
        self._monitor: Monitor | None = None  # kept from one generation's endpoint to the next

    def _join(self, store: dist.Store, rank: int, size: int, name: str, deadline: Deadline | None = None) -> None:
        """Leave the last generation; join the one that connects through `store`. Raises GroupError.

        `deadline`: of this and what went before; by default it begins now, with the group's timeout.
        """
        deadline = deadline or Deadline(self._timeout_s)
        self._leave(Cause("the group is being configured again"))
        self._aborted.clear()
        try:
            secret = os.environ.get(SECRET_VARIABLE) or agreed_secret(store, rank, size, deadline, self._aborted.is_set)
            communicator = communicator_over(self._endpoint(store, secret), self._tuning, name)
            if os.environ.get(HUGE_PAGES_VARIABLE) == "1":
                communicator.use_huge_pages()
            self._collectives = Collectives(communicator, self._staging)
            communicator.begin()
            aborted = lambda: communicator.failure is not None  # noqa: E731
            proposal = self._generation + 1
            meeting = meet(store, rank, size, communicator.address, proposal, deadline, aborted)
            communicator.configure(meeting.generation, rank, meeting.peers, deadline.left_s)
            self._generation = meeting.generation
            all_connected(store, rank, size, deadline, aborted)
        except (Retryable, RuntimeError) as error:
            self._leave(Cause("the group could not be configured"))
            cause = error.cause if isinstance(error, Retryable) else Cause(str(error).splitlines()[0] or repr(error))
            text = f"process group not initialized: timeout after {round(deadline.limit_s * 1000)}ms or earlier: {cause.what}"
            raise GroupError(Cause(text, cause.rank, cause.log)) from error

    def _endpoint(self, store: dist.Store, secret: str) -> Endpoint:
        transport = os.environ.get(TRANSPORT_VARIABLE, "auto")
        reach = Reach(transport=transport, heartbeat_s=self._heartbeat_s)
        here = towards(store)
        endpoint = open_endpoint(secret.encode(), here, reach)
        if self._monitor is None and monitor.unsupported() is None:
            self._monitor = monitor.lease(here)
        return endpoint

    def _leave(self, cause: Cause) -> None:
        self._aborted.set()
        collectives, self._collectives = self._collectives, None
        if collectives is not None:
            if collectives.communicator.busy:
                collectives.communicator.abort(cause)
            collectives.communicator.close()

    # ---------------------------------------------------------------- for c10d and torchft

    def abort(self, errored: bool = True) -> None:
        """End everything that runs, here and at the peers; every later call fails until the group is configured."""
        self._aborted.set()
        if self._collectives is not None:
            self._collectives.communicator.abort(Cause("the process group was aborted"))

    def shutdown(self) -> None:
        """Inform the peers and release connections and threads; it is no failure for peers that wait for nothing."""
        self._leave(Cause("the process group was shut down"))
        kept, self._monitor = self._monitor, None
        if kept is not None:
            monitor.give_back(kept)

    def errored(self) -> Exception | None:
        """What ended the running generation, if anything did."""
        failure = None if self._collectives is None else self._collectives.communicator.failure
        if failure is None:
            return None
        cause = failure.cause
        return GroupError(Cause(f"the process group was aborted: {cause.what}", cause.rank, cause.log))

    def set_timeout(self, timeout: timedelta) -> None:
        """For operations and generations that begin from now on."""
        self._timeout_s = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        """c10d asks for it on the way up; collectives are numbered from 0 in every generation anyway."""

    def _get_sequence_number_for_group(self) -> int:
        return 0 if self._collectives is None else self._collectives.communicator.submitted

    def getBackendName(self) -> str:  # noqa: N802, the name that c10d asks for
        return "helix"

    def name(self) -> str:
        return "helix"
