# SPDX-License-Identifier: Apache-2.0
"""The arguments of Triton Inference Server that a user is allowed to set, with a pattern for the value of each.

An argument has the form NAME=VALUE, such as `http-thread-count=16`. The supervisor itself sets all other arguments:
those for addresses, ports, folders and restrictions, and those that select the models to load. Callers: `quire serve`,
render, and the supervisor.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from quire_spec.errors import ConfigError, truncated_repr

_BOOL = r"(true|false)"
_PATTERN = r"[^\s]{1,256}"
_FILE = r"/[^\s]{1,511}"

ALLOWED: dict[str, tuple[str, str]] = {
    "grpc-use-ssl": (_BOOL, "true or false"),
    "grpc-server-cert": (_FILE, "an absolute path"),
    "grpc-server-key": (_FILE, "an absolute path"),
    "http-thread-count": (r"[1-9][0-9]{0,2}", "an integer from 1 to 999"),
    "http-header-forward-pattern": (_PATTERN, "a regular expression without white space"),
    "grpc-header-forward-pattern": (_PATTERN, "a regular expression without white space"),
    "log-verbose": (r"[0-9]", "an integer from 0 to 9"),
    "log-info": (_BOOL, "true or false"),
    "log-warning": (_BOOL, "true or false"),
    "log-error": (_BOOL, "true or false"),
    "log-format": (r"(default|ISO8601)", "default or ISO8601"),
    "rate-limit": (r"(off|execution_count)", "off or execution_count"),
    "rate-limit-resource": (r"[A-Za-z0-9_.-]{1,63}:[1-9][0-9]{0,5}(:[0-9]{1,3})?", "NAME:COUNT or NAME:COUNT:DEVICE"),
}
"""Maps the name of each allowed argument to two texts: the pattern of its values, and a description of these values for
error messages."""

HEADER_PATTERNS = ("http-header-forward-pattern", "grpc-header-forward-pattern")
_FILES = ("grpc-server-cert", "grpc-server-key")
_REPEATABLE = frozenset(("rate-limit-resource",))

PATTERN = "^(" + "|".join(f"{name}={value}" for name, (value, _) in ALLOWED.items()) + ")$"
"""Pattern that the CRD uses for an argument."""

_REASONS = {
    "grpc-use-ssl-mutual": "the supervisor has no client certificate",
    "grpc-root-cert": "the supervisor has no client certificate",
    "model-repository": "give --model-repository DIR to `quire serve`, or set spec.runtime.models",
    "load-model": "all models of the repository are loaded; unload one through the admin port",
}
_FORBIDDEN = (
    (r"(address|host)", "it names an address; use --host or spec.runtime.expose"),
    (r"port", "it names a port; use --http-port, --grpc-port, --metrics-port or spec.runtime.ports"),
    (r"restricted", "it changes the restrictions of the server's APIs"),
    (r"(repository|directory|file|store|path)", "it names a path"),
)


def parse_server_arguments(arguments: Sequence[str], field: str) -> dict[str, list[str]]:
    """Return a dict that maps the name of each argument to its values.

    `field` is the name of the option or document field that contains the arguments. Error messages begin with it.

    Raises:
        ConfigError: an argument is not allowed, malformed or repeated, or it requires another argument that is missing.
    """
    values: dict[str, list[str]] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in ALLOWED:
            raise ConfigError(f"{field}: {truncated_repr(argument)}: {_reason(name)}")
        pattern, description = ALLOWED[name]
        if not equals or not re.fullmatch(pattern, value):
            raise ConfigError(f"{field}: {name}: must be {description}, got {truncated_repr(value)}")
        if name in values and name not in _REPEATABLE:
            raise ConfigError(f"{field}: {name}: given more than once; keep one value")
        values.setdefault(name, []).append(value)
    _check_patterns(values, field)
    _check_tls(values, field)
    return values


def with_forwarded_header(arguments: Sequence[str], header: str) -> tuple[str, ...]:
    """Return the arguments of the server, with which it also forwards a header. Header names have no upper case in
    gRPC, but can have it in HTTP."""
    patterns = {name: value for name, _, value in (argument.partition("=") for argument in arguments)}
    others = [argument for argument in arguments if argument.partition("=")[0] not in HEADER_PATTERNS]
    wanted = f"(?i:{re.escape(header)})"
    forwarded = (f"{name}={'|'.join(filter(None, (patterns.get(name), wanted)))}" for name in HEADER_PATTERNS)
    return *others, *forwarded


def check_server_files(values: dict[str, list[str]], field: str) -> None:
    """Raise ConfigError if an argument names a file that cannot be read on this machine."""
    for name in _FILES:
        for value in values.get(name, ()):
            try:
                Path(value).open("rb").close()
            except OSError as error:
                raise ConfigError(
                    f"{field}: {name}: {value!r} cannot be read: {error.strerror}; correct the path"
                ) from error


def _reason(name: str) -> str:
    known = name.removeprefix("--")
    if known in ALLOWED:
        return f"write {known}=VALUE, without leading dashes"
    reason = _REASONS.get(known) or next((text for word, text in _FORBIDDEN if re.search(word, known)), None)
    allowed = f"allowed arguments are {', '.join(ALLOWED)}"
    return f"not allowed: {reason}; {allowed}" if reason else f"not an allowed argument; {allowed}"


def _check_patterns(values: dict[str, list[str]], field: str) -> None:
    """Check the regular expressions before the server starts, because the server exits with a stack trace if one is
    wrong."""
    for name in HEADER_PATTERNS:
        for value in values.get(name, ()):
            try:
                re.compile(value)
            except re.error as error:
                raise ConfigError(f"{field}: {name}: {value!r} is not a regular expression: {error}") from error


def _check_tls(values: dict[str, list[str]], field: str) -> None:
    uses_tls = values.get("grpc-use-ssl") == ["true"]
    for name in _FILES:
        if uses_tls and name not in values:
            raise ConfigError(f"{field}: grpc-use-ssl=true requires {name}; add {name}=FILE")
        if not uses_tls and name in values:
            raise ConfigError(f"{field}: {name} requires grpc-use-ssl=true; add it")
