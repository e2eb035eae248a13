"""Every wrong setting is one line with key, value and rule, before anything is launched."""

import dataclasses
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helixrt.errors import ConfigError, MissingExtra
from helixrt.job.config import CommandConfig, FaultConfig, JobConfig, KillConfig, MeshConfig, SlowConfig
from helixrt.schedule.generators.policies import POLICIES
from helixrt.train import validate as rules
from helixrt.train.config import ScheduleConfig, TrainConfig
from helixrt.train.schema import command, load_config
from helixrt.train.validate import resume_conflicts, validate
from helixrt.transport.verbs import endpoint as verbs
from tests import programs


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text").write_text("some text to train on. " * 2000)
    return f"data.path={tmp_path / 'text'}"


@pytest.fixture
def root(tmp_path: Path) -> str:
    return f"output.root={tmp_path / 'out'}"


def test_defaults_are_the_dataclasses_and_the_tiny_model() -> None:
    config = load_config([])
    assert dataclasses.replace(config, model=TrainConfig().model) == TrainConfig()
    assert isinstance(config.optim.betas, tuple)
    hash(config)  # frozen all through


@pytest.mark.grid
@pytest.mark.parametrize("experiment", ["tiny", "ci", "solo", "nano"])
@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny", "gpt-small", "moe-tiny"])
def test_experiments_are_valid_with_every_model(experiment: str, model: str, root: str) -> None:
    config = load_config([f"+experiment={experiment}", f"model={model}", root])
    validate(config)
    assert config.name == experiment
    if experiment in ("tiny", "ci"):
        assert config.chaos.kill == (KillConfig(1, 20, "forward"),)


def test_nano_is_one_layer_and_few_steps_in_local_processes(root: str) -> None:
    config = load_config(["+experiment=nano", root])
    validate(config)
    assert (config.model.layers, config.mesh.replicas, config.launcher) == (1, 2, "local") and config.steps <= 5


def test_overrides_win_over_the_experiment_and_lists_become_tuples() -> None:
    config = load_config(
        ["+experiment=tiny", "steps=7", "model.layers=6", "optim.betas=[0.5,0.6]",
         "chaos.kill=[{replica: 0, step: 3, moment: fetch}, {step: 4}]", "data.path='/a b/c=d'"]
    )  # fmt: skip
    assert (config.steps, config.model.layers, config.optim.betas) == (7, 6, (0.5, 0.6))
    assert config.chaos.kill == (KillConfig(0, 3, "fetch"), KillConfig(1, 4, "forward"))
    assert config.data.path == "/a b/c=d"


def test_a_rail_may_have_another_name_for_each_replica_and_chaos_runs_commands() -> None:
    config = load_config(
        ["transport.rails=[eth0, mlx5_0/1, rxe_a1|rxe_b1]", "chaos.run=[{step: 2, command: 'ip link set a1 down'}]"]
    )
    assert TrainConfig.from_plain(json.loads(json.dumps(config.to_plain()))) == config
    assert config.transport.rails_of(0) == config.transport.rails_of(2) == ("eth0", "mlx5_0/1", "rxe_a1")
    assert config.transport.rails_of(1) == ("eth0", "mlx5_0/1", "rxe_b1")
    assert config.chaos.run == (CommandConfig("ip link set a1 down", 0, 2, "forward"),)


def test_faults_are_settings_of_one_rank() -> None:
    faults = "{kind: hang_lock, rank: 1, step: 3, moment: exchange_early}, {kind: slow, seconds: 2}"
    config = load_config([f"chaos.fault=[{faults}]"])
    assert TrainConfig.from_plain(json.loads(json.dumps(config.to_plain()))) == config
    assert config.chaos.fault == (FaultConfig("hang_lock", 1, 1, 3, "exchange_early"), FaultConfig("slow", seconds=2.0))


def test_stages_are_slowed_down_in_steps() -> None:
    config = load_config(["mesh.pp=4", "chaos.slow=[{stage: 2, factor: 1.5, steps: [20, 60]}, {stage: 1, replica: 0}]"])
    assert TrainConfig.from_plain(json.loads(json.dumps(config.to_plain()))) == config
    assert config.chaos.slow == (SlowConfig(2, 1.5, (20, 60)), SlowConfig(1, replica=0))


