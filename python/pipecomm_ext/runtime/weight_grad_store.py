"""`WeightGradStore`: weight gradients that layers leave for later. DeepSeek-AI, DualPipe, 2025."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

Closure = Callable[[], object]


class WeightGradStore:
    """Collects the weight-gradient work of the autograd Functions of a stage.

    A layer takes part with a Function of its own, whose backward does, instead of that work,

        if WeightGradStore.enabled:
            WeightGradStore.put(compute_weight_gradient)

    `enabled` is True only while an executor runs the input half (I) of a backward; the executor keeps what
    was put during it, and runs it at the W of the same stage and micro-batch. The other members are for
    programs that drive the store by hand: `flush()` closes the list of closures of a backward, `pop()` runs
    the oldest closed list, `clear()` forgets everything.
    """

    enabled: bool = False
    cache: list[Closure] = []
    funcs_queue: queue.SimpleQueue[list[Closure]] = queue.SimpleQueue()
    _one_recording = threading.RLock()  # autograd may run a Function on another thread: no thread-local state

    @classmethod
    def put(cls, func: Closure) -> None:
        """Adds a closure to the list of the backward that runs now."""
        cls.cache.append(func)

    @classmethod
    def flush(cls) -> None:
        """Closes the current list and puts it at the end of the queue."""
        cls.funcs_queue.put(cls.cache)
        cls.cache = []

    @classmethod
    def pop(cls) -> None:
        """Takes the oldest list of the queue and runs its closures. Raises IndexError if there is none."""
        if cls.funcs_queue.empty():
            raise IndexError("WeightGradStore.pop: no list is in the queue; call flush() after a backward")
        for func in cls.funcs_queue.get():
            func()

    @classmethod
    def clear(cls) -> None:
        """Empties list and queue, and switches the store off."""
        cls.enabled, cls.cache, cls.funcs_queue = False, [], queue.SimpleQueue()

    @classmethod
    @contextlib.contextmanager
    def recording(cls) -> Iterator[list[Closure]]:
        """Enables the store for a block and yields the list of what is put meanwhile; restores the previous
        state at the end, also after an exception. Other threads wait for their turn."""
        with cls._one_recording:
            before = cls.enabled, cls.cache
            cls.enabled, cls.cache = True, []
            try:
                yield cls.cache
            finally:
                cls.enabled, cls.cache = before
