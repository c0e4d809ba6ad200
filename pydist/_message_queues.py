"""Owns the threads of asynchronous messages over process groups: one for each peer and tag in use.

A thread runs the messages of its queue one after the other, in the order of their calls, and ends
when there are no more. A blocking message joins the queue where there is one.
"""

import threading
from collections import deque
from collections.abc import Callable

_SLICE_S = 0.05  # how late a signal may be noticed


class MessageRequest:
    """A message on its way. `run` returns its source, or -1."""

    def __init__(self, description: str, run: Callable[[], int]) -> None:
        self.description = description
        self.source = -1
        self._run: Callable[[], int] | None = run
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def test(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        while not self._ended.wait(_SLICE_S):
            pass
        if self._error is not None:
            raise self._error

    def carry_out(self) -> None:
        run, self._run = self._run, None  # with the tensors that it keeps
        assert run is not None
        try:
            self.source = run()
        except BaseException as error:
            self._error = error
        del run
        self._ended.set()


class MessageQueues:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple[str, int | None, int], deque[MessageRequest]] = {}

    def start(
        self, direction: str, peer: int | None, tag: int, description: str, run: Callable[[], int]
    ) -> MessageRequest:
        key = (direction, peer, tag)
        request = MessageRequest(description, run)
        with self._lock:
            if key in self._queues:
                self._queues[key].append(request)
                return request
            self._queues[key] = deque([request])
        threading.Thread(target=self._work, args=(key,), name=description, daemon=True).start()
        return request

    def run(
        self, direction: str, peer: int | None, tag: int, description: str, run: Callable[[], int]
    ) -> int:
        """In this thread, or where asynchronous ones wait, after them."""
        with self._lock:
            in_use = (direction, peer, tag) in self._queues
        if not in_use:
            return run()
        request = self.start(direction, peer, tag, description, run)
        request.wait()
        return request.source

    def _work(self, key: tuple[str, int | None, int]) -> None:
        while True:
            with self._lock:
                queue = self._queues[key]
                if not queue:
                    del self._queues[key]
                    return
                request = queue.popleft()
            request.carry_out()
