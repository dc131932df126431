"""Does through a transport what a worker's generator asks for."""

import time

import torch

from palsgd.errors import SyncError
from palsgd.state_parts import Parts
from palsgd.transports.elastic import ElasticTransport
from palsgd.transports.lost import AGAIN, is_lost_peer, lost_peer
from palsgd.transports.requests import Admit, Exchange, Join, Request, fulfil
from palsgd.unsynced import Unsynced
from palsgd.welcome import gift, take


class Driver:
    def __init__(self, parts: Parts):
        self._parts, self._transport = parts, parts.transport
        self.unsynced: Unsynced | None = None  # what warns of steps that no sync has sent
        self.joined_at: int | None = None  # the clock at which the others let this worker in

    @torch.no_grad()
    def run(self, exchange: Exchange, of: str = "") -> None:
        """Do what the worker requests. An error is raised inside the worker, so that the worker can
        restore its tensors. `of` says what exchanges are for that are not those of training."""
        try:
            request = next(exchange)
            while True:
                began = time.monotonic()
                try:
                    sent = self._fulfil(request)
                except RuntimeError as error:
                    lost, seconds = is_lost_peer(error), time.monotonic() - began
                    request = exchange.throw(self._lost_peer(error, seconds, of) if lost else error)
                except BaseException as error:  # KeyboardInterrupt too
                    request = exchange.throw(error)
                else:
                    request = exchange.send(sent)
        except StopIteration:
            pass
        except BaseException:
            if self.unsynced is not None:  # this error says more than a warning about what it left
                self.unsynced.quiet = True
            raise

    def _fulfil(self, request: Request) -> int:
        """Do what a request asks for. Newcomers are given the state of the optimizer, which the
        transport does not know."""
        if not isinstance(request, (Admit, Join)):
            return fulfil(self._transport, request)
        assert isinstance(self._transport, ElasticTransport)
        if isinstance(request, Admit):
            self._transport.admit(lambda fresh: gift(self._parts, fresh=fresh))
        else:
            given = self._transport.join(fresh=request.fresh)
            take(self._parts, given, fresh=request.fresh)
            self.joined_at = self._parts.worker.at.clock
        return 0

    def _lost_peer(self, error: RuntimeError, seconds: float, of: str) -> SyncError:
        clock = self._parts.worker.at.clock
        ended = " If it left because its data ended, end all loops at one clock with palsgd.until()"
        return lost_peer(
            error,
            who=f"worker {self._transport.worker}",
            at=f"in {of} at clock {clock}" if of else f"at clock {clock}",
            missing=self._transport.lost(),
            seconds=seconds,
            fix=f"The global model is unchanged; {AGAIN}.{'' if of else ended}",
        )
