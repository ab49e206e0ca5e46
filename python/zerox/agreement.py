"""One protocol for everything that can fail on one rank: all ranks exchange the outcome before any of them raises."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from zerox import _C


def agree(
    comm: _C.Comm,
    what: str,
    action: Callable[[], Any],
    *,
    failure: type[Exception],
    label: str = "",
    share: bool = True,
) -> tuple[Any, list[Any]]:
    """Runs action on every rank; -> (this rank's result, the results of all ranks in rank order).

    If it failed anywhere, every rank raises: its own error where it has one, else `failure` naming the first rank that
    failed, so nobody is left waiting. share: results travel to the others, as JSON; otherwise the list holds None.
    label: short name of the exchange (at most 47 bytes); `what` unless given. Collective.
    """
    result, error = None, None
    try:
        result = action()
        told = json.dumps([result if share else None, ""])
    except Exception as caught:
        error = caught
        told = json.dumps([None, f"{type(error).__name__}: {error}"])
    replies = [json.loads(reply) for reply in comm.all_gather_bytes(label or what, told.encode())]
    if error is not None:
        raise error
    for rank, (_, said) in enumerate(replies):
        if said:
            raise failure(f"{what} failed on rank {rank}: {said}")
    return result, [value for value, _ in replies]
