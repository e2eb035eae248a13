"""How the ranks of a replica reach the others: the job's settings as the collectives take them.

In: `TransportConfig`, and which replica it is for. Out: a `Reach`.
"""

from __future__ import annotations

from helixrt.collectives.endpoints import Reach
from helixrt.job.config import TransportConfig
from helixrt.protocol.hopping.messages import HoppingOptions, PolicyName, Unloaded
from helixrt.timeouts import Timeouts

NO_HOPPING = "none"
POLICIES = (NO_HOPPING, *(policy.value for policy in PolicyName))


def reach(config: TransportConfig, replica: int, timeouts: Timeouts) -> Reach:
    """`timeouts`: the run's; their link period is used unless the transport has a heartbeat of its own.

    Raises ConfigError for what cannot be, if `validate` has not said so before.
    """
    hopping = None
    if config.hopping != NO_HOPPING:
        unloaded = Unloaded(config.rate_mbit * 1e6 / 8, config.latency_ms / 1e3)
        hopping = HoppingOptions(unloaded=unloaded, policy=PolicyName(config.hopping))
    return Reach(
        transport=config.kind,
        rails=config.rails_of(replica),
        paths=config.paths,
        hopping=hopping,
        heartbeat_s=config.heartbeat_s or timeouts.link_period_s,
    )
