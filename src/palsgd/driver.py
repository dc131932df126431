"""Does through a transport what a worker's generator asks for."""

import re

import torch

from palsgd.errors import SyncError
from palsgd.state_parts import Parts
from palsgd.transports.elastic import ElasticTransport
from palsgd.transports.requests import Admit, Exchange, Join, Request, fulfil
from palsgd.unsynced import Unsynced
from palsgd.welcome import gift, take


class Driver:
    def __init__(self, parts: Parts):
        self._parts, self._transport = parts, parts.transport
        self.unsynced: Unsynced | None = None  # what warns of steps that no sync has sent

    @torch.no_grad()
    def run(self, exchange: Exchange) -> None:
        """Do what the worker requests. An error is raised inside the worker, so that the worker can
        restore its tensors."""
        try:
            request = next(exchange)
            while True:
                try:
                    sent = self._fulfil(request)
                except RuntimeError as error:
                    lost = not isinstance(error, (torch.OutOfMemoryError, SyncError))
                    request = exchange.throw(self._lost_peer(error) if lost else error)
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
        return 0

    def _lost_peer(self, error: RuntimeError) -> SyncError:
        failure = SyncError(
            f"worker {self._transport.worker} could not exchange with the others at clock "
            f"{self._parts.worker.at.clock}: a worker left early, stalled or lost its link. The "
            "global model is unchanged; start all workers again from a checkpoint. If it left "
            "because its data ended, end all loops at one clock with palsgd.until() "
            f"({_first_sentence(str(error))})"
        )
        failure.__cause__ = error
        return failure


def _first_sentence(text: str) -> str:
    """What gloo says ends in pictures and advice that do not belong here."""
    first = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return re.split(r"(?<=[^.])[.!] (?=[A-Z])", first)[0].rstrip(".!")
