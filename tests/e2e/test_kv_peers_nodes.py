# SPDX-License-Identifier: Apache-2.0
"""Two groups of two nodes, each a network namespace with its own `quire serve`: one group reads blocks of the other,
and processes of either are killed or stopped in the middle of a read. Needs root."""

import contextlib
import signal
import time
from types import MappingProxyType

import pytest
from nodocker_cluster.ports import free_ports
from support.engine_processes import IpcClient, wait_for
from support.kv_peer_relay import Relay
from support.kv_pods import forest, metric, num_rows
from support.node_group import PORTS, Group, write_key
from support.node_namespaces import NodeNamespace, missing_for_namespaces, node_namespaces

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing_for_namespaces()), reason=f"network namespaces need {missing_for_namespaces()}"),
]

ENGINE = {"maxModelLen": 512, "kvCacheOffloading": {"memory": "32Mi"}}
BYTES_PER_SECOND, HALF_BYTES = 200_000, 100_000
TRANSFER_PORT = 8005
NUMBER = 78
NETWORK, HOST = f"10.246.{NUMBER}.0/24", f"10.246.{NUMBER}.1"


class Groups:
    """The holder of blocks and the reader, and ports of relays. The reader knows nothing yet about a new relay."""

    def __init__(self, holder, reader, relay_ports):
        self.holder, self.reader, self.relay_ports = holder, reader, relay_ports

    def prefill_and_decode(self, text, model="tales", on_half=None):
        """Return the answer of the reader, which reads the blocks of the prompt from the holder. `on_half` runs in the
        middle of the read of the first node."""
        role = {"do_remote_decode": True, "do_remote_prefill": False}
        first = complete(self.holder.leader, text, model, max_tokens=1, kv_transfer_params=role)
        assert first.status == 200, first
        params = first.body["kv_transfer_params"]
        target, port = f"{params['remote_host']}:{params['remote_port']}", next(self.relay_ports)
        with Relay(target, port=port, on_half=on_half, host=HOST, half_bytes=HALF_BYTES):
            params |= {"remote_host": HOST, "remote_port": port}
            return complete(self.reader.leader, text, model, kv_transfer_params=params)


@contextlib.contextmanager
def running_groups(folder, num_ranks):
    relay_ports = free_ports(14)
    peers = [f"{NETWORK}:{TRANSFER_PORT}", f"{NETWORK}:{PORTS['openai']}", *(f"{HOST}:{port}" for port in relay_ports)]
    flags = [f"--kv-transfer-key-file={write_key(folder / 'kv-key')}", f"--kv-transfer-peers={','.join(peers)}"]
    flags += [f"--kv-transfer-port={TRANSFER_PORT}", f"--kv-transfer-bytes-per-second={BYTES_PER_SECOND}"]
    flags += ["--prefill-local-tokens=64"]
    with node_namespaces(4, NUMBER) as nodes, contextlib.ExitStack() as stack:
        groups = []
        for name, own in (("holder", nodes[:2]), ("reader", nodes[2:])):
            (folder / name).mkdir()
            groups.append(Group(own, folder / name, num_ranks, flags, ENGINE))
            stack.callback(groups[-1].end)
        for group in groups:
            group.wait_ready()
        yield Groups(*groups, iter(relay_ports))


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    with running_groups(tmp_path_factory.mktemp("groups"), 1) as groups:
        yield groups


def complete(service, text, model="tales", headers=MappingProxyType({}), **fields):
    body = {"model": model, "prompt": text, "max_tokens": 12, "temperature": 0} | fields
    return service.request("openai", "/v1/completions", body, headers=headers)


def cached_tokens(answer):
    return answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]


def peer_status(service):
    """Return the counters of the process that serves blocks on a node."""
    with IpcClient(service.folder / "run/kv_peer.sock", "supervisor") as client:
        return client.call("status")


def num_leases(group):
    return sum(peer_status(service)["num_leases"] for service in group.services)


def errors(groups):
    return metric(groups.reader.leader, "quire_kv_transfer_errors_total")


def check_reads(groups, service, model):
    text = forest(f"Anna {model} {groups.holder.num_ranks}", num_days=7)
    sent = [peer_status(node)["num_sent_bytes"] for node in groups.holder.services]
    answer = groups.prefill_and_decode(text, model)
    assert answer.status == 200, answer
    assert cached_tokens(answer) >= 64, errors(groups)
    assert answer.body["choices"] == complete(service, text, model).body["choices"]
    assert not errors(groups) and not num_leases(groups.holder) and not num_rows(groups.holder.leader)
    assert all(
        peer_status(node)["num_sent_bytes"] > before for node, before in zip(groups.holder.services, sent, strict=True)
    )


def test_groups_of_two_nodes_with_two_ranks_read_the_blocks_of_each_other(service, tmp_path):
    """Before the tests that use `groups`, which have the same addresses."""
    with running_groups(tmp_path, 2) as groups:
        check_reads(groups, service, "pirate")


