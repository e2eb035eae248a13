"""How a rank reaches others: the ranks of its replica, equal ranks of other replicas, and who decides on membership.

In: a rank's context. Out: the implementations of the contracts that its settings name.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from helixrt.collectives.deadline import Deadline
from helixrt.collectives.endpoints import open_endpoint
from helixrt.collectives.exchange import Exchange
from helixrt.collectives.ftar import FtarExchange
from helixrt.collectives.gloo import GlooExchange
from helixrt.collectives.gloo_groups_private import bind_gloo, one_gloo_worker
from helixrt.collectives.rendezvous import StoreClients, all_connected, meet
from helixrt.engines.replica_mesh import AXES, ReplicaMesh
from helixrt.errors import ConfigError, MisuseError, Retryable
from helixrt.job.config import PipelineConfig, TransportConfig
from helixrt.job.link_delays import delay_towards, link_delays
from helixrt.job.places import axes_of
from helixrt.job.rank_context import RankContext
from helixrt.job.reach import reach
from helixrt.pipeline.endpoint_channels import StageChannels
from helixrt.replica.contracts import Membership, StateTransport
from helixrt.replica.membership import SoloMembership, TorchftMembership
from helixrt.replica.rank_monitor import monitors
from helixrt.replica.store import split_address
from helixrt.replica.store_membership import StoreMembership
from helixrt.schedule.simulate import DELEGATED, Comm, Direct
from helixrt.transport.auto import pack_addresses, unpack_addresses
from helixrt.transport.choice import AUTO, NATIVE

_PATIENCE_S = 3600.0  # of a collective, and of a stage with another one: a rank that has gone breaks it at once, and the
# controller ends one that hangs, which knows what may take longer (`session.busy`)


def replica_mesh(context: RankContext, device: torch.device) -> ReplicaMesh:
    """Connect the ranks of this replica: Gloo for tensors on the CPU, NCCL for those on CUDA devices, where ranks share a
    stage. Stages reach each other by channels (`stage_channels`), so they may share a device, which NCCL refuses.

    It is made once in the life of a replica, and a replica leaves whole. FSDP2 and DTensors need the process's default group to
    be initialized, so this initializes it. Raises MisuseError if the user has done so before, Retryable if a rank does not
    come.
    """
    if context.group_world_size == 1:
        return ReplicaMesh({})
    if dist.is_initialized():
        raise MisuseError(
            "torch.distributed was initialized before session.parallelize, which must do it for helixrt.Mesh(...); leave "
            "init_process_group out, and take session.device_mesh for collectives inside the replica; an Accelerator or "
            "PartialState of accelerate, which initializes it too, is made after the first use of session.device_mesh"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    sizes = axes_of(context.config.mesh)
    timeout = timedelta(seconds=_PATIENCE_S)
    within_stages = context.group_world_size > sizes["pp"]
    backend = f"cpu:gloo,{device.type}:nccl" if device.type != "cpu" and within_stages else "gloo"
    mesh = ReplicaMesh(sizes, context.group_rank, device.type, timeout)
    try:
        _connect_ranks(context, backend, timeout)
        for axis in (axis for axis in AXES if sizes[axis] > 1):
            mesh.group(axis)
    except RuntimeError as error:
        raise Retryable(f"the ranks of this replica did not connect: {error}") from error
    return mesh


def _connect_ranks(context: RankContext, backend: str, timeout: timedelta) -> None:
    """Make the default process group that of this replica's ranks, on the address that leads to the run's store."""
    host, port = split_address(context.spec.store)
    store = dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=context.timeouts.start_s)
    )
    if not os.environ.get("GLOO_SOCKET_IFNAME"):  # else the user has chosen
        bind_gloo(context.interface)
    else:
        one_gloo_worker()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"pipeline/{context.life}", store),
        rank=context.group_rank,
        world_size=context.group_world_size,
        timeout=timeout,
    )


def communication(settings: PipelineConfig) -> Comm:
    """How stages send and receive."""
    return Direct(settings.direct) if settings.direct else DELEGATED


def stage_channels(context: RankContext, mesh: ReplicaMesh, number: int, device: torch.device) -> StageChannels | None:
    """Over endpoints to the other stages, among ranks that are alike on the other axes; None for a single stage, and where the
    settings ask for Gloo. `number` counts the models of this rank: each has its own. `device`: where the stage computes.

    They notice a peer that is gone or cannot be reached, and leave a rail that fails; a peer that hangs or is stopped is the
    controller's to end, as over Gloo. Raises Retryable if a rank does not come, ConfigError for Gloo and tensors on a device.
    """
    settings, timeouts = context.config.pipeline, context.timeouts
    stage, stages = mesh.rank("pp"), mesh.size("pp")
    if stages == 1:
        return None
    if settings.channels != "endpoint":
        if device.type != "cpu":
            raise ConfigError("pipeline.channels", settings.channels, f"carries no tensors on {device.type}; take endpoint")
        return None
    transport = context.config.transport if context.config.exchange == "ftar" else TransportConfig()
    towards = replace(reach(transport, context.replica, timeouts), hang_s=timeouts.start_s)
    if towards.transport == NATIVE:  # it loses a peer that is stopped, and has no tensors on devices
        towards = replace(towards, transport=AUTO)
    deadline = Deadline(timeouts.start_s)
    prefix = f"stages/{context.life}/{number}/{mesh.members('pp')[0]}"
    secret, made = context.spec.secret.encode(), ExitStack()
    try:
        store = StoreClients().at(f"{context.spec.store}/{prefix}", timeouts.start_s)
        endpoints = [open_endpoint(secret, context.interface, towards) for _ in range(settings.queues)]
        for endpoint in endpoints:
            made.callback(endpoint.close)
        mine = pack_addresses({str(queue): endpoint.address() for queue, endpoint in enumerate(endpoints)})
        meeting = meet(store, stage, stages, mine, context.spec.incarnation, deadline, lambda: False)
        theirs = {peer: unpack_addresses(packed) for peer, packed in meeting.peers.items()}
        for queue, endpoint in enumerate(endpoints):
            peers = {peer: addresses[str(queue)] for peer, addresses in theirs.items()}
            endpoint.connect(meeting.generation, stage, peers, deadline.left_s)
        channels = StageChannels(
            endpoints,
            stage,
            stages,
            context.record,
            timeout_s=_PATIENCE_S,
            host_bytes=settings.host_mb << 20,
            delay=delay_towards(link_delays(context.config.chaos.link, stages), stage),
            comm=communication(settings),
            device=device,
        )
        made.pop_all()  # they are the channels' now
        made.callback(channels.close)
        all_connected(store, stage, stages, deadline, lambda: False)
        made.pop_all()
    except RuntimeError as error:
        raise Retryable(f"the stages of this replica did not connect: {error}") from error
    finally:
        made.close()
    return channels


def state_transport(context: RankContext) -> StateTransport:
    """What serves this rank's state to equal ranks of other replicas, and fetches theirs."""
    catchup = context.config.catchup
    if context.spec.transport == "ray":
        from helixrt.ray_cluster.state_transport import RayTransport

        return RayTransport(serve_cpu=catchup.serve_cpu, serve_mb_s=catchup.serve_mb_s)
    from helixrt.replica.http_transport import HttpTransport

    return HttpTransport(context.spec.secret, context.interface, catchup.serve_cpu, catchup.serve_mb_s)


