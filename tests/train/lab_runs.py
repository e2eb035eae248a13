"""`python lab_runs.py FOLDER` in the lab's VM: the main job twice over verbs, undisturbed and with its default NIC taken down.

Both runs are the command `python -m helixrt.train`, called in one process: importing torch takes long there. What they
leave is in FOLDER/calm and FOLDER/cut.
"""

import sys

from helixrt.train.__main__ import main

CUT_IN, MENDED_IN, STEPS = 2, 3, 5
COMMANDS = (
    f"{{command: 'ip link set a1 down', step: {CUT_IN}, moment: exchange_early}}",  # one bucket is exchanged, others are not
    f"{{command: 'python -m helixrt.lab.nics heal 1', step: {MENDED_IN}, moment: exchange_late}}",
    f"{{command: 'sleep 10', step: {STEPS}}}",  # time to come back
)
SETTINGS = (
    "+experiment=nano", f"steps={STEPS}", "transport.kind=verbs", "transport.rails=[rxe_a1|rxe_b1,rxe_a2|rxe_b2]",
    "checkpoint.every=100",
)  # fmt: skip


def run(folder: str) -> int:
    common = (*SETTINGS, f"data.path={folder}/text")
    for name, more in (("calm", ""), ("cut", f"chaos.run=[{', '.join(COMMANDS)}]")):
        print(f"--- {name}", flush=True)
        code = main([*common, f"output.root={folder}/{name}", *filter(None, [more])])
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))