def test_a_run_of_before_these_settings_can_be_resumed() -> None:
    plain = TrainConfig().to_plain()
    del plain["chaos"]["fault"], plain["chaos"]["slow"], plain["on_poison"], plain["start"]
    del plain["transport"], plain["chaos"]["run"], plain["checkpoint"]["after_failover"]
    del plain["checkpoint"]["retry_s"], plain["catchup"]["memory_gb"], plain["catchup"]["serve_cpu"]
    assert TrainConfig.from_plain(plain) == TrainConfig()
    assert JobConfig.from_plain(JobConfig().to_plain() | {"restart_window_s": 60.0}) == JobConfig()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("step=3", r"^step=3: unknown key 'step', did you mean steps\?"),
        ("+stepz=3", r"^stepz=3: unknown key 'stepz', did you mean steps\?"),
        ("model.layerz=3", r"^model\.layerz=3: unknown key .*model\.layers"),
        ("++model.layerz=3", r"^model\.layerz=3: unknown key .*model\.layers"),
        ("chaos.kill=[{stepp: 3}]", r"^chaos\.kill=\[\{stepp: 3\}\]: unknown key 'stepp'"),
        ("steps=many", r"^steps=many: .*could not be converted to Integer"),
        ("steps=1.5", r"^steps=1\.5: .*could not be converted to Integer"),
        ("resume=maybe", r"^resume=maybe: .*not a valid bool"),
        ("steps=null", r"^steps=null: .*not Optional"),
        ("optim.betas=[a,b]", r"^optim\.betas=\[a,b\]: .*could not be converted to Float"),
        ("chaos.kill=3", r"^chaos\.kill=3: "),
        ("+experiment=huge", r"^experiment=huge: no such file in conf/experiment/; there are: ci, nano, solo, tiny"),
        ("experiment=tiny", r"^experiment=tiny: is chosen with a plus sign: \+experiment=tiny"),
        ("model=bert", r"^model=bert: no such file .*gpt-tiny"),
        ("model=3", r"^model=3: "),
        ("data=book", r"^data=book: "),
        ("steps", r"^argument=steps: settings are given as key=value"),
        ("~steps", r"^\S*steps\S*=.*"),
        ("steps=1,2", r"^steps=1,2: Ambiguous value"),
        ("model.layers=[1,2", r"^model\.layers=\[1,2: "),
        ("name=${nope}", r"^name=\$\{nope\}: Interpolation key 'nope' not found"),
        ("data.path=???", r"^data\.path=\?\?\?: Missing mandatory value"),
        ("--fast", r"^argument=--fast: unknown option"),
        ("-m", r"^argument=-m: unknown option"),
    ],
)
def test_arguments_that_cannot_be_settings(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(["seed=1", argument, "threads=1"])
    assert "\n" not in str(caught.value)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("mesh.replicas=0", r"^mesh\.replicas=0: must be at least 1"),
        ("steps=-5", r"^steps=-5: must be at least 1"),
        ("checkpoint.every=-1", r"^checkpoint\.every=-1: must not be negative"),
        ("checkpoint.retry_s=-1", r"^checkpoint\.retry_s=-1.0: must not be negative"),
        ("checkpoint.write_s=0", r"^checkpoint\.write_s=0.0: must be above 0"),
        ("catchup.memory_gb=0", r"^catchup\.memory_gb=0.0: must be above 0"),
        ("catchup.serve_cpu=-0.1", r"^catchup\.serve_cpu=-0.1: must not be negative"),
        ("catchup.serve_mb_s=0.5", r"^catchup\.serve_mb_s=0.5: must be at least 1, or 0 for no limit"),
        ("checkpoint.keep=0", r"^checkpoint\.keep=0: "),
        ("optim.lr=0", r"^optim\.lr=0\.0: must be above 0"),
        ("optim.lr=nan", r"^optim\.lr=nan: must be above 0"),
        ("optim.betas=[0.9]", r"^optim\.betas=\[0\.9\]: must be two numbers"),
        ("optim.min_lr_ratio=2", r"^optim\.min_lr_ratio=2\.0: "),
        ("data.validation=1", r"^data\.validation=1\.0: must be between 0 and 1"),
        ("model.vocab=128", r"^model\.vocab=128: must be at least 256"),
        ("port=70000", r"^port=70000: "),
        ("model.experts=1", r"^model\.experts=1: must be at least 2, or 0 for none"),
        ("model.capacity=-1", r"^model\.capacity=-1\.0: must not be negative"),
        ("model.context=ulysses", r"^model\.context=ulysses: must be one of gathered, ring"),
        ("model.family=bert", r"^model\.family=bert: must be one of gpt, llama"),
        ("schedule.name=zigzag", r"^schedule\.name=zigzag: must be one of gpipe, 1f1b, .*adaptra, helix"),
        ("schedule.profile=guess", r"^schedule\.profile=guess: must be one of auto, measure, estimate"),
        ("schedule.graphs=sometimes", r"^schedule\.graphs=sometimes: must be one of auto, always, never"),
        ("mesh.tp=0", r"^mesh\.tp=0: must be at least 1"),
        ("mesh.tp=3", r"^model\.heads=4: must be a multiple of the 3 ranks of tensor parallelism"),
        ("mesh.cp=3", r"^data\.seq_len=128: must be a multiple of 6"),
        ("model.heads=3", r"^model\.heads=3: must divide model\.dim=128"),
        ("schedule.microbatches=5", r"^schedule\.microbatches=5: must divide data\.batch=16"),
        ("schedule.microbatches=1", r"^schedule\.microbatches=1: 1f1b needs one per stage: mesh\.pp=2"),
        ("mesh.pp=5", r"^mesh\.pp=5: more stages than layers: model\.layers=4"),
        ("data.path=/no/such/folder", r"^data\.path=/no/such/folder: no such file or folder"),
        ("data.path=/dev/null", r"^data\.path=/dev/null: "),
        ("data.batch=400000", r"^data\.path=.*one batch for every stream needs"),
        ("chaos.kill=[{replica: -1}]", r"^chaos\.kill\[0\]\.replica=-1: must be -1 for the moment driver"),
        ("chaos.kill=[{moment: lunch}]", r"^chaos\.kill\[0\]\.moment=lunch: must be one of before_quorum"),
        ("chaos.run=[{step: 3}]", r"^chaos\.run\[0\]\.command='': must be a program"),
        ("chaos.run=[{command: 'sh \"'}]", r"^chaos\.run\[0\]\.command=sh \": no closing quotation"),
        ("chaos.run=[{command: ls, moment: driver}]", r"^chaos\.run\[0\]\.moment=driver: must be one of before_quorum"),
        ("chaos.run=[{command: ls, replica: -1}]", r"^chaos\.run\[0\]\.replica=-1: must be below mesh\.replicas=2"),
        ("chaos.run=[{command: ls, step: 0}]", r"^chaos\.run\[0\]\.step=0: must be from 1 to steps=200"),
        ("chaos.fault=[{kind: sulk}]", r"^chaos\.fault\[0\]\.kind=sulk: must be one of stop, hang, hang_lock, slow, exception"),
        ("chaos.fault=[{moment: driver}]", r"^chaos\.fault\[0\]\.moment=driver: must be one of before_quorum"),
        ("chaos.fault=[{kind: hang, moment: checkpoint}]", r"^chaos\.fault\[0\]\.moment=checkpoint: .*, fetch for hang$"),
        ("chaos.fault=[{replica: 2}]", r"^chaos\.fault\[0\]\.replica=2: must be below mesh\.replicas=2"),
        ("chaos.fault=[{rank: 2}]", r"^chaos\.fault\[0\]\.rank=2: must be below mesh\.pp=2"),
        ("chaos.fault=[{rank: 1, moment: after_record}]", r"^chaos\.fault\[0\]\.rank=1: must be 0 for after_record"),
        ("chaos.fault=[{step: 0}]", r"^chaos\.fault\[0\]\.step=0: must be from 1 to steps=200"),
        ("chaos.fault=[{kind: slow, seconds: 0}]", r"^chaos\.fault\[0\]\.seconds=0\.0: must be above 0"),
        ("transport.kind=pigeon", r"^transport\.kind=pigeon: must be one of auto, tcp, shared_memory, verbs"),
        ("transport.paths=0", r"^transport\.paths=0: must be at least 1"),
        ("transport.paths=4", r"^transport\.paths=4: needs transport\.hopping, one of hopper, flowbender, ecmp"),
        ("transport.hopping=random", r"^transport\.hopping=random: must be one of none, hopper, flowbender, ecmp"),
        ("transport.hopping=hopper", r"^transport\.rate_mbit=0\.0: must be the rated speed of a path"),
        ("transport.heartbeat_s=-1", r"^transport\.heartbeat_s=-1\.0: must not be negative"),
        ("heartbeat_s=20", r"^heartbeat_s=20\.0: must be 0\.2 to a quarter of step_timeout_s=60, or 0"),
        ("transport.rails=[nic9]", r"^transport\.rails=nic9: must be an IP address or an interface with one"),
        ("transport.rails=[lo,lo]", r"^transport\.rails=lo: is named twice"),
        ("chaos.kill=[{step: 999}]", r"^chaos\.kill\[0\]\.step=999: must be from 1 to steps=200"),
        ("step_timeout_s=1", r"^step_timeout_s=1\.0: must be at least 5 seconds"),
        ("resume=true", r"^resume=true: no complete checkpoint in any run named run under"),
    ],
)
def test_values_that_cannot_work(argument: str, message: str, root: str, text: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        validate(load_config([text, root, argument]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["zb-h1", "dualpipev"])
def test_shards_are_refused_with_a_schedule_that_needs_graphs(name: str, root: str, text: str) -> None:
    overrides = [text, root, "mesh.dp_shard=2", f"schedule.name={name}"]
    with pytest.raises(ConfigError, match=r"^mesh\.dp_shard=2: cannot be with schedule .* run by captured graphs"):
        validate(load_config(overrides))
    validate(load_config([*overrides, "schedule.graphs=never"]))
    validate(load_config([*overrides[:-1], "schedule.name=interleaved"]))


def test_transport_rules(root: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hopping = ["transport.hopping=hopper", "transport.rate_mbit=1000", "transport.paths=4"]
    validate(load_config([text, root, *hopping, "transport.rails=[lo]", "transport.kind=tcp"]))
    with pytest.raises(ConfigError, match=r"^transport\.hopping=hopper: is not among the settings of native yet; use tcp"):
        validate(load_config([text, root, *hopping, "transport.kind=native"]))
    with pytest.raises(ConfigError, match=r"^exchange=gloo: knows no settings of transport"):
        validate(load_config([text, root, *hopping, "exchange=gloo"]))
    monkeypatch.setattr(verbs, "unsupported", lambda: "no port here")
    with pytest.raises(ConfigError, match=r"^transport\.kind=verbs: no port here"):
        validate(load_config([text, root, "transport.kind=verbs"]))
    monkeypatch.setattr(verbs, "unsupported", lambda: None)
    with pytest.raises(ConfigError, match=r"^transport\.rails=lo: is no RDMA port, and verbs needs one"):
        validate(load_config([text, root, "transport.kind=verbs", "transport.rails=[lo]"]))


def test_schedule_rules(root: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^mesh\.pp=4: zbv cuts the model into 8 chunks, more than model\.layers=4"):
        validate(load_config([text, root, "mesh.pp=4", "schedule.name=zbv"]))
    with pytest.raises(ConfigError, match=r"^schedule\.microbatches=4096: must be between 1 and 2048"):
        validate(load_config([text, root, "data.batch=4096", "schedule.microbatches=4096"]))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_chosen(name: str, root: str, text: str) -> None:
    config = load_config([text, root, f"schedule.name={name}", "schedule.microbatches=4"])
    validate(config)
    assert config.schedule.name == name


def test_llama_rules(root: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.kv_heads=3: must divide model\.heads=4"):
        validate(load_config([text, root, "model=llama-tiny", "model.kv_heads=3"]))
    with pytest.raises(ConfigError, match=r"^model\.heads=128: must leave an even size"):
        validate(load_config([text, root, "model=llama-tiny", "model.heads=128"]))


def test_the_driver_may_be_killed(root: str, text: str) -> None:
    config = load_config([text, root, "chaos.kill=[{replica: -1, step: 3, moment: driver}]"])
    validate(config)
    assert [(kill.replica, kill.step, kill.moment) for kill in config.chaos.kill] == [(-1, 3, "driver")]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


def test_port_in_use(taken_port: int, root: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^port={taken_port}: is in use"):
        validate(load_config([text, root, f"port={taken_port}"]))


@pytest.mark.parametrize("host", ["nonsense.invalid", "203.0.113.7"])
def test_host_that_is_not_this_machine(host: str, root: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^host={host}: is no address of this machine"):
        validate(load_config([f"host={host}", root, text]))


def test_output_root_that_cannot_be_a_folder(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^output\.root=.*cannot write there"):
        validate(load_config([text, f"output.root={tmp_path / 'file' / 'runs'}"]))


@pytest.mark.parametrize(
    ("package", "extra", "argument"),
    [("torchft", "ft", "membership=torchft"), ("torchdata", "ft", "mesh.replicas=1"), ("ray", "ray", "launcher=ray")],
)
def test_missing_extra_says_what_to_install(
    package: str, extra: str, argument: str, root: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = rules.importlib.util.find_spec
    monkeypatch.setattr(rules.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(MissingExtra, match=rf"{package}.*pip install 'helixrt\[{extra}\]'"):
        validate(load_config([text, root, argument]))


def test_ranks_of_a_replica_may_share_stages(root: str, text: str) -> None:
    small = [text, root, "schedule.microbatches=4", "model=llama-tiny"]
    all_axes, whole = ["mesh.pp=2", "mesh.tp=2", "mesh.cp=2"], ["mesh.tp=2", "parallel.sequence=false"]
    for mesh in (["mesh.tp=2"], ["mesh.cp=2"], all_axes, whole):
        validate(load_config([*small, *mesh]))
    with pytest.raises(ConfigError, match=r"^data\.seq_len=126: must leave a multiple of 4 positions"):
        validate(load_config([*small, "mesh.tp=4", "model.kv_heads=4", "model.heads=4", "data.seq_len=126"]))


def test_what_must_stay_when_a_run_is_resumed() -> None:
    before = TrainConfig()
    assert not list(resume_conflicts(before, dataclasses.replace(before, steps=9, resume=True)))
    changed = dataclasses.replace(before, seed=3, data=dataclasses.replace(before.data, batch=8))
    assert [e.key for e in resume_conflicts(before, changed)] == ["seed", "data.batch"]
    reshaped = dataclasses.replace(before, mesh=MeshConfig(replicas=7, pp=4, dp_shard=2, cp=2, tp=2))
    assert not list(resume_conflicts(before, dataclasses.replace(reshaped, schedule=ScheduleConfig("zbv", 4))))


@pytest.mark.system
@pytest.mark.parametrize("argument", ["stepz=1", "mesh.replicas=0", "data.path=/no/such"])
def test_a_wrong_setting_is_one_line_on_stderr_and_exit_code_2(argument: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "helixrt.train", argument]
    done = programs.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(argument + ": ")
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def test_hydra_answers_help_and_cfg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(["--cfg", "job", "+experiment=tiny", "steps=9"], lambda _: 1) == 0
    assert "steps: 9" in capsys.readouterr().out
    assert command(["--help"], lambda _: 1) == 0
    assert "gpt-tiny" in capsys.readouterr().out
    assert command(["--cfg", "job", "stepz=9"], lambda _: 1) == 2
    assert capsys.readouterr().err.startswith("stepz=9: unknown key")
    assert list(tmp_path.iterdir()) == []
