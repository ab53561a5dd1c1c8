"""What the probes are told: loaded, alive, going on. They ask nobody: the engine's heartbeat is there to be read."""

from typing import TYPE_CHECKING, Any

from octavo.logging import one_line

if TYPE_CHECKING:
    from octavo.entrypoints.server_state import ServerState

__all__ = ["Probes"]

_LONGEST_CAUSE = 500

# The status, and the body.
_Told = tuple[int, dict[str, Any]]


class Probes:
    """Args:

    state: of this front end.
    """

    def __init__(self, state: "ServerState") -> None:
        self._state = state

    def health(self) -> _Told:
        """200 when the model is loaded and the engine alive, also while the server drains."""
        state = self._state
        if state.services is None:
            loading: dict[str, Any] = {"status": "loading", "stage": state.stage}
            if state.progress:
                loading["progress"] = round(state.progress, 3)
            pulse = state.engine_pulse()
            return 503, loading | ({"cause": pulse.cause} if pulse.is_overdue else {})
        if state.dead_cause is not None:
            return 503, _because("dead", state.dead_cause)
        return 200, {"status": "draining" if state.draining else "ok"}

    def ready(self) -> _Told:
        """200 when requests should be sent here: loaded, not draining, the step in progress not overdue, and every
        front end of the server goes on."""
        code, body = self.health()
        if code != 200 or self._state.services is None:
            return code, body
        if self._state.draining:
            return 503, body
        pulse = self._state.pulse()
        return (503, _because("overdue", pulse.cause)) if pulse.is_overdue else (200, body)

    def live(self) -> _Told:
        """200 unless the server should be started anew: the engine is dead, in a step that will hardly end, or silent
        for so long, loading or loaded; or another front end is."""
        state = self._state
        if state.dead_cause is not None:
            return self.health()
        pulse = state.pulse()
        if pulse.is_stuck:
            return 503, _because("stuck", pulse.cause)
        return 200, self.health()[1] if state.services is None else {"status": "ok"}


def _because(status: str, cause: str) -> dict[str, Any]:
    return {"status": status, "cause": one_line(cause)[:_LONGEST_CAUSE]}
