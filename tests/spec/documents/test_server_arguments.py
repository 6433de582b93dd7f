# SPDX-License-Identifier: Apache-2.0
"""The allow list of the server's arguments: each with its form; the CRD contains the same list."""

import re

import pytest

from quire_operator.api import crd
from quire_spec.documents.server_arguments import (
    ALLOWED,
    HEADER_PATTERNS,
    PATTERN,
    parse_server_arguments,
    with_forwarded_header,
)
from quire_spec.errors import ConfigError

TLS = ["grpc-use-ssl=true", "grpc-server-cert=/c.pem", "grpc-server-key=/k.pem"]


def test_allowed_arguments_are_parsed():
    resources = ["rate-limit-resource=R1:2", "rate-limit-resource=R2:3:0"]
    others = ["http-thread-count=16", "http-header-forward-pattern=x-.*=a", "log-verbose=1", "rate-limit=off"]
    values = parse_server_arguments([*TLS, *resources, *others], "f")
    assert values["rate-limit-resource"] == ["R1:2", "R2:3:0"]
    assert values["http-header-forward-pattern"] == ["x-.*=a"] and values.keys() <= ALLOWED.keys()


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("http-thread-count=0", "http-thread-count: must be an integer from 1 to 999, got '0'"),
        ("http-thread-count", "http-thread-count: must be an integer from 1 to 999, got ''"),
        ("log-info=yes", "log-info: must be true or false, got 'yes'"),
        ("grpc-server-cert=cert.pem", "must be an absolute path"),
        ("rate-limit-resource=R", "must be NAME:COUNT or NAME:COUNT:DEVICE"),
        ("http-header-forward-pattern=(", "'(' is not a regular expression"),
        ("--log-info=true", "write log-info=VALUE, without leading dashes"),
        ("http-address=0.0.0.0", "not allowed: it names an address; use --host"),
        ("reuse-grpc-port=true", "not allowed: it names a port"),
        ("http-restricted-api=health:k=v", "not allowed: it changes the restrictions"),
        ("model-repository=/x", "give --model-repository DIR to `quire serve`"),
        ("backend-directory=/x", "not allowed: it names a path"),
        ("log-file=/x", "not allowed: it names a path"),
        ("trace-file=/x", "not allowed: it names a path"),
        ("grpc-use-ssl-mutual=true", "not allowed: the supervisor has no client certificate"),
        ("backend-config=python,x=y", "not an allowed argument; allowed arguments are grpc-use-ssl"),
        ("exit-on-error=false\n--http-port=1", "not an allowed argument"),
        ("http-thread-count=2 --http-port=1", "must be an integer"),
        ("grpc-use-ssl=true", "grpc-use-ssl=true requires grpc-server-cert"),
        ("grpc-server-key=/k", "grpc-server-key requires grpc-use-ssl=true"),
    ],
)
def test_all_others_are_rejected_by_name(argument, error):
    with pytest.raises(ConfigError) as raised:
        parse_server_arguments([argument], "spec.runtime.serverArgs")
    assert str(raised.value).startswith("spec.runtime.serverArgs: ") and error in str(raised.value)


def test_repeated_arguments_are_rejected():
    with pytest.raises(ConfigError, match="log-info: given more than once"):
        parse_server_arguments(["log-info=true", "log-info=false"], "f")


def test_the_resource_has_the_same_list():
    runtime = crd.load_schema()["properties"]["spec"]["properties"]["runtime"]["properties"]
    assert runtime["serverArgs"]["items"]["pattern"] == PATTERN


@pytest.mark.parametrize(
    ("pattern", "forwarded", "not_forwarded"),
    [(None, {"traceparent", "Traceparent"}, {"x-a", "traceparent2"}), ("x-.*", {"x-a", "traceparent"}, {"y"})],
)
def test_header_is_forwarded_beside_those_of_the_user(pattern, forwarded, not_forwarded):
    given = ["rate-limit=off", *([] if pattern is None else [f"{name}={pattern}" for name in HEADER_PATTERNS])]
    arguments = with_forwarded_header(given, "traceparent")
    values = parse_server_arguments(arguments, "f")
    assert values.keys() == {"rate-limit", *HEADER_PATTERNS}
    for name in HEADER_PATTERNS:
        matching = {header for header in forwarded | not_forwarded if re.fullmatch(values[name][0], header)}
        assert matching == forwarded
