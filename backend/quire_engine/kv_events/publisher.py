# SPDX-License-Identifier: Apache-2.0
"""Publishes the KV events of an engine over ZeroMQ, as vLLM does.

A batch is a message of three frames on a PUB socket: the topic, the sequence number (8 bytes, big endian), and the
encoded EventBatch. The sequence number of the first batch is 0, and a batch that was dropped leaves a gap. A subscriber
that missed batches sends the first number that it needs to the ROUTER socket. It receives the batches that are still
buffered, each with the same three frames, and then an empty topic, the number -1, and an empty frame.

The thread that steps the engine only appends events to a queue. A thread of its own converts, encodes and sends them.
Neither socket ever blocks: ZeroMQ drops the batches of a subscriber that does not read.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec
import zmq

from quire_engine.kv_cache.block_events import BlockEvent
from quire_engine.kv_events.event_converter import EventConverter
from quire_engine.kv_events.wire_events import AllBlocksCleared, EventBatch, WireEvent
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.engine.kv_events_config import KVEventsConfig
from quire_spec.errors import ConfigError
from quire_spec.model.kv_layout import KVLayout
from quire_spec.net.addresses import POD_IP_VARIABLE, is_ipv6

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
_MAX_REQUEST_BYTES = 256
_ENCODER = msgspec.msgpack.Encoder()
_Names = Mapping[AdapterName, AdapterDigest]

logger = logging.getLogger(__name__)


class KVEventPublisher:
    """The sockets and the thread of the KV events. Public methods return at once, and any thread can call them."""

    def __init__(self, config: KVEventsConfig, served_name: str, data_parallel_rank: int = 0) -> None:
        """Open the sockets of a core. Nothing is sent before `start`.

        Raises:
            ConfigError: a port is in use, or an address does not belong to this machine.
        """
        config = config.for_core(data_parallel_rank)
        pod_address = os.environ.get(POD_IP_VARIABLE, "")
        default_topic = f"kv@{pod_address or socket.gethostname()}@{served_name}"
        self._topic = (default_topic if config.topic is None else config.topic).encode()
        self.num_dropped = 0
        """Number of batches that were dropped because the queue was full."""
        self._config = config
        self._rank = data_parallel_rank
        self._context = zmq.Context()
        self._context.ipv6 = is_ipv6(pod_address) or "[" in f"{config.endpoint}{config.replay_endpoint}"
        self._publisher = self._bind(zmq.PUB, "endpoint", config.endpoint, config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            # The queue of a subscriber has room for all buffered batches and the end.
            self._replay = self._bind(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, config.buffer_steps + 1)
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, list[BlockEvent] | _Names]] = deque()
        self._next_number = 1
        """Number of the next batch that enters the queue, or that is dropped."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._closing = False
        self._last_sent = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        """Number and encoded batch of the last batches that were sent."""

    def start(self, layout: KVLayout, block_size: int) -> None:
        """Start the thread that sends events. `layout` and `block_size` describe the blocks of the engine."""
        converter = EventConverter(layout, block_size)
        self._thread = threading.Thread(target=self._run, args=(converter,), name="kv-events", daemon=True)
        self._thread.start()
        endpoints = self._config.endpoint, self._config.replay_endpoint
        logger.info("kv events are published topic=%r endpoint=%s replay_endpoint=%s", self._topic.decode(), *endpoints)

    def publish(self, events: list[BlockEvent]) -> None:
        """Queue the events of a step. If the queue is full, they are dropped, and their sequence number is missing."""
        self._enqueue(events, self._config.max_queue_size)

    def set_adapter_names(self, digest_by_name: _Names) -> None:
        """Change the names by which subscribers know the adapters. Blocks that lose a name are announced as removed."""
        self._enqueue(dict(digest_by_name), sys.maxsize)

    def close(self) -> None:
        """Stop the thread, and close the sockets."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._context.destroy()
        os.close(self._wake)

    def _enqueue(self, item: list[BlockEvent] | _Names, max_queue_size: int) -> None:
        with self._lock:
            if len(self._queue) < max_queue_size:
                self._queue.append((self._next_number, item))
            else:
                self.num_dropped += 1
            self._next_number += 1
        os.eventfd_write(self._wake, 1)

    def _bind(self, kind: zmq.SocketType, field: str, endpoint: str, hwm: int) -> "zmq.Socket[bytes]":
        new_socket: zmq.Socket[bytes] = self._context.socket(kind)
        new_socket.linger = 0
        new_socket.sndhwm = hwm
        new_socket.maxmsgsize = _MAX_REQUEST_BYTES
        try:
            new_socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ConfigError(
                f"kv_events_config.{field}: cannot listen on {endpoint} ({error.strerror}); choose a free port and an "
                "address of this machine"
            ) from error
        return new_socket

    def _run(self, converter: EventConverter) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        self._send(0, [AllBlocksCleared()])
        while not self._closing:
            ready = dict(poller.poll())
            try:
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                for _ in range(len(self._queue)):
                    self._send_next(converter)
                if self._replay is not None and self._replay in ready:
                    self._answer_replay(self._replay)
            except Exception:  # a subscriber misses a batch, but the engine must not end because of it
                logger.exception("kv events: a batch was lost")

    def _send_next(self, converter: EventConverter) -> None:
        number, item = self._queue.popleft()
        events: list[WireEvent] = []
        if number != self._last_sent + 1:
            # It is not known any more which blocks are stored.
            converter.clear()
            events.append(AllBlocksCleared())
        self._last_sent = number
        events += converter.convert(item) if isinstance(item, list) else converter.set_names(item)
        self._send(number, events)

    def _send(self, number: int, events: list[WireEvent]) -> None:
        message = number.to_bytes(8, "big"), _ENCODER.encode(EventBatch(time.time(), events, self._rank))
        if self._replay is not None:
            self._buffer.append(message)
        self._publisher.send_multipart((self._topic, *message))

    def _answer_replay(self, replay: "zmq.Socket[bytes]") -> None:
        """Answer one request, which consists of the identity of the subscriber, an empty frame, and a number."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("kv events: a request to replay_endpoint is not a sequence number of 8 bytes")
            return
        identity, _, first = frames
        # The order of big-endian numbers is the order of their bytes.
        for number, batch in self._buffer:
            if number >= first:
                replay.send_multipart((identity, b"", self._topic, number, batch))
        replay.send_multipart((identity, b"", b"", END_OF_REPLAY, b""))
