"""CUDA graphs: a function of fixed buffers is recorded once and replayed as one launch."""

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from ..compiling import first_line
from .layout import bucket


class Turn:
    """Who may start device work: a lock, to be entered again by its holder.

    It is given back while that work runs. On the same stream the next holder's work comes behind it anyway; on another
    stream of the device it waits for it there.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        # By device: the thread that had the last turn, and what it has left at work.
        self._threads: dict[int, int] = {}
        self._left: dict[int, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    @property
    def is_ours(self) -> bool:
        """Whether the last turn on the current device was one of this thread."""
        return self._threads.get(_current_device()) == threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self._depth == 0 and (left := self._left.get(_current_device())) is not None:
                (stream, event), own = left, torch.cuda.current_stream()
                if own != stream:
                    own.wait_event(event)
            self._threads[_current_device()] = threading.get_ident()
            self._depth += 1
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        self._depth -= 1
        try:
            if self._depth == 0 and torch.cuda.is_initialized():
                stream = torch.cuda.current_stream()
                self._left[_current_device()] = stream, stream.record_event()
        except RuntimeError:
            if error is None:  # else that one says more
                raise
        finally:
            self._lock.release()


def _current_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


# Kernels that meet in a counter of their device, and recordings, must not overlap, on whatever streams threads work.
# Held while work is started, measured or waited for, never while code of a caller runs.
TURN = Turn()


def current(device: torch.device) -> AbstractContextManager:
    """Make a device the current one: Triton's kernels and recordings go there, whatever their tensors say."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def finish(device: torch.device) -> None:
    """Wait for what turns have left at work on `device`, the current one, but not while another thread records."""
    if device.type == "cuda":
        with TURN:
            torch.cuda.current_stream().synchronize()


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """For all recordings of a device; torch's own stream belongs to the first device that recorded."""
    return torch.cuda.Stream(device)


class RecordingFailed(RuntimeError):
    """A function could not be compiled or recorded. State is as before."""


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

    def run(self, key: Hashable, function: Callable[[], Any], static: bool | None = True) -> Any:
        """What `function` returns; on a GPU the tensors are the graph's own and the next replay overwrites them.

        Args:
            key: of the recording.
            static: whether its shapes are worth a compilation of their own; `None` for none at all.

        Raises:
            RecordingFailed: on the first use of a key.
        """
        with TURN:
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
            side = _recording_stream(stream.device)
            try:
                # Other threads may allocate meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
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
