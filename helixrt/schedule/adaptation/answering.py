"""A process that answers the policy's questions, one after the other: `python -m helixrt.schedule.adaptation.answering`.

In: on standard input, frames of a 4-byte length and a pickled `Question`, from the process that started this one. Out: on
standard output, frames of an `Answer`, or of a text that says why there is none. Ends with its input. It runs at the lowest
priority, beside a rank that trains.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import IO, Any

from helixrt.errors import HelixError
from helixrt.schedule.adaptation.judge import judge

_LENGTH = 4


def put(stream: IO[bytes], value: Any) -> None:
    """Write one frame. Raises OSError where nobody reads."""
    data = pickle.dumps(value)
    stream.write(len(data).to_bytes(_LENGTH, "big") + data)
    stream.flush()


def take(stream: IO[bytes]) -> Any:
    """Read one frame. Raises EOFError at the end of the stream."""
    head = stream.read(_LENGTH)
    data = stream.read(int.from_bytes(head, "big")) if len(head) == _LENGTH else b""
    if not head or len(data) < int.from_bytes(head, "big"):
        raise EOFError
    return pickle.loads(data)


def main() -> None:
    """Answer until the input ends."""
    os.nice(19)
    while True:
        try:
            question = take(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = judge(question)
        except HelixError as error:
            answer = str(error)
        put(sys.stdout.buffer, answer)


if __name__ == "__main__":
    main()
