"""What can go wrong with a request: one exception for all of it, never a reason for a run to end."""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "refused", "robots", "busy", "timeout", "connection", "garbage", "size", "type", "redirects", "status"
]


class Fault(Exception):
    """A page that was not got, and why."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
