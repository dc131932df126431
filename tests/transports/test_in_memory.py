"""Messages of workers that live in one process."""

import pytest
import torch

from palsgd.codecs import TopK, find_codec
from palsgd.transports import (
    Alone,
    Finish,
    Message,
    SimulatedTransport,
    Start,
    average_in_memory,
    fulfil,
)


def test_a_plain_mean_is_added_up_in_the_order_of_the_workers():
    torch.manual_seed(0)
    brought = [torch.randn(1000) for _ in range(3)]
    messages = [Message(b.clone()) for b in brought]
    assert average_in_memory(messages) == 4000
    for message in messages:
        assert torch.equal(message.values, (brought[0] + brought[1] + brought[2]) / 3)


def test_a_gather_gives_every_worker_the_values_of_all():
    messages = [Message(torch.full((2,), float(k)), gather=True, codec=TopK()) for k in range(3)]
    assert average_in_memory(messages) == 8
    for k, message in enumerate(messages):
        assert message.rows.tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
        assert message.values.tolist() == [float(k)] * 2


def test_one_worker_keeps_its_values_and_sends_nothing():
    message = Message(torch.ones(2), codec=TopK())
    assert average_in_memory([message]) == 0
    assert message.values.tolist() == [1.0, 1.0]


def test_a_simulated_worker_counts_bytes_and_refuses_to_exchange():
    transport = SimulatedTransport(0, 2, [])
    message = Message(torch.ones(256), codec=find_codec("int8"))
    transport.check(message.codec)
    transport.prepare(torch.device("cpu"))
    assert transport.finish(message) == 2 * 260
    for refused in (transport.exchange, transport.start, transport.mean):
        with pytest.raises(RuntimeError, match=r"driven by palsgd\.simulate"):
            refused(message)


def test_simulated_workers_with_other_settings_are_named_with_both_values():
    settings = []
    SimulatedTransport(0, 2, settings).agree({"seed": 1})
    with pytest.raises(ValueError, match="seed differs between workers: worker 1 has 2, worker 0"):
        SimulatedTransport(1, 2, settings).agree({"seed": 2})


def test_a_request_is_carried_out_by_the_method_it_names():
    class Noting(Alone):
        def __init__(self):
            self.calls = []

        def exchange(self, message):
            self.calls.append("exchange")
            return 5

        def finish(self, message):
            self.calls.append("finish")
            return super().finish(message)

    transport, message = Noting(), Message(torch.ones(1))
    requests = (message, Start(message), Finish(message))
    assert [fulfil(transport, request) for request in requests] == [5, 0, 5]
    assert transport.calls == ["exchange", "exchange", "finish"]
