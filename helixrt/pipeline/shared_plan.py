"""One rank plans for its group: the order of two strands is searched once, and the others get it.

In: the ranks that share a plan, and a search. Out: the same order on every rank. Each of them would find the same one from
the same times, but a search takes as long as it takes, and an order must not depend on a rank's own rounding. While the
first rank searches the others wait, as long as the group's own timeout; if its search fails, they learn why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from helixrt.passes.agree import DEADLINE_S
from helixrt.passes.errors import DisagreementError
from helixrt.passes.operators import Operator, Overlap
from helixrt.passes.pair import Pairing, baseline, retimed
from helixrt.passes.ranks import Ranks


def planned_by_first(
    group: Any,
    search: Callable[[], Pairing],
    strands: tuple[Sequence[Operator], Sequence[Operator]],
    overlap: Overlap,
) -> Pairing:
    """What `search` finds on the first rank of `group`, on every rank; all of them call this. None: this process alone.

    Raises DisagreementError on the others when the first rank's search fails, or does not end within the group's timeout.
    """
    ranks = Ranks(group, DEADLINE_S)
    if ranks.count == 1:
        return search()
    if ranks.first:
        try:
            pairing = search()
        except Exception as error:
            ranks.arrive()
            ranks.first_says({"error": f"{type(error).__name__}: {error}"})
            raise
        ranks.arrive()
        ranks.first_says({"policy": pairing.policy, "order": pairing.order})
        return pairing
    ranks.arrive()
    said = ranks.first_says(None)
    if "error" in said:
        raise DisagreementError(f"the first rank of the group could not plan: {said['error']}")
    order = [(int(which), int(index)) for which, index in said["order"]]
    sequential = baseline("sequential", *strands, overlap)
    return replace(retimed(sequential, *strands, order, overlap), policy=str(said["policy"]))
