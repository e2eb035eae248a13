"""A script whose names travel as `__main__`'s: `python main_script.py write FOLDER` pickles a model, `run FOLDER [START]` has a
rank do what a script does in plain Python, and `read FOLDER` reads what the rank has saved."""

from __future__ import annotations

import enum
import functools
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import helixrt

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
START = sys.argv[3] if len(sys.argv) > 3 else "auto"
CONTEXTS = ("fork", "forkserver", "spawn")


class Net(torch.nn.Linear):
    class Kind(enum.Enum):
        NARROW, WIDE = range(2)


@dataclass
class Point:
    x: int


def noted(function: Callable[[int], int]) -> Callable[[int], int]:
    @functools.wraps(function)
    def inner(number: int) -> int:
        return function(number)

    return inner


@noted
def double(number: int) -> int:
    return 2 * number


class Data(Dataset[Point]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Point:
        return Point(number)


def collate(points: list[Point]) -> list[Point]:
    return [Point(double(point.x)) for point in points]


def by_value() -> int:
    """What a worker of joblib computes: it gets by value what is `__main__`'s, and never imports the script."""
    from ray import cloudpickle

    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(4))"
    command = [sys.executable, "-c", program]
    return int(subprocess.run(command, input=cloudpickle.dumps(double), capture_output=True, check=True).stdout)


def train(session: helixrt.Session) -> None:
    loaded = pickle.loads((FOLDER / "written.pkl").read_bytes())
    loaders = [DataLoader(Data(), 4, num_workers=1, collate_fn=collate, multiprocessing_context=each) for each in CONTEXTS]
    with session.busy("starting workers", 200.0):
        found: dict[str, Any] = {
            "name": __name__,
            "one module": vars(sys.modules["__main__"]) is vars(sys.modules["__mp_main__"]) is globals(),
            "loaded": [type(each) is kind for each, kind in zip(loaded, (Net, Point, Net.Kind), strict=True)],
            "by value": by_value(),
            "loaders": [[point.x for batch in loader for point in batch] for loader in loaders],
            "package": __package__,
        }
    model = session.parallelize(loaded[0])
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    for step in session.steps([torch.ones(4, 2)] * 2, until=1):
        for x in step:
            step.backward(model(x).square().mean())
        step.commit()
    torch.save([model, Point(3), Net.Kind.WIDE, double, Net.Kind], FOLDER / "saved.pt")
    (FOLDER / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if CASE == "write":
        (FOLDER / "written.pkl").write_bytes(pickle.dumps([Net(2, 1), Point(1), Net.Kind.NARROW]))
    elif CASE == "read":
        saved = torch.load(FOLDER / "saved.pt", weights_only=False)
        print(saved[0], *saved[1:3], saved[3] is double, saved[4] is Net.Kind)
    else:
        helixrt.run(train, storage=FOLDER / "runs", options=helixrt.RunOptions(start=START, checkpoint_every=0))
