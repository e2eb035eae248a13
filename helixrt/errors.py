"""The kinds of failure in helixrt.

A failure is `Retryable` (the survivors can repeat the step) or `Fatal` (this
process or this run must stop), and always names the first root cause, never a consequence of it.
A wrong setting is a `ConfigError`: one line, the value, the rule and the key, exit code 2.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """Where a failure began: which rank saw it, what it was, and where that rank's log is.

    `peers` are the peers that were silent to the rank that raises this, if that is the cause: their ranks in the
    group, or their replicas in the error of a replica's exchange. `own_device`: the rank's own network device failed, and
    no other way was left; neither is sent to peers.
    """

    what: str
    rank: str = ""
    log: str = ""
    peers: tuple[int, ...] = ()
    own_device: bool = False

    def __str__(self) -> str:
        where = f" at {self.rank}" if self.rank else ""
        log = f" (log: {self.log})" if self.log else ""
        return f"{self.what}{where}{log}"


class HelixError(Exception):
    """Base class of helixrt's errors."""

    comes_again = False
    """See the function of this name."""


class Departed(SystemExit):
    """This replica leaves the run at a step boundary, as it was asked to; no failure. Not an Exception, so that the user's
    code does not catch it."""


class ConfigError(HelixError):
    """A setting that cannot work, found before anything is launched.

    The message is one line: `KEY=VALUE: RULE`. Commands print it and exit with code 2.
    """

    comes_again = True

    def __init__(self, key: str, value: object, rule: str) -> None:
        super().__init__(f"{key}={value}: {rule}")
        self.key, self.value, self.rule = key, value, rule

    def __reduce__(self) -> tuple[object, ...]:
        return (ConfigError, (self.key, self.value, self.rule))


class Retryable(HelixError):
    """Something failed that the survivors can repair: a peer died, a link broke, a fetch stopped."""

    def __init__(self, cause: Cause | str) -> None:
        self.cause = cause if isinstance(cause, Cause) else Cause(cause)
        super().__init__(str(self.cause))


class Fatal(HelixError):
    """This process cannot go on: its own device, memory or program is wrong."""

    def __init__(self, cause: Cause | str) -> None:
        self.cause = cause if isinstance(cause, Cause) else Cause(cause)
        super().__init__(str(self.cause))


class StartAgain(Fatal):
    """This process must start again from durable state, because the step protocol asked for it or another rank of its
    replica ended. No failure of its own: it costs no restart of the budget."""


class Diverged(Fatal):
    """Replicas hold different states, which must be equal bit for bit. The message names what differs first, and the odd
    replica, if there is a majority."""


class MisuseError(Fatal):
    """The training program breaks a rule of the public API. The message names the action, with the parameter,
    buffer or object where there is one, and what to do instead."""

    comes_again = True


class MissingExtra(ConfigError):
    """An optional package is needed and not installed; the message names its extra."""

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(
            "extra",
            extra,
            f"{needed_for} needs the package {package!r}; install it with: pip install 'helixrt[{extra}]'",
        )
        self.package, self.extra, self.needed_for = package, extra, needed_for

    def __reduce__(self) -> tuple[object, ...]:
        return (MissingExtra, (self.package, self.extra, self.needed_for))


def comes_again(error: BaseException) -> bool:
    """Whether another start of the same program on the same host would end in the same way: it is not made. Known of some
    errors of helixrt, and of what cannot be imported."""
    return error.comes_again if isinstance(error, HelixError) else isinstance(error, ImportError | SyntaxError)


def causes_of(error: BaseException) -> list[BaseException]:
    """The error, what it was raised from or while it was handled, and so on."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return chain


def root_of(error: BaseException) -> BaseException:
    """The root cause of an error: the first error of helixrt among its causes, else the first of all. An error of
    helixrt has in its text what matters of the errors behind it."""
    chain, root = causes_of(error), None
    for each in chain:
        if isinstance(each, HelixError | Departed):
            root = each
            if each.__cause__ is not None or isinstance(each, Departed):
                break
    return root or chain[-1]


def interrupted() -> int:
    """The exit code of a program that has handled Ctrl-C, as shells have it.

    An interrupt that strikes in code that is compiled from a text, as the methods of a dataclass are, stays noted in the
    interpreter: under `python -m` it then ends by the signal, whatever the program returns. Other such code takes this back.
    """
    exec("")
    return 130
