"""Pairs of a link's ends of which the second one waits for messages."""

from __future__ import annotations

from dataclasses import replace

from helixrt.emulate.link_pair import OPTIONS, Pair


def posted(rails: int = 1, messages: int = 1, **options: object) -> Pair:
    """A pair whose end 1 has posted that many long messages of operation 1, and whose end 0 has heard of them."""
    pair = Pair(rails=rails, options=replace(OPTIONS, **options))  # type: ignore[arg-type]
    for index in range(messages):
        pair.post(1, 1, index)
    pair.flow()
    return pair
