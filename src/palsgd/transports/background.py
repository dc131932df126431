"""One thread that runs exchanges in order while the training loop goes on."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

Job = tuple[Callable[[], int], "Future[int]"] | None


class Background:
    """The thread is a daemon, so that a program can end although an exchange waits for a lost peer.
    The thread ends when this object is deleted."""

    def __init__(self, device: torch.device):
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._device = device
        threading.Thread(target=_work, args=(self._jobs, device), daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], int]) -> "Future[int]":
        """Run `job` in the thread. On a GPU the job begins after all work that the device has been
        given so far."""
        future: Future[int] = Future()
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._jobs.put((job, event, future))
        return future


def _work(jobs: "SimpleQueue[Any]", device: torch.device) -> None:
    stream = None
    while (found := jobs.get()) is not None:
        job, event, future = found
        try:
            if event is None:
                future.set_result(_quietly(job))
                continue
            stream = stream or torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                stream.wait_event(event)
                sent = _quietly(job)
                stream.synchronize()  # the result may be used at once after waiting for it
            future.set_result(sent)
        except BaseException as error:
            future.set_exception(error)
        finally:
            del found, job, future  # an idle thread must not keep a model in memory


@torch.no_grad()
def _quietly(job: Callable[[], int]) -> int:
    return job()
