# SPDX-License-Identifier: Apache-2.0
"""The protocol by which pods read KV blocks from each other."""

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_spec.engine.kv_transfer_config import KVTransferConfig, PeerAddress
from quire_spec.errors import ConfigError
from quire_spec.protocol import kv_wire, shared_key
from quire_spec.protocol.protocol_error import ProtocolError

LAYOUT = kv_wire.RowLayout(kv_wire.VERSION, 16, "auto", "0/1", "m", "cpu", 4096)
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
MESSAGES = (kv_wire.Challenge, kv_wire.Proof, kv_wire.Welcome, kv_wire.Leased, kv_wire.Reading, kv_wire.Done)
MESSAGES += (kv_wire.NodeAddresses, kv_wire.Checked)


@given(
    st.binary(max_size=200)
    | st.recursive(st.integers(-(2**63), 2**64 - 1), lambda x: st.lists(x | st.binary())).map(msgspec.msgpack.encode)
)
def test_no_bytes_have_another_effect_than_a_protocol_error(data):
    for decode in (kv_wire.decode_request, *(lambda data, kind=kind: kv_wire.decode(kind, data) for kind in MESSAGES)):
        try:
            message = decode(data)
        except ProtocolError as error:
            assert error.reason == "protocol"
        else:
            assert kv_wire.encode(message)


@pytest.mark.parametrize("length", [0, 2**40, 2**63, 2**64 - 1])
def test_length_of_a_row_is_checked_before_it_is_used(length):
    data = msgspec.msgpack.encode([5, b"l" * 16, [[1, length, b"c" * 16]]])
    with pytest.raises(ProtocolError, match="Leased"):
        kv_wire.decode(kv_wire.Leased, data)


def test_each_end_notices_another_key_and_each_changed_part():
    challenge = kv_wire.Challenge(shared_key.new_nonce())
    proof = kv_wire.prove(KEY, challenge, LAYOUT)
    answer = kv_wire.welcome(KEY, challenge, proof, "model")
    kv_wire.check_welcome(KEY, challenge, proof, answer)
    replaced = msgspec.structs.replace
    for key, sent, received in (
        (OTHER_KEY, challenge, proof),
        (KEY, kv_wire.Challenge(shared_key.new_nonce()), proof),
        (KEY, challenge, replaced(proof, layout=replaced(LAYOUT, row_bytes=8))),
        (KEY, challenge, replaced(proof, mac=answer.mac)),
    ):
        with pytest.raises(ProtocolError, match="key"):
            kv_wire.welcome(key, sent, received)
    for key, changed in (
        (OTHER_KEY, answer),
        (KEY, replaced(answer, difference="")),
        (KEY, kv_wire.Welcome(proof.mac)),
    ):
        with pytest.raises(ProtocolError, match="key"):
            kv_wire.check_welcome(key, challenge, proof, changed)


def test_difference_of_layouts_names_the_cause():
    other = msgspec.structs.replace(LAYOUT, block_size=32, model="n", rows="cuda", row_bytes=8)
    assert LAYOUT.difference(other) == "block_size" and LAYOUT.difference(LAYOUT) == ""


@pytest.mark.parametrize(
    ("peers", "allowed", "refused"),
    [
        ((), "", "10.0.0.1:8005"),
        (("10.0.0.1:8005",), "10.0.0.1:8005", "10.0.0.1:8006 10.0.0.2:8005"),
        (("10.0.0.0/8:8005", "[fd00::/8]:8005"), "10.9.9.9:8005 [fd00::1]:8005", "11.0.0.1:8005 [fe00::1]:8005 a:8005"),
        (("Pod-0.set:8005",), "pod-0.set:8005 POD-0.set:8005", "pod-1.set:8005"),
    ],
)
def test_allowed_peers(peers, allowed, refused):
    config = KVTransferConfig("key", allowed_peers=peers)
    config.validate()
    assert all(config.allows(PeerAddress.parse(text)) for text in allowed.split())
    assert not any(config.allows(PeerAddress.parse(text)) for text in refused.split())


@pytest.mark.parametrize("text", ["", "a", "a:0", "a:65536", "a:-1", "http://a:1", "a:1/x", "::1:80", "[a]:1", "a:1:2"])
def test_what_is_no_address_is_refused(text):
    assert PeerAddress.parse(text) is None
    with pytest.raises(ConfigError, match="HOST:PORT"):
        KVTransferConfig("key", allowed_peers=(text,)).validate()


@pytest.mark.parametrize(
    ("field", "value"), [("key_file", ""), ("port", 0), ("bytes_per_second", 0), ("allowed_peers", ("a:1",) * 1025)]
)
def test_refusals_name_the_field(field, value):
    with pytest.raises(ConfigError, match=rf"^kv_transfer\.{field}: "):
        dataclasses.replace(KVTransferConfig("key"), **{field: value}).validate()
