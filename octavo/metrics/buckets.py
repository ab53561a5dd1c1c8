"""Bucket bounds of the histograms. They are vLLM's, so that dashboards made for it show the same shapes."""

__all__ = [
    "CHOICES",
    "HTTP_SECONDS",
    "HTTP_SECONDS_BY_HANDLER",
    "ITERATION_TOKENS",
    "PREEMPTIONS",
    "REQUEST_SECONDS",
    "STEP_SECONDS",
    "TIME_TO_FIRST_TOKEN",
    "TOKEN_SECONDS",
    "token_counts",
]

# Tokens in a step.
ITERATION_TOKENS = (1, 8, *(2**power for power in range(4, 15)))

# Choices of a request.
CHOICES = (1, 2, 5, 10, 20)

# Preemptions of a request.
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

# Seconds.
TIME_TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# octavo's own: a step on a CPU takes a millisecond or, with a long prompt, seconds.
STEP_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# Those of prometheus-fastapi-instrumentator, which vLLM counts HTTP requests with.
HTTP_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0),
    *(7.5, 10.0, 30.0, 60.0),
)
HTTP_SECONDS_BY_HANDLER = (0.1, 0.5, 1.0)


def token_counts(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to ``most`` tokens."""
    bounds: list[int] = []
    decade = 1
    while True:
        for digit in (1, 2, 5):
            if digit * decade > most:
                return tuple(bounds) or (1,)
            bounds.append(digit * decade)
        decade *= 10
