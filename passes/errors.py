"""What goes wrong in graph passes: a model that cannot be captured, a graph that breaks a rule, ranks that disagree."""

from __future__ import annotations

from helixrt.errors import HelixError, MisuseError


class CaptureError(MisuseError):
    """A module cannot be captured as one graph; a new start would not change it.

    `where` is the user's FILE:LINE, `reason` what stands in the way, `remedy` what to change.
    """

    comes_again = True

    def __init__(self, where: str, reason: str, remedy: str) -> None:
        super().__init__(f"{where}: cannot be captured: {reason}; change: {remedy}")
        self.where, self.reason, self.remedy = where, reason, remedy

    def __reduce__(self) -> tuple[object, ...]:
        return (CaptureError, (self.where, self.reason, self.remedy))


class VerifyError(HelixError):
    """A graph breaks a rule every pass must keep; names the nodes."""

    comes_again = True


class DisagreementError(HelixError):
    """Ranks of a group would launch different collectives, or one did not answer in time."""
