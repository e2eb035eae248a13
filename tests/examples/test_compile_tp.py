"""examples/compile_tp.py: two tensor-parallel ranks, woven, with the gradients of a plain loop."""

from __future__ import annotations

import pytest

from tests.examples.runs import ROOT, run

pytestmark = pytest.mark.system


@pytest.mark.smoke
def test_two_ranks_weave_and_have_the_gradients_of_a_plain_loop() -> None:
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, ROOT / "examples" / "compile_tp.py", 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("woven; loss ") and "gradients of step 1 equal to a plain loop's: True" in done.stdout
