"""The errors that HOT raises on purpose. Each names the place, the value and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class HotError(Exception):
    """Base of every error that HOT raises on purpose."""


class PolicyError(HotError):
    """One or more problems of a policy, all of them, one a line: ``file:line:column path: what is wrong``."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class ConversionError(HotError):
    """A model could not be converted as the policy says."""


class BackendError(HotError):
    """A backend cannot do what was asked of it, with the reason."""


class UnknownNameError(HotError, KeyError):
    """A name that nothing was registered under."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` for the nearest known name, or ``""`` where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {near[0]!r}?" if near else ""
