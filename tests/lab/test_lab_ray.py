"""`helixrt lab ray` and `RayNodes` say what is wrong before anything is started."""

from __future__ import annotations

import pytest

from helixrt import cli
from helixrt.errors import ConfigError
from helixrt.lab.net import Network
from helixrt.lab.ray_nodes import RayNodes

pytest.importorskip("ray", reason="the extra ray is not installed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", "0"], "helixrt: nodes=0: is between 1 and 16"),
        (["--nodes", "17", "--", "true"], "helixrt: nodes=17: is between 1 and 16"),
        (["--rate", "fast"], "helixrt: rate=fast: "),
        (["--cpus", "-1"], "helixrt: cpus=-1: must not be negative"),
    ],
)
def test_wrong_settings_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lab", "ray", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_nodes_are_hosts_of_the_network() -> None:
    with pytest.raises(ConfigError, match="nodes=3: is between 1 and the hosts of the network, 2"):
        RayNodes(Network(2), 3)
