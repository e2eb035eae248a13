"""Links under seeded faults: every message arrives once, whole, or its link is lost for a reason; rules broken on purpose.

A failing seed prints the line that replays it (`python -m helixrt.emulate.link_world --seed …`).
"""

from __future__ import annotations

import re

import pytest

from helixrt.emulate import link_world
from helixrt.emulate.link_world import LinkWorld
from helixrt.emulate.seeded import Violation
from tests.emulate import broken_rules as broken
from tests.emulate.broken_rules import Rule, noticed_by


def test_a_seed_replays_exactly_and_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    link_world.main(["--seed", "7", "--text"])
    first = capsys.readouterr().out
    link_world.main(["--seed", "7", "--text"])
    assert capsys.readouterr().out == first
    assert re.search(r"^ +\d+\.\d{3} ms  end [01]  rail \d takes DATA \d+ \(\d, \d\) \d+ B$", first, re.MULTILINE)
    assert re.search(r"end [01]  rail \d brings \w+", first)


# ---------------------------------------------------------------- rules broken on purpose

BROKEN = [
    broken.no_ledger,
    broken.counted_before_it_is_whole,
    broken.older_copies_keep_writing,
    broken.sent_without_credit,
    broken.eager_memory_without_end,
    broken.failed_rails_are_not_resent,
    broken.what_must_not_be_repeated_is,
    broken.handshakes_are_asked_once,
    broken.probes_wait_for_ever,
    broken.a_rail_is_given_up_while_its_peer_stands_still,
    broken.acknowledged_with_its_header,
    broken.no_gaps_in_acknowledgements,
    broken.the_last_rail_is_left_for_being_slow,
    broken.nobody_is_told_of_rails_that_return,
    broken.acknowledgements_have_no_deadline,
    broken.what_a_kernel_acknowledges_is_no_sign_of_life,
    broken.kept_without_a_copy,
    broken.what_is_held_is_given_back_at_once,
    broken.detached_without_a_copy,
    broken.a_frame_that_was_written_in_part_is_written,
    broken.a_copy_begins_where_the_last_one_broke_off,
    broken.a_full_connection_is_silence,
]


class StoppedWorld(LinkWorld):
    """One process is stopped for seconds, its kernel acknowledges for it, and connections soon are full."""

    capacities_bytes = (1500,)
    share_with_kernels, share_with_stops, stops_s = 1.0, 1.0, (4.0,)


class ForgettingWorld(LinkWorld):
    """One end forgets an operation."""

    share_with_forgets = 1.0


# Rules whose break shows in few worlds of the usual mixture: the conditions that it needs are met in all worlds here.
FOCUSED: dict[Rule, type[LinkWorld]] = {
    broken.a_full_connection_is_silence: StoppedWorld,
    broken.older_copies_keep_writing: ForgettingWorld,
}


KNOWN: dict[Rule, int] = {
    broken.a_rail_is_given_up_while_its_peer_stands_still: 2951281457,  # 2 of 20,000 worlds
    broken.detached_without_a_copy: 180,
    broken.a_copy_begins_where_the_last_one_broke_off: 106,
    broken.a_full_connection_is_silence: 8,
    broken.older_copies_keep_writing: 13,
}


@pytest.mark.grid
@pytest.mark.system
@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_worlds_notice_a_broken_rule(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    world = FOCUSED.get(rule, LinkWorld)
    noticed_by(rule, monkeypatch, lambda seed: world(seed).run(), range(2000), Violation, KNOWN)


@pytest.mark.parametrize("world", list(FOCUSED.values()), ids=lambda world: world.__name__)
def test_without_a_broken_rule_a_focused_world_is_sound(world: type[LinkWorld], seed: int) -> None:
    for each in range(seed, seed + 50):
        world(each).run()
