"""The random state of a micro-batch, on a machine with an accelerator."""

from __future__ import annotations

import pytest
import torch

from helixrt.engines import random_state


class Accelerator:
    """As torch's module of one: a state that is asked for makes a context of hundreds of megabytes in this process."""

    def __init__(self, initialized: bool) -> None:
        self.initialized, self.seeds = initialized, list[int]()

    def is_initialized(self) -> bool:
        return self.initialized

    def manual_seed_all(self, seed: int) -> None:
        self.seeds.append(seed)

    def get_rng_state(self) -> torch.Tensor:
        self.initialized = True
        return torch.tensor(self.seeds[-1:], dtype=torch.int64).view(torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.seeds.append(int(state.view(torch.int64)[0]))


@pytest.mark.parametrize("initialized", [False, True])
def test_a_process_that_trains_on_the_cpu_makes_no_context(initialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Accelerator(initialized)
    monkeypatch.setattr(random_state, "_accelerator", lambda: device)
    random_state.set_random_state(1, 0, 0, 7)
    before, seeded = random_state.random_states(), list(device.seeds)
    assert random_state.random_states() == before and len(seeded) == 1
    with random_state.chunks_apart() as begin:
        begin(0, 1)
        assert random_state.random_states() != before
    assert device.initialized is initialized
    if initialized:
        assert device.seeds[-1] == seeded[0], "as it was before"
