"""The mesh inside a replica, as `helixrt.run(mesh=)` takes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from helixrt.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """Ranks of one replica: pipeline stages, shards of parameters, of the sequence, and of tensors. All default to 1."""

    pp: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        """Of one replica."""
        return self.pp * self.dp_shard * self.cp * self.tp

    def __str__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in asdict(self).items() if size != 1)})"

    def check_supported(self) -> None:
        """Raises ConfigError (mesh.AXIS) for what a session can train no model on."""
        for axis, size in asdict(self).items():
            if size < 1:
                raise ConfigError(f"mesh.{axis}", size, "must be at least 1")

    def check_module(self) -> None:
        """Raises ConfigError (mesh.AXIS) for what a session cannot train a plain module on."""
        self.check_supported()
        if self.pp > 1:
            rule = "needs session.parallelize(helixrt.compile(model, ...), example=...), or helixrt.Stages"
            raise ConfigError("mesh.pp", self.pp, rule)
        if self.cp > 1:
            rule = "needs helixrt.Stages or, for transformers models, session.parallelize(helixrt.compile(...), example=...)"
            raise ConfigError("mesh.cp", self.cp, rule)