def gradient_exchange(context: RankContext) -> Exchange:
    """What sums gradients with equal ranks of other replicas."""
    if context.config.exchange == "gloo":
        return GlooExchange(context.timeouts.exchange_s)
    towards = reach(context.config.transport, context.replica, context.timeouts)
    endpoint = open_endpoint(context.spec.secret.encode(), context.interface, towards, context.record)
    name = f"exchange-{context.group_rank}"
    return FtarExchange(endpoint, context.timeouts.exchange_s, name=name, huge_pages=True)  # the buckets are our own


def membership(context: RankContext) -> Membership:
    """What says who takes part; for the leader of a replica."""
    spec, store = context.spec, context.store
    if context.config.mesh.replicas == 1:
        return SoloMembership(spec.run_epoch_s)
    joined: TorchftMembership | StoreMembership
    if not spec.lighthouse:  # the driver has chosen
        joined = StoreMembership(
            context.replica, spec.incarnation, store, context.timeouts, spec.run_epoch_s, context.interface
        )
    else:
        joined = TorchftMembership(
            context.replica,
            spec.incarnation,
            spec.lighthouse,
            store,
            context.timeouts,
            spec.run_epoch_s,
            context.interface,
        )
    others = monitors(store, context.life, context.group_world_size, context.timeouts.start_s)
    joined.depend_on(others, spec.secret.encode())
    return joined
