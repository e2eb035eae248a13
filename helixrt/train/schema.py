"""From a command line to a `TrainConfig`, with hydra.

In: arguments (`+experiment=tiny key=value …`). Out: the frozen configuration, or `ConfigError`: every
wrong argument is one line with its key, its value and the rule.

Hydra only composes here: its job runner, logging and output folders are not used, so its options `--multirun` and
`--config-dir` are refused. `--help`, `--cfg` and `--info` are answered by hydra itself.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from helixrt.errors import ConfigError, MissingExtra
from helixrt.train.config import TrainConfig

CONFIG_MODULE = "helixrt.conf"
PRIMARY = "train"
_QUESTIONS = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version")


def register() -> None:
    """Put the structured configuration into hydra's ConfigStore, as `schema`; idempotent. Raises MissingExtra."""
    try:
        from hydra.core.config_store import ConfigStore
        from omegaconf import DictConfig, OmegaConf
    except ImportError as error:
        raise MissingExtra("hydra-core", "train", "the built-in job") from error

    def unlock(node: DictConfig) -> None:
        # Frozen dataclasses make read-only nodes, which hydra could not override.
        OmegaConf.set_readonly(node, None)
        for key in node:
            child = node._get_node(key)
            if isinstance(child, DictConfig):
                unlock(child)

    schema = OmegaConf.structured(TrainConfig)
    unlock(schema)
    ConfigStore.instance().store("schema", node=schema)


def load_config(argv: Sequence[str]) -> TrainConfig:
    """The configuration that hydra overrides make of the defaults. Raises ConfigError."""
    for argument in argv:
        if argument.startswith("-"):
            raise ConfigError("argument", argument, "unknown option; settings are given as key=value, see --help")
    register()
    try:
        plain = _compose(argv)
    except Exception as error:  # hydra and omegaconf share no base class, and some are plain ValueErrors
        raise _explain(argv, error) from error
    _check_keys(argv, plain)
    return TrainConfig.from_plain(plain)


def command(argv: Sequence[str], run: Callable[[TrainConfig], int]) -> int:
    """A program's whole life: load, `run(config)`, exit code. A ConfigError is one line on stderr and code 2."""
    try:
        if any(a.split("=")[0] in _QUESTIONS for a in argv):
            return _answer(argv)
        return run(load_config(argv))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        composed = compose(PRIMARY, list(overrides))
    plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _answer(argv: Sequence[str]) -> int:
    """Let hydra print its help or the composed settings; the overrides are checked by us first."""
    import hydra

    load_config([a for a in argv if "=" in a and not a.startswith("-")])
    arguments, sys.argv = sys.argv, [sys.argv[0], *argv]
    try:
        hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name=PRIMARY)(lambda _: None)()
    except SystemExit as done:
        return int(done.code or 0)
    finally:
        sys.argv = arguments
    return 0


def _explain(argv: Sequence[str], error: Exception) -> ConfigError:
    """The ConfigError for hydra's error: the culprit is the last of the shortest run of arguments that fails."""
    culprit, cause = "", error
    for end in range(len(argv) + 1):
        try:
            _compose(argv[:end])
        except Exception as first:
            culprit, cause = argv[end - 1] if end else f"{CONFIG_MODULE}=", first
            break
    key, _, value = culprit.lstrip("+~").partition("=")
    name = key.split("@")[0]
    detail = _first_line(cause.__cause__ or cause)
    if "is not in struct" in detail or " not in '" in detail:
        wrong = detail.split("'")[1] if "'" in detail else key
        return ConfigError(key, value, f"unknown key {wrong!r}{_suggest(wrong)}; --cfg job prints all")
    if "Could not find" in str(cause):
        options = [line.strip() for line in str(cause).splitlines() if line.startswith("\t") and "provider" not in line]
        choice = ", ".join(options) or "none"
        return ConfigError(name, value, f"no such file in conf/{name}/; there are: {choice}")
    if "No match in the defaults list" in str(cause):
        return ConfigError(name, value, f"is chosen with a plus sign: +{name}={value}")
    if "=" not in culprit:
        return ConfigError("argument", culprit, "settings are given as key=value, see --help")
    return ConfigError(key, value, detail)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].strip() if str(error).strip() else type(error).__name__


def _check_keys(argv: Sequence[str], plain: dict[str, Any]) -> None:
    """`+key=value` appends to hydra's settings even what the schema does not have, and `~key` takes away."""

    def walk(have: dict[str, Any], want: dict[str, Any], prefix: str) -> None:
        for key in [*have, *want]:
            path = f"{prefix}{key}"
            if key not in want:
                raise ConfigError(path, _given(argv, path), f"unknown key {key!r}{_suggest(key)}; --cfg job prints all")
            if key not in have:
                raise ConfigError(path, "", "this setting cannot be taken away")
            if isinstance(want[key], dict):
                walk(have[key], want[key], f"{path}.")

    walk(plain, TrainConfig().to_plain(), "")


def _given(argv: Sequence[str], path: str) -> str:
    for argument in argv:
        key, _, value = argument.lstrip("+").partition("=")
        if key == path:
            return value
    return ""


def _suggest(wrong: str) -> str:
    """`, did you mean …?` from all keys of the schema, or nothing."""
    known: list[str] = []

    def walk(node: dict[str, Any], prefix: str) -> None:
        for key, value in node.items():
            known.append(prefix + key)
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")

    walk(TrainConfig().to_plain(), "")
    close = difflib.get_close_matches(wrong.split(".")[-1], [k.split(".")[-1] for k in known], n=1)
    full = [k for k in known if close and k.split(".")[-1] == close[0]]
    return f", did you mean {full[0]}?" if full else ""
