"""When requests are due: at once, or at random with a mean rate, as a gamma process."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ArrivalOptions", "arrival_times"]


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions:
    """Attributes:

    request_rate: requests a second; inf: all at once.
    burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, less is more bursty, inf is even.
    ramp_up_strategy: the rate grows from ``ramp_up_start_rps`` to ``ramp_up_end_rps``, "linear" or "exponential" in
        the number of requests; None: it is ``request_rate``.
    seed: of the gaps.
    """

    request_rate: float = float("inf")
    burstiness: float = 1.0
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if ends != (None, None):
                raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need a --ramp-up-strategy")
            return
        if None in ends:
            raise ConfigError("--ramp-up-strategy needs both --ramp-up-start-rps and --ramp-up-end-rps")
        if self.request_rate != float("inf"):
            raise ConfigError("--ramp-up-strategy sets the rate; leave out --request-rate")


def arrival_times(count: int, options: ArrivalOptions) -> "np.ndarray":
    """Seconds after the first request at which each is due, ascending. The last of them comes when it would if all gaps
    were even: a run at a rate has that rate, whatever was drawn."""
    import numpy as np

    rates = _rates(count - 1, options)
    if count == 1 or np.isinf(rates).all():
        return np.zeros(count)
    means = 1 / rates
    if np.isinf(options.burstiness):
        gaps = means
    else:
        draw = np.random.default_rng(options.seed)
        gaps = draw.gamma(shape=options.burstiness, scale=means / options.burstiness)
    # Very bursty gaps may all be nothing.
    gaps = gaps * (means.sum() / gaps.sum()) if gaps.sum() > 0 else means
    return np.concatenate([[0.0], np.cumsum(gaps)])


def _rates(num_gaps: int, options: ArrivalOptions) -> "np.ndarray":
    """Requests a second at each gap."""
    import numpy as np

    if options.ramp_up_strategy is None:
        return np.full(num_gaps, options.request_rate)
    start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
    assert start is not None
    assert end is not None
    space = np.linspace if options.ramp_up_strategy == "linear" else np.geomspace
    found: np.ndarray = space(start, end, num_gaps)
    return found
