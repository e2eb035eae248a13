"""The settings of a link, the same at both ends.

In: nothing. Out: `LinkOptions`, for the machine and for the code that opens links.
"""

from __future__ import annotations

from dataclasses import dataclass

from helixrt.errors import ConfigError
from helixrt.protocol.hopping.messages import HoppingOptions


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """The settings of a link; both ends must have the same. Times in seconds."""

    fault_tolerance: bool = True  # False: no acknowledgements, no copies, no beats; the first failure loses the link
    striped: bool = True  # over all healthy rails, least outstanding bytes first; False: the lowest-numbered, others back it up
    hopping: HoppingOptions | None = None  # rails are paths, and a policy chooses where new messages go; needs striped and
    # fault_tolerance
    eager_bytes: int = 64 << 10  # messages up to this travel before their receiver has posted
    keep_bytes: int = 256 << 10  # those of them up to this are copied by the sender, whose caller need not wait then
    eager_memory_bytes: int = 4 << 20  # of such messages that wait at the receiver
    window_bytes: int = 64 << 20  # on rails and unacknowledged; one message may always go
    window_frames: int = 256  # likewise

    connect_s: float = 60.0  # from the first event until a rail is up; else the peer is lost
    period_s: float = 1.0  # of liveness: a silent peer is lost within 1.5 of it
    attempt_s: float = 30.0  # software deadline of a frame on a rail; more than `window_bytes` take on the slowest rail
    probe_s: float = 0.25  # for the answer to RESUME; then it is said again, over any rail
    answer_s: float = 0.5  # for the answer to PROBE or SWITCH; then the rail is reset: nothing is lost, probing starts again
    retry_s: float = 0.25  # between the beginnings of attempts to restore a rail that is down
    rest_s: float = 0.1  # of a rail that flaps, doubled with each flap
    longest_rest_s: float = 30.0
    steady_s: float = 10.0  # in service without failure: earlier flaps are forgiven
    acknowledge_s: float = 0.02  # what needs no prompt acknowledgement gets it this late, or along with other traffic
    batched: bool = False  # events of messages come in batches, each ended by `Settle`; may differ between the ends

    def __post_init__(self) -> None:
        for key in ("window_bytes", "window_frames", "connect_s", "period_s", "attempt_s", "probe_s", "answer_s", "retry_s"):
            if not getattr(self, key) > 0:
                raise ConfigError(key, getattr(self, key), "must be more than 0")
        if not 0 <= self.eager_bytes <= self.eager_memory_bytes:
            raise ConfigError("eager_bytes", self.eager_bytes, f"must be 0 to eager_memory_bytes={self.eager_memory_bytes}")
        if self.hopping is not None and not (self.striped and self.fault_tolerance):
            raise ConfigError("hopping", self.hopping.policy.value, "needs striped and fault_tolerance")
