# SPDX-License-Identifier: Apache-2.0
"""Each API key uses its own adapters and no more than its rates; all other adapters do not exist for it."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.requests.limits import RequestLimits
from quire_engine.text.admission.admission_controller import AdmissionController
from quire_engine.text.admission.api_key_access import ApiKeyAccess
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.documents.adapter_sum import sum_digest
from quire_spec.documents.api_key_rule import ApiKeyRule
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument, QuireError, Unavailable
from quire_spec.protocol.messages import GenerateRequest

RULES = (
    ApiKeyRule(name="acme", adapters=("acme-*", "shared")),
    ApiKeyRule(name="globex", adapters=("globex-[12]", "shared")),
    ApiKeyRule(name="base-only", adapters=()),
    ApiKeyRule(name="all"),
)
LIMITS = RequestLimits(max_model_len=32, vocab_size=384, max_prompt_bytes=2000)
READY = ("acme-sql", "acme-chat", "globex-1", "globex-3", "shared")
LOADING = ("acme-new", "globex-2")
VISIBLE = {
    "acme": {"acme-sql", "acme-chat", "shared", "acme-new"},
    "globex": {"globex-1", "shared", "globex-2"},
    "base-only": set(),
    "all": {*READY, *LOADING},
    "without a rule": set(),
    "": {*READY, *LOADING},
}


def make_admission() -> AdmissionController:
    admission = AdmissionController(LIMITS, "base", 4, ApiKeyAccess(RULES))
    admission.open()
    admission.set_adapters({AdapterName(name): AdapterDigest(f"sha256:{name}") for name in READY}, {})
    admission.set_loading_adapters({*LOADING})
    return admission


def outcome(admission: AdmissionController, key: str, model: str) -> str:
    """Return the digest of the adapter, or the error, in which the name of the model is replaced."""
    request = GenerateRequest(1, model, None, [1], SamplingParams(), True, api_key_name=key)
    try:
        return str(admission.admit(request, Counter()).digest)
    except QuireError as error:
        return f"{type(error).__name__}: {error}".replace(model, "NAME")


@pytest.mark.parametrize("key", VISIBLE)
def test_every_part_of_a_sum_must_be_visible(key: str):
    admission, names = make_admission(), (*READY, *LOADING, "never-seen")
    for first in names:
        for second in set(names) - {first}:
            result, usable = outcome(admission, key, f"{first}:0.7,{second}:-0.3"), VISIBLE[key] & {*READY}
            assert result.startswith("sum:") == ({first, second} <= usable), result
            if hidden := [name for name in (first, second) if name not in VISIBLE[key]]:
                # The first part that cannot be used is reported, as if it were the name of the model.
                errors = {outcome(admission, key, name).replace("NAME", name) for name in {*hidden, first, second}}
                assert result in errors


@pytest.mark.parametrize("key", VISIBLE)
def test_the_name_of_a_sum_and_all_its_adapters_must_be_visible(key: str):
    admission = make_admission()
    sums = {"acme-both": "acme-sql:0.7,shared:0.3", "acme-other": "acme-sql:1,globex-1:1", "sum": "shared:2"}
    digests = {AdapterName(name): AdapterDigest(f"sha256:{name}") for name in READY}
    admission.set_adapters(digests, {}, (), {AdapterName(name): text for name, text in sums.items()})
    visible = {"acme": {"acme-both"}, "all": {*sums}, "": {*sums}}.get(key, set())
    assert admission.visible_sums(key) == visible
    missing = outcome(admission, key, "never-seen")
    assert "is the base model; remove it" in outcome(admission, key, f"shared:1,{admission.served_name}:1")
    for name, text in sums.items():
        assert outcome(admission, key, name) == (outcome(admission, key, text) if name in visible else missing)
        if name in visible:
            assert admission.sum_digests()[AdapterName(name)] == outcome(admission, key, name)
            assert "is a sum itself" in outcome(admission, key, f"{name}:0.5")


def test_a_sum_waits_for_its_adapters():
    admission = make_admission()
    digests = {AdapterName("shared"): AdapterDigest("sha256:1")}
    admission.set_adapters(digests, {}, ("find-*",), {AdapterName("sum"): "shared:1,acme-new:1"})
    assert admission.sum_digests() == {}
    assert outcome(admission, "all", "sum").startswith("Unavailable")
    found = admission.resolve_model("shared:1,find-a:2", "all")
    assert (found.missing_names, found.digest) == (("find-a",), None)
    complete = found.found({AdapterName("find-a"): AdapterDigest("sha256:2")})
    assert complete.digest == sum_digest([("sha256:1", 1.0), ("sha256:2", 2.0)])
    with pytest.raises(InvalidArgument, match="two names stand for the same adapter"):
        found.found({AdapterName("find-a"): AdapterDigest("sha256:1")})


def test_a_sum_has_an_identity_of_its_own():
    admission = make_admission()
    mixes = (
        "acme-sql:0.7,shared:0.3",
        "shared:0.3,acme-sql:0.7",
        "acme-sql:0.7,shared:0.31",
        "acme-sql:1.0",
        "acme-sql",
    )
    first, same, *others = (outcome(admission, "acme", mix) for mix in mixes)
    assert first == same and len({first, *others}) == 4
    assert outcome(admission, "acme", "acme-sql:0.7,shared").startswith("InvalidArgument")
    admission.set_adapters({AdapterName(name): AdapterDigest("sha256:1") for name in ("acme-a", "acme-b")}, {})
    assert "two names stand for the same adapter" in outcome(admission, "acme", "acme-a:1,acme-b:1")


@pytest.mark.parametrize("key", VISIBLE)
def test_a_forbidden_adapter_does_not_exist(key: str):
    admission = make_admission()
    missing = outcome(admission, key, "never-seen")
    assert missing.startswith("NotFound") and outcome(admission, key, "base") == "None"
    for name in (*READY, *LOADING):
        expected = f"sha256:{name}" if name in READY else "Unavailable: model 'NAME': the adapter is not loaded yet"
        is_visible = name in VISIBLE[key]
        assert outcome(admission, key, name).startswith(expected if is_visible else missing), name
        assert (name in missing) == (is_visible and name in READY), "the list of names shows no other's adapters"
    assert {*admission.visible_adapters(key), *admission.visible_loading_names(key)} == VISIBLE[key]


def test_without_rules_every_key_may_use_everything():
    access = ApiKeyAccess()
    assert access.allows("any", "acme-sql")
    for _ in range(1000):
        access.admit("any", 0.0)
        access.consume("any", 10**9)


@given(
    rule=st.builds(
        ApiKeyRule,
        name=st.just("a"),
        requestsPerMinute=st.none() | st.integers(1, 50),
        tokensPerMinute=st.none() | st.integers(1, 5000),
    ),
    requests=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 2000)), min_size=1, max_size=60),
)
def test_rates_are_never_exceeded_and_a_retry_after_the_given_time_is_accepted(
    rule: ApiKeyRule, requests: list[tuple[float, int]]
):
    access, now, num_requests, num_tokens = ApiKeyAccess([rule]), 0.0, 0, 0
    largest = max(tokens for _, tokens in requests)
    for pause, tokens in requests:
        now += pause
        for _ in range(3):  # each limit can reject the request once
            try:
                access.admit("a", now)
                break
            except Unavailable as error:
                assert error.retry_after_s is not None and re.search(r"PerMinute is \d+; retry in [\d.]+ s", str(error))
                now += error.retry_after_s + 1e-6
        else:
            raise AssertionError("rejected after the given time")
        access.admit("other", now)
        access.consume("a", tokens)
        num_requests, num_tokens = num_requests + 1, num_tokens + tokens
        minutes = now / 60 + 1
        assert rule.requestsPerMinute is None or num_requests <= rule.requestsPerMinute * minutes + 1
        assert rule.tokensPerMinute is None or num_tokens <= rule.tokensPerMinute * minutes + largest
