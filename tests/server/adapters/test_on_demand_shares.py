# SPDX-License-Identifier: Apache-2.0
"""Which adapters leave an adapter source: limits always hold, and a client's share protects its adapters."""

from hypothesis import given
from hypothesis import strategies as st

from quire_server.adapters.on_demand_shares import OnDemandAdapter, select_leaving

CLIENTS = st.sampled_from("abc")
ADAPTERS = st.lists(
    st.tuples(CLIENTS, st.integers(1, 40), st.sampled_from([0.0, 1.0, 2.0, 5.0])), min_size=0, max_size=8
).map(lambda rows: [OnDemandAdapter(f"n{i}", *row) for i, row in enumerate(rows)])


def usage(client, adapters, max_adapters, max_bytes):
    own = [adapter for adapter in adapters if adapter.client == client]
    return max(len(own) / max_adapters, sum(adapter.num_bytes for adapter in own) / max_bytes)


@given(ADAPTERS, CLIENTS, st.integers(1, 40), st.integers(1, 8), st.integers(40, 200))
def test_limits_hold_and_no_client_within_its_share_loses_an_adapter(adapters, client, size, max_adapters, max_bytes):
    newcomer = OnDemandAdapter("new", client, size)
    leaving = select_leaving(adapters, newcomer, max_adapters, max_bytes)
    if leaving is None:
        assert any(adapter.idle_s == 0 for adapter in adapters), "only open requests deny a newcomer its room"
        return
    by_name = {adapter.name: adapter for adapter in adapters}
    staying = [adapter for adapter in adapters if adapter.name not in leaving] + [newcomer]
    assert len(staying) <= max_adapters and sum(adapter.num_bytes for adapter in staying) <= max_bytes
    assert len(set(leaving)) == len(leaving)
    assert all(by_name[name].idle_s > 0 for name in leaving), "adapters with open requests stay"
    present = [*adapters, newcomer]
    for name in leaving:
        victim = by_name[name]
        others = {adapter.client for adapter in present}
        has_one = any(a.client == client for a in present if a.name != "new")
        if victim.client != client and has_one:
            assert usage(victim.client, present, max_adapters, max_bytes) > 1 / len(others), "a share protects"
        idle = [a for a in present if a.client == victim.client and a.name != "new" and a.idle_s > 0]
        assert victim.idle_s == max(a.idle_s for a in idle), "the least recently used one leaves"
        present.remove(victim)
    if leaving:
        last = by_name[leaving[-1]]
        before = [*staying, last]
        assert len(before) > max_adapters or sum(a.num_bytes for a in before) > max_bytes, "none leaves without need"


def test_a_client_that_floods_pays_with_its_own_adapters():
    served = {name: OnDemandAdapter(name, "calm", 1, 100.0) for name in ("x", "y")}
    for i in range(50):
        newcomer = OnDemandAdapter(f"flood-{i}", "flood", 1, 1.0)
        leaving = select_leaving(served.values(), newcomer, 4, 100)
        for name in leaving:
            del served[name]
        served[newcomer.name] = newcomer
    assert {"x", "y"} <= served.keys() and len(served) == 4


def test_the_first_adapter_of_a_client_gets_room_even_beyond_its_share():
    adapters = [OnDemandAdapter("x", "a", 1, 3.0)]
    assert select_leaving(adapters, OnDemandAdapter("y", "b", 1), 1, 10) == ["x"]
