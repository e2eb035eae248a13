"""`helixrt strands show MODEL`: operators, pairs and times of two interwoven strands of a model.

In: the command's arguments; where RANK and WORLD_SIZE are set (torchrun, `helixrt lab net run`) the ranks there are.
Out: an exit code; a report, JSON, a picture, or a graph as Python, from the first rank.

With ranks, or a model that needs one, a few steps are run and everything is measured; ranks that outnumber the GPUs of their
machine share them and communicate over Gloo. Alone, a model that ranks share is planned for links that the options describe:
compute is measured here, communication is an estimate.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from helixrt.collectives.gloo_groups_private import one_gloo_worker
from helixrt.commands import output, subject
from helixrt.commands.problem import number, whole
from helixrt.commands.subject import Sizes, Subject
from helixrt.compile.ahead import Links, fake_world, plan_ahead
from helixrt.compile.explanation import Explanation
from helixrt.compile.microbatches import Batch
from helixrt.compile.options import CODEGENS, Options
from helixrt.compile.train_step import TrainStep
from helixrt.errors import ConfigError
from helixrt.passes.errors import CaptureError

FORMATS = ("text", "json", "svg", "png")
GRAPHS = ("forward", "backward", "woven")
LINKS = {"link": "mbit", "latency": "latency_us", "inside": "inside_mbit", "inside_latency": "inside_latency_us"}
STEPS = 4  # that are run where everything is measured; the first one captures
DEADLINE = timedelta(minutes=5)
EPILOG = """MODEL is one of the project's models (conf/model), or MODULE:FUNCTION. The function returns (model, argument, ...)
and, last, a dictionary of keyword arguments if there are any, with `loss` and `target` among them; the arguments are a
step's batch, of which each micro-batch gets a part. With --ranks it is called as the first of so many, and may share its
model by DTensor or functional collectives. Links are said by options only while there are no ranks; to have them measured:
torchrun --nproc-per-node 2 -m helixrt.cli strands show gpt-tiny --tp 2, or
helixrt lab net run --rate 1gbit -- helixrt strands show gpt-tiny --tp 2."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "the operators of both strands, what hides behind what, predicted and measured times"
    show = actions.add_parser("show", help=summary, description=summary, epilog=EPILOG)
    show.add_argument("model", metavar="MODEL", help=f"{', '.join(subject.names())}, or module:function")
    show.add_argument("--tp", metavar="N", help="ranks of tensor parallelism (default 1)")
    show.add_argument("--sequence", action="store_true", help="sequence parallelism between the matrices, over tp")
    show.add_argument("--cp", metavar="N", help="ranks of context parallelism (default 1)")
    show.add_argument("--ep", metavar="N", help="ranks of expert parallelism (default 1)")
    show.add_argument("--layers", metavar="N", help="number of layers (default: the model's)")
    show.add_argument("--seq-len", metavar="N", help="tokens of a whole sequence (default 128)")
    show.add_argument("--batch", metavar="N", help="sequences of a micro-batch (default 4)")
    show.add_argument("--ranks", metavar="N", help="ranks that share the model of module:function (default 1)")
    show.add_argument("--microbatches", metavar="N", help="micro-batches of a step (default 2)")
    show.add_argument("--link", metavar="MBIT", help="rate between hosts, each way (default 1000)")
    show.add_argument("--latency", metavar="US", help="latency of a collective between hosts (default 100)")
    show.add_argument("--inside", metavar="MBIT", help="rate inside a host (default 10000)")
    show.add_argument("--inside-latency", metavar="US", help="latency of a collective inside a host (default 20)")
    show.add_argument("--per-host", metavar="N", help="ranks on each host (default 1)")
    show.add_argument("--processor", metavar="SHARE", help="share of communication that uses the processor, 0 to 1 (default 0)")
    show.add_argument("--codegen", metavar="KIND", default="eager", help=f"{' or '.join(CODEGENS)} (default eager)")
    show.add_argument("--device", metavar="cpu|cuda", default="cpu", help="device that computes (default cpu)")
    show.add_argument("--graph", metavar="GRAPH", help=f"print {', '.join(GRAPHS)} as Python instead")
    output.add_arguments(show, FORMATS)


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say. Returns 0; raises ConfigError for what they get wrong."""
    form = _form(args)
    world, rank = _world()
    sizes = _sizes(args)
    microbatches = whole("--microbatches", args.microbatches or "2", least=2) or 2
    ranks = (whole("--ranks", args.ranks) or 1) if _by_user(args) else sizes.ranks
    links = _links(args, supposed=world is None and ranks > 1)
    options = Options(microbatches=microbatches, codegen=args.codegen)
    device = _device(args.device)
    if world is not None and world != ranks:
        raise ConfigError("WORLD_SIZE", world, f"must be the ranks that share the model, {ranks}")
    with ExitStack() as stack:
        if world is not None and world > 1:
            one_gloo_worker()
            dist.init_process_group(_backend(device, world), timeout=DEADLINE)
            stack.callback(dist.destroy_process_group)
        elif ranks > 1:
            stack.enter_context(fake_world(ranks))
        if _by_user(args):
            made = subject.of_user(args.model, device)
        else:
            made = subject.of_project(args.model, sizes, microbatches, device)
        try:
            found = _measured(made, options) if links is None else _planned(made, options, links)
        except CaptureError as error:
            raise ConfigError("MODEL", args.model, " ".join(str(error).split())) from error
    if rank == 0:
        _put(args, form, made.title, found)
    return 0


def _measured(made: Subject, options: Options) -> Explanation:
    """Run some steps."""
    step = TrainStep(made.module, replace(options, loss=made.loss))
    for _ in range(STEPS):
        step(*made.args, target=made.target, **made.kwargs)
    return step.explain(times=True)


def _planned(made: Subject, options: Options, links: Links) -> Explanation:
    args, kwargs, target = Batch(made.args, made.kwargs, made.target, options.microbatches, None).calls[0]
    return plan_ahead(made.module, args, kwargs, loss=made.loss, target=target, links=links, codegen=options.codegen)


def _put(args: argparse.Namespace, form: str, title: str, found: Explanation) -> None:
    if args.graph is not None:
        output.put(args, found.code[args.graph] + "\n")
    elif form == "text":
        output.put(args, f"{title}\n{found}\n")
    elif form == "png":
        try:
            Path(args.output).write_bytes(found.written("png", title))
        except OSError as error:
            raise ConfigError("--output", args.output, f"cannot be written: {error.strerror}") from None
    else:
        output.put(args, found.written(form, title).decode())


def _form(args: argparse.Namespace) -> str:
    form = output.chosen_format(args, FORMATS)
    if args.graph is not None:
        if args.graph not in GRAPHS:
            raise ConfigError("--graph", args.graph, f"must be one of {', '.join(GRAPHS)}")
        if args.format is not None:
            raise ConfigError("--format", args.format, "does not go with --graph, which is Python")
    elif form == "png" and args.output is None:
        raise ConfigError("--format", form, "is not for the terminal: give a file with -o")
    return form


def _world() -> tuple[int | None, int]:
    """Number of ranks that were started (None if this process was started alone), and the number of this rank."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None, 0
    return whole("WORLD_SIZE", os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


def _by_user(args: argparse.Namespace) -> bool:
    return ":" in args.model


def _sizes(args: argparse.Namespace) -> Sizes:
    texts = {key: getattr(args, key) for key in ("tp", "cp", "ep", "layers", "seq_len", "batch")}
    given = {key: whole(f"--{key.replace('_', '-')}", text) or 0 for key, text in texts.items() if text is not None}
    if _by_user(args):
        for key in (*given, *(["sequence"] if args.sequence else [])):
            raise ConfigError(f"--{key.replace('_', '-')}", texts.get(key, True), "is for the project's models; see --ranks")
    elif args.ranks is not None:
        raise ConfigError("--ranks", args.ranks, "is for module:function; say --tp, --cp or --ep")
    return Sizes(**given, sequence=args.sequence)


def _links(args: argparse.Namespace, supposed: bool) -> Links | None:
    """What the options say of links; None where there is nothing to suppose. Raises ConfigError if they do all the same."""
    given = {key: getattr(args, key) for key in (*LINKS, "per_host", "processor") if getattr(args, key) is not None}
    if not supposed:
        for key, text in given.items():
            rule = "is for links that are not there: for models that --tp, --cp, --ep or --ranks share, without WORLD_SIZE"
            raise ConfigError(f"--{key.replace('_', '-')}", text, rule)
        return None
    numbers: dict[str, float] = {}
    for key, text in given.items():
        option = f"--{key.replace('_', '-')}"
        if key == "per_host":
            continue
        value = number(option, text)
        assert value is not None, "only what was given"
        if key in ("link", "inside") and value == 0.0:
            raise ConfigError(option, text, "must be above 0")
        if key == "processor" and value > 1.0:
            raise ConfigError(option, text, "must be between 0 and 1")
        numbers[LINKS.get(key, key)] = value
    return Links(**numbers, per_host=whole("--per-host", args.per_host) or 1)


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ConfigError("--device", name, "must be cpu or cuda")
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("--device", name, "needs a GPU; this machine has none that torch can use")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _backend(device: torch.device, world: int) -> str:
    """Gloo where ranks of this machine share a GPU, which NCCL refuses."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if device.type == "cuda" and local <= torch.cuda.device_count() else "gloo"
