"""CUDA graphs: a function of fixed buffers is recorded once and replayed as one launch."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..compiling import first_line
from .layout import bucket


class Turn:
    """A lock, to be entered again by its holder, that knows whether others wait for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: set[int] = set()

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            thread = threading.get_ident()
            try:
                self._waiting.add(thread)
                self._lock.acquire()
            finally:
                self._waiting.discard(thread)

    def __exit__(self, *error: object) -> None:
        self._lock.release()


# Kernels that meet in a counter of their device, and recordings, must not overlap, on whatever streams threads work.
# Held for device work and what is done meanwhile, never while code of a caller runs, but for a cost model.
TURN = Turn()


class RecordingFailed(RuntimeError):
    """A function could not be compiled or recorded. State is as before."""


@contextmanager
def device_turn() -> Iterator[None]:
    """`TURN` until the device is through with what is started inside."""
    with TURN:
        at_work = True
        try:
            yield
        except RecordingFailed:  # nothing is, and the stream of a capture that broke off might answer with an error
            at_work = False
            raise
        finally:
            if at_work and torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()


class Graphs:
    """Recorded functions by key; all of them share one memory pool.

    Args:
        idle: makes the state such that running a function once more changes nothing, and restores it on exit.
        prepared: entered around recording, for code that runs differently there (compiled layers); told `static`.
    """

    def __init__(
        self, idle: Callable[[], AbstractContextManager], prepared: Callable[[bool | None], AbstractContextManager]
    ):
        self._idle, self._prepared = idle, prepared
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None
        self._failed: list[torch.cuda.CUDAGraph] = []
        self.enabled = False

    def run(
        self,
        key: Hashable,
        function: Callable[[], Any],
        static: bool | None = True,
        meanwhile: Callable[[], None] | None = None,
        wait: bool = True,
    ) -> Any:
        """What `function` returns; on a GPU the tensors are the graph's own and the next replay overwrites them.

        Args:
            key: of the recording.
            static: whether its shapes are worth a compilation of their own; `None` for none at all.
            meanwhile: runs on the host while the device is busy and others wait for their turn, so it must be short.
            wait: until the device is through. If not, the caller holds `TURN` until then.

        Raises:
            RecordingFailed: on the first use of a key.
        """
        with device_turn() if wait else TURN:
            outputs = self._run(key, function, static)
            if meanwhile is not None:
                meanwhile()
        return outputs

    def _run(self, key: Hashable, function: Callable[[], Any], static: bool | None) -> Any:
        if not self.enabled:
            return function()
        if key not in self._recorded:
            try:
                self._recorded[key] = self._record(function, static)
            except Exception as error:
                raise RecordingFailed(first_line(error)) from error
        graph, outputs = self._recorded[key]
        graph.replay()
        return outputs

    def _record(self, function: Callable[[], Any], static: bool | None) -> tuple[torch.cuda.CUDAGraph, Any]:
        with torch.profiler.record_function("warmup"), self._idle(), self._prepared(static):
            for _ in range(2):  # compiles, tunes and allocates
                function()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                # Other threads may allocate meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    outputs = function()
            except BaseException:
                torch.cuda.set_stream(stream)  # a capture that broke off leaves its own
                # The allocator may still ask a graph whose capture failed, and its pool takes no other.
                self._failed.append(graph)
                self._pool = None
                raise
        return graph, outputs

    def width(self, count: int) -> int:
        """Lanes for `count` rows: recordings need few different widths, plain code takes any."""
        return bucket(count) if self.enabled else count

    def __len__(self) -> int:
        return len(self._recorded)

    def clear(self) -> None:
        self._recorded.clear()
        self._pool = None
