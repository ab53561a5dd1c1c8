"""Waiting requests, in the order in which they are to enter the batch."""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from operator import itemgetter

from octavo.core.request import Request

__all__ = ["FCFSRequestQueue", "PriorityRequestQueue", "RequestQueue", "make_request_queue"]


class RequestQueue(ABC):
    """What the scheduler needs of a queue; ``len()`` is how many wait."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """A request that has just arrived."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """A request that was in the batch and lost its place."""

    @abstractmethod
    def peek(self) -> Request:
        """The request that is next; there must be one."""

    @abstractmethod
    def pop(self) -> Request:
        """Takes the request that is next; there must be one."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Takes out a request that is waiting here."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """In the order in which they are next."""

    @abstractmethod
    def __len__(self) -> int: ...


class FCFSRequestQueue(RequestQueue):
    """First come, first served; requests that lost their place go to the head."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)


class PriorityRequestQueue(RequestQueue):
    """Lowest priority number first, then the earliest arrival."""

    def __init__(self) -> None:
        # Sorted; keys are unique, so requests themselves are never compared.
        self._requests: list[tuple[tuple[int, float, int], Request]] = []

    def add(self, request: Request) -> None:
        insort(self._requests, (request.sort_key, request))

    def put_back(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        return self._requests[0][1]

    def pop(self) -> Request:
        return self._requests.pop(0)[1]

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.sort_key, key=itemgetter(0))
        if index == len(self._requests) or self._requests[index][1] is not request:
            raise KeyError(request.request_id)
        del self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._requests)

    def __len__(self) -> int:
        return len(self._requests)


def make_request_queue(policy: str) -> RequestQueue:
    """The queue for ``--scheduling-policy``."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
