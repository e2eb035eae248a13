"""Events (input), actions (output) and options of path policies, all frozen.

In: nothing. Out: the types that `hopper.Hopper` and the other policies (`policies`) share with the code that
sends over several paths: `link.paths` on a link whose rails are paths, the verbs driver, simulated worlds. Paths are
numbered from 0; times are the caller's monotonic seconds.

Every RTT in an event is that of a message of the standard size: `Unloaded.equal_sized` turns the time of a message or
probe of any size into it, by what an idle path of the rated speed takes for either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from helixrt.errors import ConfigError


class PolicyName(Enum):
    """Who chooses the path."""

    HOPPER = "hopper"  # by measured RTT and probes (`hopper.Hopper`)
    FLOWBENDER = "flowbender"  # a random other path when this one is congested
    ECMP = "ecmp"  # a random path, kept


@dataclass(frozen=True)
class Unloaded:
    """What a message takes on an idle path of the rated speed: the floor of every RTT."""

    rate_bytes_per_s: float
    latency_s: float = 1e-3  # of an empty message and its acknowledgement, including the time of the code that handles them

    def __post_init__(self) -> None:
        if not self.rate_bytes_per_s > 0:
            raise ConfigError("rate_bytes_per_s", self.rate_bytes_per_s, "must be more than 0: the rated speed of a path")
        if not self.latency_s >= 0:
            raise ConfigError("latency_s", self.latency_s, "must not be negative")

    def of(self, length: int) -> float:
        """Seconds for `length` bytes."""
        return self.latency_s + length / self.rate_bytes_per_s

    def equal_sized(self, took_s: float, length: int, standard: int) -> float:
        """The RTT that `took_s` for `length` bytes stands for in a message of `standard` bytes: as many times the floor.

        (Not as many seconds above it: a slow link makes long messages slow in proportion. What a queue adds to a small
        probe is so taken for more than it will add to a message, which errs on the side of staying.)
        """
        return max(1.0, took_s / self.of(length)) * self.of(standard)


@dataclass(frozen=True, kw_only=True)
class HoppingOptions:
    """Table 1 of Hopper, in multiples of the base RTT, which is the floor of a message of the standard size.

    `alpha` is the weight of the newest RTT in the average. The table's 1 is no average at all: one late message then
    moves a flow. With 1/5 a single RTT below 8.5 times the base moves nothing, while one of a path that is 10 times
    slower is enough; a lasting threefold RTT takes seven. In the tests with noise this is the largest round number with
    which jitter moves nothing at all in 20,000 messages (1: 389 hops, 1/2: 206, 1/4: 2).
    """

    unloaded: Unloaded
    policy: PolicyName = PolicyName.HOPPER
    alpha: float = 0.2
    probe_above: float = 1.5
    switch_above: float = 2.5
    better: float = 0.8  # a path is taken for better when its RTT is at most this part of the average
    remember: float = 4.0  # base RTTs for which a probed path is not probed again; also between two switches, at the least
    choices: int = 2  # paths probed at a time
    look_first: bool = True  # before the first message too, the drawn path and two more; not in the paper
    look_within: float = 4.0  # unloaded probes, by chance: of senders that begin together later ones see what earlier ones do
    delayed: bool = False  # switches, so that little arrives out of order; a link needs no order
    message_bytes: int = 1 << 20  # the standard size
    probe_bytes: int = 64 << 10  # of one probe; a smaller one measures only kernel jitter and a shaper's burst (paper: 10 KB)
    depth_bytes: int = 2 << 20  # given to a path before it has acknowledged what it has; one message may always go

    def __post_init__(self) -> None:
        for key, least, most in (("alpha", 0.0, 1.0), ("better", 0.0, 1.0)):
            if not least < getattr(self, key) <= most:
                raise ConfigError(key, getattr(self, key), f"must be more than {least:g} and at most {most:g}")
        if not 1 <= self.probe_above <= self.switch_above:
            rule = f"must be at least 1 and at most switch_above={self.switch_above:g}"
            raise ConfigError("probe_above", self.probe_above, rule)
        if not self.look_within >= 0:
            raise ConfigError("look_within", self.look_within, "must not be negative")
        if not self.remember >= 1:
            raise ConfigError("remember", self.remember, "must be at least 1 base RTT")
        for key in ("choices", "message_bytes", "probe_bytes", "depth_bytes"):
            if getattr(self, key) < 1:
                raise ConfigError(key, getattr(self, key), "must be at least 1")

    @property
    def base_s(self) -> float:
        """The base RTT."""
        return self.unloaded.of(self.message_bytes)

    @property
    def look_within_s(self) -> float:
        return self.look_within * self.unloaded.of(self.probe_bytes)


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Starting:
    """The first message is about to be sent; it waits while the policy's `looking` is true."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A message was handed to `path`."""

    path: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A message left `path`: acknowledged, or taken back from a path that failed."""

    path: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A message on `path` was acknowledged, `rtt_s` after it was sent, or after the one before it was acknowledged if
    that came later: so the sender's own queue does not count."""

    path: int
    rtt_s: float


@dataclass(frozen=True, slots=True)
class Pending:
    """A message on `path` has been under way for `rtt_s`, counted as in `Measured`: its RTT will be no less."""

    path: int
    rtt_s: float


@dataclass(frozen=True, slots=True)
class Answered:
    """The probe of `path` came back."""

    path: int
    rtt_s: float


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The probe of `path` was lost."""

    path: int


@dataclass(frozen=True, slots=True)
class PathLost:
    """Nothing may be sent on `path` until `PathBack`."""

    path: int


@dataclass(frozen=True, slots=True)
class PathBack:
    path: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; wanted at the policy's `deadline`."""


Event = Starting | Begun | Ended | Measured | Pending | Answered | Unanswered | PathLost | PathBack | Tick

# ---------------------------------------------------------------- actions


class Reason(Enum):
    """Why the path changed."""

    CONGESTED = "congested"  # the old one was, and the new one is better (or chosen blindly, by FlowBender)
    LOOKED = "looked"  # the best of those that were looked at before the first message
    LOST = "lost"  # the old one failed


@dataclass(frozen=True, slots=True)
class Probe:
    """Send a small message on each of these paths and tell `Answered`."""

    paths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Switch:
    """New messages go on `path`, from `at_s` on; if messages must keep their order, none is sent until then.

    The RTTs are what the decision rested on: the old path's (its average, with what is pending; inf: no answer to its probe),
    and the new one's, 0 if it was not measured.
    """

    old: int
    path: int
    at_s: float
    reason: Reason
    old_rtt_s: float
    rtt_s: float


Action = Probe | Switch
