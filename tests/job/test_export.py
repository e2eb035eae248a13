"""A checkpoint's model in Hugging Face's form: `from_pretrained` gives the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helixrt.cli import main
from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.errors import ConfigError
from helixrt.job.checkpoint_layout import RankPart
from helixrt.job.export import export
from helixrt.job.stored_path import StoredPath
from tests.job.object_store import PROTOCOL
from tests.job.test_checkpoint_layout import write

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file


def model_of(family: str) -> Any:
    torch.manual_seed(5)
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    if family == "gpt2":  # a tied head
        config = transformers.GPT2Config(vocab_size=64, n_layer=2, n_head=2, n_embd=16, n_positions=32)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(**sizes, intermediate_size=24, num_key_value_heads=2, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(params=["gpt2", "llama"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A model, and the folder of a run that has a checkpoint of it."""
    model = model_of(request.param)
    with torch.no_grad():
        for parameter in model.parameters():  # not as it was initialised
            parameter.add_(0.01 * torch.randn_like(parameter))
    engine = ModuleEngine(Registered.of(model, [torch.optim.AdamW(model.parameters())]))
    run = tmp_path / "run"
    write(run / "checkpoints", {"pp": 1}, [RankPart.of(engine.state(), engine.portions())])
    (run / "run.json").write_text("{}")
    engine.close()
    return model.eval(), run


def test_logits_are_the_same_from_one_file_and_from_several(saved: tuple[Any, Path], tmp_path: Path, capsys: Any) -> None:
    model, run = saved
    model.config.save_pretrained(tmp_path / "config")
    assert main(["export", str(run), "--to", str(tmp_path / "one"), "--config", str(tmp_path / "config")]) == 0
    assert "step 2: " in capsys.readouterr().out
    done = export(run, tmp_path / "several", config=tmp_path / "config" / "config.json", file_bytes=4000)
    assert len(done.files) > 2 and all(file.is_file() for file in done.files)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = model(tokens).logits
        for folder in ("one", "several"):
            loaded, info = type(model).from_pretrained(tmp_path / folder, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"]
            assert (loaded.eval()(tokens).logits - expected).abs().max() < 1e-5


def test_a_checkpoint_in_a_storage_is_exported_by_its_run_and_by_itself(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, run = saved
    (run / "checkpoints").rename(tmp_path / "bucket")
    (run / "run.json").write_text(json.dumps({"checkpoints": f"{PROTOCOL}://{tmp_path}/bucket"}))
    (checkpoint,) = StoredPath(f"{PROTOCOL}://{tmp_path}/bucket").iterdir()
    for source, to in ((str(run), "one"), (str(checkpoint), "two")):
        assert main(["export", source, "--to", str(tmp_path / to)]) == 0
        found = load_file(tmp_path / to / "model.safetensors")
        assert all(torch.equal(found[name], p) for name, p in model.named_parameters())
    with pytest.raises(ConfigError, match="is not the folder of a complete checkpoint: it has no complete.json"):
        export(StoredPath(f"{PROTOCOL}://{tmp_path}/bucket"), tmp_path / "three")


def test_names_of_wrappers_are_left_out(tmp_path: Path) -> None:
    """Below them `from_pretrained` finds no parameter, warns, and gives a model with random weights."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model[1] = checkpoint_wrapper(model[1])
    wrapped: Any = torch.compile(model, backend="eager")
    engine = ModuleEngine(Registered.of(wrapped, [torch.optim.SGD(wrapped.parameters(), lr=0.1)]))
    write(tmp_path / "run" / "checkpoints", {"pp": 1}, [RankPart.of(engine.state(), engine.portions())])
    (tmp_path / "run" / "run.json").write_text("{}")
    engine.close()
    for file_bytes in (10, 10_000):
        done = export(tmp_path / "run", tmp_path / str(file_bytes), file_bytes=file_bytes)
        found = {name: value for file in done.files for name, value in load_file(file).items()}
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    index = json.loads((tmp_path / "10" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()


def test_the_folder_that_a_shell_is_in_is_filled_and_one_that_cannot_be_made_is_refused(
    saved: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = saved
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["export", str(run), "--to", "."]) == 0
    assert str(tmp_path / "here") in capsys.readouterr().out and Path("model.safetensors").is_file(), "still the current folder"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert main(["export", str(run), "--to", "/proc/x"]) == 2
    assert capsys.readouterr().err == "helixrt: to=/proc/x: cannot be made: No such file or directory\n"


def test_weights_that_a_schedule_free_optimizer_trains_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "train_mode": True}], lr=0.1)
    engine = ModuleEngine(Registered.of(model, [optimizer]))
    write(tmp_path / "run" / "checkpoints", {"pp": 1}, [RankPart.of(engine.state(), engine.portions())])
    (tmp_path / "run" / "run.json").write_text("{}")
    engine.close()
    with pytest.raises(ConfigError, match=r"not the averaged ones: call optimizer\.eval\(\) behind the loop"):
        export(tmp_path / "run", tmp_path / "new")


def test_what_cannot_be_exported_is_refused_and_nothing_is_left(saved: tuple[Any, Path], tmp_path: Path) -> None:
    _, run = saved
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    for to, others, why in (
        ("full", {}, "must be a new or an empty folder"),
        ("new", {"dtype": "int8"}, "must be one of float64, float32, bfloat16, float16"),
        ("new", {"step": 7}, "has no complete checkpoint of step 7"),
        ("new", {"config": tmp_path}, "must be a model's config.json"),
    ):
        with pytest.raises(ConfigError, match=why):
            export(run, tmp_path / to, **others)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is neither the folder of a run nor of a checkpoint"):
        export(tmp_path / "full", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "run"]
    (checkpoint,) = (run / "checkpoints").iterdir()
    done = export(checkpoint, tmp_path / "new", dtype="bfloat16")
    header = done.files[0].read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    assert {entry["dtype"] for name, entry in names.items() if name != "__metadata__"} == {"BF16"}