@pytest.mark.parametrize("model", ["tales", "pirate"])
def test_groups_of_two_nodes_read_the_blocks_of_each_other(groups, service, model):
    check_reads(groups, service, model)


def test_a_group_has_the_other_one_compute_a_prompt(groups, service):
    """As with spec.disaggregation, when a router names a prefill pod in a header."""
    text, holder, reader = forest("Emil", num_days=12), groups.holder.leader, groups.reader.leader
    headers = {"x-prefiller-host-port": f"{holder.host}:{holder.ports['openai']}"}
    answer = complete(reader, text, "pirate", headers=headers)
    assert answer.status == 200, answer
    assert cached_tokens(answer) >= 100 and not errors(groups)
    assert metric(reader, "quire_remote_prefills_total")['result="used"'] == 1
    assert answer.body["choices"][0]["text"] == complete(service, text, "pirate").body["choices"][0]["text"]
    assert not num_leases(groups.holder) and not num_rows(holder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_server_of_blocks_of_another_node_fails_while_it_is_read(groups, service, number):
    """The reader computes the blocks. No row stays pinned."""
    [process] = groups.holder.processes(1, "quire_server.kv_peer")
    text, start = forest(f"Ben {number}", num_days=12), time.monotonic()
    try:
        answer = groups.prefill_and_decode(text, on_half=lambda: process.send_signal(number))
        assert answer.status == 200 and time.monotonic() - start < 15
        assert answer.body["choices"] == complete(service, text).body["choices"]
        groups.holder.leader.wait(lambda: not num_rows(groups.holder.leader), 10, "released")
    finally:
        if number == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
    assert errors(groups)
    groups.holder.worker.wait(lambda: "quire_rank_ready 1" in groups.holder.worker.metrics(), 10, "ready")


@pytest.mark.parametrize("side", ["holder", "reader"])
def test_another_node_is_killed_while_it_is_read_or_reads(groups, service, side):
    """The group of the node forms again, and blocks are read again. Nothing is left of the lease."""
    group = getattr(groups, side)
    [process] = group.processes(1, "rank_node_process")
    text, generation = forest(f"Clara {side}", num_days=12), group.worker.status()["generation"]
    answer = groups.prefill_and_decode(text, on_half=process.kill)
    if side == "holder":
        assert answer.status == 200, answer
        assert answer.body["choices"] == complete(service, text).body["choices"]
    else:
        assert answer.status == 503, answer
    group.worker.wait(lambda: group.worker.status()["generation"] > generation, 60, "formed again")
    group.wait_ready()
    groups.holder.leader.wait(lambda: not num_rows(groups.holder.leader), 10, "released")
    before = errors(groups)
    text = forest(f"David {side}", num_days=7)
    answer = groups.prefill_and_decode(text)
    assert cached_tokens(answer) >= 64 and errors(groups) == before
    assert answer.body["choices"] == complete(service, text).body["choices"]


@pytest.mark.parametrize("lost", ["worker", "group"])
def test_nodes_that_lose_the_other_group_in_a_read_compute(groups, service, lost):
    """The second node alone, or both. A lease that nothing can release ends by itself."""
    nodes, others = groups.holder.nodes, groups.reader.nodes
    with contextlib.ExitStack() as partition:

        def part():
            if lost == "group":
                partition.enter_context(nodes[0].partition([*others, NodeNamespace("relay", HOST)]))
            partition.enter_context(nodes[1].partition(others))

        text, start = forest(f"Felix {lost}", num_days=12), time.monotonic()
        answer = groups.prefill_and_decode(text, on_half=part)
        assert answer.status == 200 and time.monotonic() - start < 40, answer
        assert answer.body["choices"] == complete(service, text).body["choices"]
        wait_for(lambda: not num_leases(groups.holder), 35, "the lease has ended")
    assert errors(groups)
    for group in (groups.holder, groups.reader):
        group.wait_ready()
    groups.holder.leader.wait(lambda: not num_rows(groups.holder.leader), 10, "released")
    assert not num_rows(groups.reader.leader)


def test_a_group_that_stops_waits_for_the_reader(groups, service):
    """The last test, because it ends the holder."""
    text, before = forest("Greta", num_days=12), errors(groups)

    def stop():
        for node in reversed(groups.holder.services):
            node.child_processes()
            node.process.send_signal(signal.SIGTERM)

    answer = groups.prefill_and_decode(text, on_half=stop)
    assert answer.status == 200 and cached_tokens(answer) >= 100, (answer, errors(groups))
    assert errors(groups) == before
    assert answer.body["choices"] == complete(service, text).body["choices"]
    start = time.monotonic()
    assert [node.process.wait(60) for node in groups.holder.services] == [0, 0]
    assert time.monotonic() - start < 30
    for node in groups.holder.services:
        node.assert_nothing_left()
