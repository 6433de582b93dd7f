# SPDX-License-Identifier: Apache-2.0
"""The sockets of KV events, with real subscribers."""

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from nodocker_cluster.ports import free_ports
from support.kv_subscriber import AllBlocksCleared, BlockStored, KVSubscriber

from quire_engine.kv_cache.block_events import BlockEvent, BlocksStored
from quire_engine.kv_events.publisher import KVEventPublisher
from quire_spec.engine.kv_events_config import KVEventsConfig
from quire_spec.errors import ConfigError
from quire_spec.model.kv_layout import KVLayout


@contextmanager
def running(**fields) -> Iterator[tuple[KVEventPublisher, KVSubscriber]]:
    port, replay_port = free_ports(2)
    config = KVEventsConfig(
        True, endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=f"tcp://127.0.0.1:{replay_port}", **fields
    )
    publisher = KVEventPublisher(config, "tales")
    subscriber = KVSubscriber(config.endpoint, config.replay_endpoint)
    try:
        yield publisher, subscriber
    finally:
        subscriber.close()
        publisher.close()


def block(number: int, num_tokens: int = 4) -> list[BlockEvent]:
    return [BlocksStored([struct.pack(">Q24x", number)], None, [number] * num_tokens)]


def publish_until_received(publisher: KVEventPublisher, subscriber: KVSubscriber) -> int:
    """Publish batches until a new subscriber is connected; return the number of the last one, which it received."""
    for number in range(1, 200):
        publisher.publish(block(number))
        while subscriber.socket.poll(100):
            if subscriber.receive()[1] == number:
                return number
    raise AssertionError("the subscriber does not receive anything")


def test_subscriber_receives_batches_and_replays_those_that_it_missed(monkeypatch) -> None:
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    with running() as (publisher, subscriber):
        publisher.start(KVLayout(), 4)
        first = publish_until_received(publisher, subscriber)
        publisher.publish(block(1000))
        topic, number, batch = subscriber.receive()
        assert (topic, number) == (b"kv@10.0.0.7@tales", first + 1)
        assert batch.data_parallel_rank == 0 and abs(batch.ts - time.time()) < 60
        assert [event.token_ids for event in batch.events] == [[1000] * 4]
        replayed = list(subscriber.replay(0))
        assert [n for _, n, _ in replayed] == list(range(number + 1))
        assert {t for t, _, _ in replayed} == {topic}
        assert isinstance(replayed[0][2].events[0], AllBlocksCleared) and replayed[-1][2] == batch
        assert [n for _, n, _ in subscriber.replay(number)] == [number]
        assert list(subscriber.replay(number + 1)) == []


def test_replay_is_bounded_and_ignores_requests_that_are_no_numbers() -> None:
    with running(buffer_steps=3, topic="") as (publisher, subscriber):
        publisher.start(KVLayout(), 4)
        last = publish_until_received(publisher, subscriber)
        for number in range(5):
            publisher.publish(block(number))
        while subscriber.receive()[1] < last + 5:
            pass
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(subscriber._replay_endpoint)
            for frames in ((b"",), (b"", b"12"), (b"", b"x" * 100), (b"", b"x" * 8, b"")):
                dealer.send_multipart(frames)
            assert not dealer.poll(200)
        assert [n for _, n, _ in subscriber.replay(0)] == [last + 3, last + 4, last + 5]


def test_full_queue_drops_batches_visibly_and_clears_the_blocks() -> None:
    with running(max_queue_size=3) as (publisher, subscriber):
        # Nothing is sent before `start`, as if the thread had no time.
        for number in range(8):
            publisher.publish(block(number))
        assert publisher.num_dropped == 5
        publisher.start(KVLayout(), 4)
        while publisher._queue:
            time.sleep(0.01)
        publisher.publish(block(8))
        while [n for _, n, _ in subscriber.replay(0)][-1] != 9:
            time.sleep(0.01)
        batches = {number: batch.events for _, number, batch in subscriber.replay(0)}
        assert list(batches) == [0, 1, 2, 3, 9]
        assert isinstance(batches[9][0], AllBlocksCleared) and isinstance(batches[9][1], BlockStored)


def test_subscriber_that_never_reads_delays_nothing() -> None:
    with running(hwm=10, buffer_steps=10, max_queue_size=10**6) as (publisher, subscriber):
        publisher.start(KVLayout(), 4)
        publish_until_received(publisher, subscriber)
        with KVSubscriberThatNeverReads(publisher._config.endpoint) as idle:
            events = block(1, 20_000)
            started, num_batches = time.process_time(), 4_000
            slowest = 0.0
            for _ in range(num_batches):
                before = time.thread_time()
                publisher.publish(events)
                slowest = max(slowest, time.thread_time() - before)
            # 80 MB of token ids are more than the queues of the sockets and of the kernel hold.
            while publisher._queue:
                time.sleep(0.01)
            assert publisher.num_dropped == 0 and slowest < 0.05
            assert time.process_time() - started < 30
            assert idle.socket is not None
        # The other subscriber did not read either. When it does, it sees the gap.
        numbers = []
        while subscriber.socket.poll(500):
            numbers.append(subscriber.receive()[1])
        publisher.publish(block(2))
        numbers.append(subscriber.receive()[1])
        assert numbers == sorted(set(numbers)) and numbers[-1] - numbers[0] >= len(numbers)


class KVSubscriberThatNeverReads:
    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.rcvhwm = 1
        self.socket.connect(endpoint)
        self.socket.subscribe(b"")

    def __enter__(self):
        time.sleep(0.3)
        return self

    def __exit__(self, *_) -> None:
        self._context.destroy(linger=0)


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_port_in_use_is_one_clear_error(field: str) -> None:
    port, other = free_ports(2)
    endpoints = {"endpoint": f"tcp://127.0.0.1:{other}", "replay_endpoint": f"tcp://127.0.0.1:{other + 1}"}
    endpoints[field] = f"tcp://127.0.0.1:{port}"
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        taken.bind(f"tcp://127.0.0.1:{port}")
        with pytest.raises(
            ConfigError, match=rf"kv_events_config.{field}: cannot listen on tcp://127.0.0.1:{port} \(Address already"
        ):
            KVEventPublisher(KVEventsConfig(True, **endpoints), "tales")
