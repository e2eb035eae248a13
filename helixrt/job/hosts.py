"""On which machines the processes of a run are, as Slurm says it, and which address of this one leads to the others.

In: the environment. Out: the address that a run's servers listen on, and a warning where other machines cannot reach it.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping

from helixrt.collectives.endpoints import LOOPBACK, interface_towards
from helixrt.errors import ConfigError

AUTO = "auto"
NODE_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")  # the widest first: a step has a part of its job
_ANY_PORT = 9  # of the way to a machine; nothing is sent
_MOST_NODES = 100_000
_PART = re.compile(r"([^\[\],]*)\[([^\[\]]*)\]|([^\[\],]+)")  # of a name: with numbers in brackets, or without


def nodes(environ: Mapping[str, str]) -> list[str]:
    """The machines of this Slurm job; [] outside of Slurm. Raises ConfigError for a list that is none."""
    for variable in NODE_LISTS:
        if text := environ.get(variable):
            return expanded(text, variable)
    return []


def expanded(text: str, key: str = NODE_LISTS[0]) -> list[str]:
    """The names in Slurm's short form: `a[01-03,7],b` is a01, a02, a03, a7, b. Raises ConfigError."""
    found: list[str] = []
    for part in _split(text, key):
        names = [""]
        for match in _PART.finditer(part):
            before, numbers, plain = match.groups()
            ends = [plain] if plain is not None else [f"{before}{number}" for number in _numbers(numbers, key, text)]
            if len(names) * len(ends) + len(found) > _MOST_NODES:
                raise ConfigError(key, text[:80], f"names more than {_MOST_NODES} machines")
            names = [name + end for name in names for end in ends]
        found += names
    return found


def _split(text: str, key: str) -> Iterator[str]:
    """At commas outside of brackets."""
    depth, start = 0, 0
    for at, character in enumerate(text + ","):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            break
        if character == "," and depth == 0:
            if start == at:
                break
            yield text[start:at]
            start = at + 1
    else:
        if depth == 0:
            return
    raise ConfigError(key, text, "is no list of machines as Slurm writes it, such as node[01-03,7],login")


def _numbers(text: str, key: str, whole: str) -> Iterator[str]:
    for span in text.split(","):
        first, dash, last = span.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit() and 0 <= int(last) - int(first) < _MOST_NODES):
            raise ConfigError(key, whole, f"{span!r} is no number and no range of numbers")
        width = len(first)
        yield from (f"{number:0{width}d}" for number in range(int(first), int(last) + 1))


def serving_host(host: str, environ: Mapping[str, str]) -> str:
    """The address that the servers of a run listen on: `host`, or, if that is `auto`, in a Slurm job of several machines this
    one's on the way to another of them, else loopback. Raises ConfigError if there is no such way."""
    if host != AUTO:
        return host
    others = [name for name in nodes(environ) if not _is_here(name, environ)]
    if not others:
        return LOOPBACK
    try:
        found = interface_towards(f"{others[0]}:{_ANY_PORT}")
    except OSError as error:
        rule = f"there is no way to {others[0]}, another machine of this Slurm job ({error}); name this machine's address"
        raise ConfigError("host", host, rule) from error
    if ipaddress.ip_address(found).is_loopback:
        rule = f"{others[0]}, another machine of this Slurm job, means {found} here; name this machine's address"
        raise ConfigError("host", host, rule)
    return found


def unreachable(host: str, environ: Mapping[str, str]) -> str:
    """Why other machines of this Slurm job cannot reach servers that listen on `host`; "" if they can, or if there are none."""
    others = [name for name in nodes(environ) if not _is_here(name, environ)]
    if not others or not is_loopback(host):
        return ""
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f"the servers listen on {host}, which {others[0]}{more} of this Slurm job cannot reach; use --host {AUTO}"


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to this machine alone."""
    try:
        return all(address.is_loopback for address in addresses_of(host))
    except OSError:
        return False


def addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """What a name or an address means here. Raises OSError for what means nothing."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(str(error)) from error
    return [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


def _is_here(name: str, environ: Mapping[str, str]) -> bool:
    """Whether Slurm's name of a machine is this one's."""
    mine = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return name.partition(".")[0] == mine.partition(".")[0]
