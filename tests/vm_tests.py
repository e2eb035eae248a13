"""Tests that run in the lab's VM, reported outside as any other: one boot and one pytest in the guest for all of a session's.

In: what pytest collected. Out: an item in place of each one marked `rdma`; when it runs, it takes the result that the
guest's pytest (`guest_tests`) reports. These items come behind all others, and the guest's pytest starts before the first
test: the VM boots and its tests run while those outside do. In a worker process (pytest-xdist) the first item that asks
starts it: one worker runs all of a session's items, and which one is not known before. The VM is this session's own, or
the kept one that HELIXRT_LAB_VM names (`helixrt lab run --name`). Where the lab cannot run, the items skip with the reason;
in CI they fail.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest

from helixrt.lab import vm, vm_setup
from helixrt.lab.guest_tests import Phase
from helixrt.lab.nics import GUEST
from helixrt.lab.vm import Connection
from helixrt.lab.vm_channel import Command, Frame, Kind
from helixrt.lab.vm_keeper import Shape
from helixrt.lab.vm_setup import LabError

MARK = "rdma"
PAIRS = 2
IDLE_S = 120.0  # of a VM that a session booted and, killed, could not end
DEADLINE_S = 500  # of one test, its wait for the boot included; the guest's own limit is the usual one


class FailedInGuest(Exception):
    """A test failed in the guest; the text is what pytest said there."""


class Machine:
    """The VM of this session's tests: one that ends with it, or the kept one that the environment names."""

    def __init__(self) -> None:
        self._kept = os.environ.get(vm.NAMED, "")
        self._booted = False

    @property
    def name(self) -> str:
        """For `helixrt lab run --name`."""
        return self._kept or f"pytest-{os.getpid()}"

    def connect(self) -> Connection:
        """Boots it when it does not run yet. LabError when it cannot."""
        self._booted = True
        return vm.open_kept(self.name, Shape(), print, vm.IDLE_S if self._kept else IDLE_S)

    def close(self) -> None:
        if self._booted and not self._kept:
            vm.stop(self.name)
            shutil.rmtree(vm.folder_of(self.name), ignore_errors=True)


class GuestSession:
    """One pytest in the guest. Its unread output is kept by the VM's keeper process."""

    def __init__(self, machine: Machine, folder: str, options: Sequence[str]) -> None:
        self._machine, self._folder, self._options = machine, folder, options
        self._connection: Connection | None = None
        self._frames: Iterator[Frame] | None = None
        self._nodes: Sequence[str] = ()
        self._phases: dict[str, list[Phase]] = defaultdict(list)
        self._line, self._errors = b"", b""
        self._end = ""

    def phases(self, node: str) -> list[Phase]:
        """The guest's reports on a test, to its teardown. Raises FailedInGuest if there are none."""
        while not any(phase.when in ("teardown", "collect") for phase in self._phases[node]):
            if self._end:
                raise FailedInGuest(self._end)
            self._read()
        return self._phases[node]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def expect(self, nodes: Sequence[str]) -> None:
        """nodes: all that will be asked."""
        self._nodes = nodes

    def start(self) -> None:
        """Once; a second call does nothing."""
        if self._connection is not None or self._end:
            return
        argv = ("python", "-m", "helixrt.lab.guest_tests", *self._options, *self._nodes)
        command = Command(argv, self._folder, vm.environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, PAIRS)
        try:
            self._connection = self._machine.connect()
            self._frames = self._connection.run(command)
        except LabError as error:
            self._end = str(error)

    def _read(self) -> None:
        assert self._frames is not None
        try:
            frame = next(self._frames)
        except LabError as error:
            self._end = str(error)
            return
        if frame.kind is Kind.EXIT:
            said = self._errors.decode(errors="replace").strip()
            self._end = f"the guest's pytest ended with {vm.exit_code(frame)}, without a word about this test\n{said}"
        elif frame.kind is Kind.ERRORS:
            self._errors += frame.payload
        elif frame.kind is Kind.OUTPUT:
            *lines, self._line = (self._line + frame.payload).split(b"\n")
            for phase in map(Phase.decode, filter(None, (line.decode() for line in lines))):
                self._phases[phase.node].append(phase)
                if phase.when == "collect":  # a module that cannot be imported: none of its tests is reported
                    self._end = phase.text


class GuestItem(pytest.Item):
    """Stands for a test that runs in the guest."""

    guest: GuestSession
    node: str  # the test's name in the guest; pytest-xdist changes `nodeid` later
    source: tuple[os.PathLike[str] | str, int | None, str]  # of the test; a skip by a marker must have a line

    def runtest(self) -> None:
        if (lack := vm_setup.lacking()) is not None:
            if os.environ.get("CI") == "true":
                pytest.fail(f"CI must run tests marked {MARK}, but {lack}", pytrace=False)
            pytest.skip(str(lack))
        self.guest.start()
        phases = self.guest.phases(self.node)
        for phase in phases:
            for title, text in phase.sections:
                self.add_report_section("call", f"in the guest: {title}", text)
        for phase in phases:
            if phase.outcome == "failed":
                raise FailedInGuest(phase.text)
            if phase.outcome == "skipped":
                pytest.skip(phase.text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> object:  # type: ignore[override]
        if isinstance(excinfo.value, FailedInGuest):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        return self.source


class Forwarder:
    """The plugin of the pytest outside; inside the guest it changes nothing.

    `options` are for the guest's pytest, which reads neither this one's command line nor its settings.
    """

    def __init__(self, options: Sequence[str] = ()) -> None:
        self.machine = Machine()
        self._options = options
        self._guest: GuestSession | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if GUEST in os.environ:
            return
        for place, item in enumerate(items):
            if item.get_closest_marker(MARK) is None:
                continue
            self._guest = self._guest or GuestSession(self.machine, str(config.rootpath), self._options)
            parent = item.parent
            assert parent is not None
            stand_in = GuestItem.from_parent(parent, name=item.name)
            stand_in.guest, stand_in.node, stand_in.source = self._guest, stand_in.nodeid, item.reportinfo()
            stand_in.own_markers = [*item.own_markers, pytest.mark.timeout(DEADLINE_S).mark]
            stand_in.keywords.update({mark.name: mark for mark in stand_in.own_markers})
            items[place] = stand_in

        items.sort(key=lambda item: isinstance(item, GuestItem))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        asked = [item.node for item in session.items if isinstance(item, GuestItem)]
        if self._guest is None or not asked or session.config.option.collectonly or vm_setup.lacking() is not None:
            return
        self._guest.expect(asked)
        if not hasattr(session.config, "workerinput"):
            self._guest.start()

    def pytest_unconfigure(self) -> None:
        if self._guest is not None:
            self._guest.close()
        self.machine.close()
