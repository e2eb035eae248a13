"""Context of the logger of docs/guides/metrics.md: a stand-in for the package `wandb`, and a run that logs."""

import sys
from pathlib import Path
from types import SimpleNamespace

logged = []
sys.modules["wandb"] = SimpleNamespace(
    init=lambda **settings: SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("end")
    )
)

# BLOCK

logger = WeightsAndBiases()  # noqa: F821, made in the block
logger.begin(Path("."), "run", {"seed": 1})
for replica in (0, None):
    logger.log(helixrt.MetricsPoint(helixrt.MetricsPoint.STEP, 3, replica, {"loss": 2.0}))  # noqa: F821
logger.close()
assert logged == [(3, {"loss": 2.0}), "end"], logged
