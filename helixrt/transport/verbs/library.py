"""pyverbs, wherever this machine has it, old or new.

In: nothing. Out: `library()`: the classes of pyverbs that this driver uses, and the numbers of its enums under one
name each. Found as an installed package, else as the system's own (Debian's python3-pyverbs serves the system's
CPython), which is loaded without opening the other packages of the system to imports.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from helixrt.errors import MissingExtra

SYSTEM_PACKAGES = Path("/usr/lib/python3/dist-packages")
_ENUM_MODULES = ("libibverbs_enums", "enums")  # of newer and of older ones
_STATUSES = (
    "SUCCESS LOC_LEN_ERR LOC_QP_OP_ERR LOC_EEC_OP_ERR LOC_PROT_ERR WR_FLUSH_ERR MW_BIND_ERR BAD_RESP_ERR LOC_ACCESS_ERR "
    "REM_INV_REQ_ERR REM_ACCESS_ERR REM_OP_ERR RETRY_EXC_ERR RNR_RETRY_EXC_ERR LOC_RDD_VIOL_ERR REM_INV_RD_REQ_ERR "
    "REM_ABORT_ERR INV_EECN_ERR INV_EEC_STATE_ERR FATAL_ERR RESP_TIMEOUT_ERR GENERAL_ERR"
).split()
_NAMES = (
    "ACCESS_LOCAL_WRITE ACCESS_REMOTE_WRITE ACCESS_REMOTE_READ ACCESS_REMOTE_ATOMIC EVENT_PORT_ERR EVENT_PORT_ACTIVE "
    "EVENT_DEVICE_FATAL QPS_RESET QPS_INIT QPS_RTR QPS_RTS QPS_ERR QPT_RC QP_STATE QP_PKEY_INDEX QP_PORT "
    "QP_ACCESS_FLAGS QP_AV "
    "QP_PATH_MTU QP_DEST_QPN QP_RQ_PSN QP_MAX_DEST_RD_ATOMIC QP_MIN_RNR_TIMER QP_TIMEOUT QP_RETRY_CNT QP_RNR_RETRY "
    "QP_SQ_PSN QP_MAX_QP_RD_ATOMIC SEND_SIGNALED SEND_FENCE WR_SEND WR_RDMA_WRITE_WITH_IMM WR_RDMA_READ "
    "WR_ATOMIC_FETCH_AND_ADD WR_ATOMIC_CMP_AND_SWP WC_SUCCESS WC_RECV WC_RECV_RDMA_WITH_IMM PORT_ACTIVE "
    "LINK_LAYER_ETHERNET"
).split()


class Enums:
    """The numbers behind verbs' names, without their prefix: `enums.QPS_RTS`. Raises AttributeError for an unknown one."""

    def __init__(self, module: ModuleType) -> None:
        numbers = {name: _number(module, f"IBV_{name}") for name in _NAMES}
        self.statuses: Mapping[int, str] = {
            _number(module, f"IBV_WC_{name}"): name for name in _STATUSES if _find(module, f"IBV_WC_{name}") is not None
        }
        self._numbers = numbers

    def __getattr__(self, name: str) -> int:
        try:
            return self.__dict__["_numbers"][name]
        except KeyError:
            raise AttributeError(f"verbs has no IBV_{name} here") from None


def _find(module: ModuleType, name: str) -> Any:
    """In the module, or in one of the enums it holds."""
    if hasattr(module, name):
        return getattr(module, name)
    groups = (group for key, group in vars(module).items() if key.startswith("ibv_"))
    return next((getattr(group, name) for group in groups if hasattr(group, name)), None)


def _number(module: ModuleType, name: str) -> int:
    found = _find(module, name)
    if found is None:
        raise ImportError(f"{module.__name__} has no {name}: a pyverbs this driver does not know")
    return int(found)


@dataclass(frozen=True)
class Library:
    """The parts of pyverbs in use; their arguments are pyverbs' own."""

    enums: Enums
    Context: Callable[..., Any]
    PD: Callable[..., Any]
    MR: Callable[..., Any]
    CompChannel: Callable[..., Any]
    CQ: Callable[..., Any]
    QP: Callable[..., Any]
    QPCap: Callable[..., Any]
    QPInitAttr: Callable[..., Any]
    QPAttr: Callable[..., Any]
    AHAttr: Callable[..., Any]
    GlobalRoute: Callable[..., Any]
    GID: Callable[..., Any]
    SGE: Callable[..., Any]
    SendWR: Callable[..., Any]
    RecvWR: Callable[..., Any]
    Error: type[Exception]  # the base of all it raises


@functools.cache
def library() -> Library:
    """Raises MissingExtra when pyverbs is not here or cannot be loaded."""
    try:
        with _root_logger_as_it_was():
            return _loaded(_loader())
    except ImportError as error:
        raise MissingExtra("pyverbs", "rdma", "RDMA verbs") from error


@contextmanager
def _root_logger_as_it_was() -> Iterator[None]:
    """Some versions of pyverbs set up the logging of the whole program when they are imported."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _loaded(load: Callable[[str], ModuleType]) -> Library:
    qp, wr, addr = load("qp"), load("wr"), load("addr")
    return Library(
        enums=Enums(_enums(load)),
        Context=load("device").Context,
        PD=load("pd").PD,
        MR=load("mr").MR,
        CompChannel=load("cq").CompChannel,
        CQ=load("cq").CQ,
        QP=qp.QP,
        QPCap=qp.QPCap,
        QPInitAttr=qp.QPInitAttr,
        QPAttr=qp.QPAttr,
        AHAttr=addr.AHAttr,
        GlobalRoute=addr.GlobalRoute,
        GID=addr.GID,
        SGE=wr.SGE,
        SendWR=wr.SendWR,
        RecvWR=wr.RecvWR,
        Error=load("pyverbs_error").PyverbsError,
    )


def _enums(load: Callable[[str], ModuleType]) -> ModuleType:
    for name in _ENUM_MODULES:
        try:
            return load(name)
        except ModuleNotFoundError:
            continue
    raise ImportError("pyverbs has neither of the modules of enums this driver knows")


def _loader() -> Callable[[str], ModuleType]:
    """Imports a module of pyverbs."""
    if importlib.util.find_spec("pyverbs") is None:
        _adopt_system_package(SYSTEM_PACKAGES / "pyverbs")
    return lambda name: importlib.import_module(f"pyverbs.{name}")


def _adopt_system_package(folder: Path) -> None:
    """Make `folder` importable as pyverbs, and nothing beside it. Raises ImportError."""
    suffixes = tuple(suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES if "cpython" in suffix)
    if not any(path.name.endswith(suffixes) for path in folder.glob("*.so")):
        raise ImportError(f"no pyverbs for this Python in {folder}")
    spec = importlib.util.spec_from_file_location("pyverbs", folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["pyverbs"]
        raise


def version() -> str:
    """Where pyverbs was found and what it is. Raises MissingExtra."""
    library()
    return str(Path(sys.modules["pyverbs"].__path__[0]))
