"""The start of many ranks: all are in the first quorum, and nothing that they ask of the run's store grows with the square."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from helixrt.bench import lasting
from helixrt.bench._starting_ranks import start


@pytest.mark.system
def test_what_ranks_ask_for_at_their_start_grows_with_their_number() -> None:
    few, some, many = (start(ranks) for ranks in (4, 8, 16))
    for one in (few, some, many):
        assert one.members == one.ranks and 0 < one.first_quorum_s <= one.connected_s
        assert one.asked <= one.requests
    # What all ask for is a + b * ranks: twice the ranks more, twice the things more; with the square it would be four times.
    assert some.asked > few.asked and many.asked - some.asked <= 2.6 * (some.asked - few.asked), (few, some, many)
    assert many.quorum_asked <= 40 * 16, "two members look at all others; the rest look at these two"
    assert lasting.flat_start([some, many])


@pytest.mark.system
def test_the_option_writes_its_figures(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    lasting.add_arguments(parser)
    assert list(parser.parse_args([]).start) == [64, 128, 256]
    arguments = parser.parse_args(["--records", "0", "--start", "6", "12", "--json", str(tmp_path / "lasting.json")])
    assert lasting.run(arguments) == 0
    told = json.loads((tmp_path / "lasting.json").read_text())
    assert [one["ranks"] for one in told["start"]] == [6, 12] == [one["members"] for one in told["start"]]
    assert told["marks"] == []
