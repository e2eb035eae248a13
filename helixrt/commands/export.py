"""`helixrt export RUN --to FOLDER`: write a checkpoint's model as Hugging Face safetensors, with the model's own names.

In: the folder of a run, or of one of its checkpoints, which may be in a storage. Out: a folder that `from_pretrained` reads
(with `--config`), and `weights=` of `session.parallelize`. Offline, but for that storage.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run or of a checkpoint; also an address such as s3://...")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--step", type=int, default=None, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--dtype", default="", help="float64, float32, bfloat16 or float16 (default: as it was trained)")
    parser.add_argument("--config", type=Path, default=None, metavar="PATH", help="the model's config.json, which is copied")


def run(args: argparse.Namespace) -> int:
    from helixrt.job.export import export
    from helixrt.job.stored_path import place_of

    done = export(place_of(args.run), args.to, step=args.step, dtype=args.dtype, config=args.config)
    files = f"{len(done.files)} file{'s' if len(done.files) != 1 else ''}"
    print(f"step {done.step}: {done.tensors} tensors in {files} in {args.to.resolve()}")
    return 0
