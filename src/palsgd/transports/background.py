"""One thread that carries out jobs in order, while the training loop goes on."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch

Job = tuple[Callable[[], int], "Future[int]"] | None


class Background:
    """The thread is a daemon: at the end of a program nobody waits for a message whose peer may
    be gone. It ends when this object does."""

    def __init__(self, device: torch.device):
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._device = device
        threading.Thread(target=_work, args=(self._jobs, device), daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], int]) -> "Future[int]":
        """On a GPU the job begins when the device has done all that was asked of it so far."""
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
                stream.synchronize()  # so that whoever waits for the result may use it at once
            future.set_result(sent)
        except BaseException as error:
            future.set_exception(error)
        finally:
            del found, job, future  # an idle thread keeps no model alive


@torch.no_grad()
def _quietly(job: Callable[[], int]) -> int:
    return job()
