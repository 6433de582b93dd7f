# SPDX-License-Identifier: Apache-2.0
"""Plugin: a program that a kubeconfig names, which prints the token that it is to be used with.

Tokens only: a plugin that gives a client certificate is refused by name.
Source: https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from quire_spec.errors import ConfigError, Unavailable

_TIMEOUT_S = 60.0
_MAX_STDERR_CHARS = 200
_ALWAYS_INTERACTIVE = "Always"
"""An interactiveMode that a program without a terminal cannot serve."""


@dataclass(frozen=True, slots=True)
class ExecCredential:
    """What a plugin gave."""

    token: str
    expires_at: float
    """Seconds since 1970; infinite: it does not say."""


@dataclass(frozen=True, slots=True)
class ExecPlugin:
    """A kubeconfig's exec entry."""

    argv: tuple[str, ...]
    api_version: str
    """apiVersion of the ExecCredential that it reads and prints."""
    env: Mapping[str, str]
    """Added to our own."""
    install_hint: str
    """How to install it, in the kubeconfig's words; mostly empty."""

    @classmethod
    def from_kubeconfig(cls, entry: Any, kubeconfig: Path) -> Self:
        """The plugin that a user of this kubeconfig has.

        Raises:
            ConfigError: something is missing, or it wants a person to type.
        """
        location = f"kubeconfig {kubeconfig}: users[].user.exec"
        try:
            command, api_version = entry["command"], entry["apiVersion"]
            env = {str(pair["name"]): str(pair["value"]) for pair in entry.get("env") or ()}
            args = [str(arg) for arg in entry.get("args") or ()]
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{location}: {error!r}; it needs command and apiVersion") from error
        if entry.get("interactiveMode") == _ALWAYS_INTERACTIVE:
            raise ConfigError(
                f"{location}.interactiveMode: {_ALWAYS_INTERACTIVE} needs a terminal; use IfAvailable or Never"
            )
        if os.sep in command:
            # As kubectl does; a bare name is looked up in PATH.
            command = str(kubeconfig.parent.absolute() / command)
        return cls((command, *args), api_version, env, str(entry.get("installHint") or "").strip())

    async def get_credential(self) -> ExecCredential:
        """Run it.

        Raises:
            Unavailable: it could not be started, failed, took too long, or printed no token.
        """
        exec_info = {"apiVersion": self.api_version, "kind": "ExecCredential", "spec": {"interactive": False}}
        environment = {**os.environ, **self.env, "KUBERNETES_EXEC_INFO": json.dumps(exec_info)}
        try:
            process = await asyncio.create_subprocess_exec(
                *self.argv,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise self._error(error.strerror or str(error), self.install_hint) from error
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                out, err = await process.communicate()
        except TimeoutError as error:
            raise self._error(f"no answer within {_TIMEOUT_S:g} s") from error
        finally:
            if process.returncode is None:
                # With what it started, which may hold its pipes open.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            stderr_text = err.decode(errors="replace").strip()[-_MAX_STDERR_CHARS:]
            raise self._error(f"exit status {process.returncode}", stderr_text or "nothing on its standard error")
        return self._parse_output(out)

    def _parse_output(self, out: bytes) -> ExecCredential:
        try:
            status = json.loads(out)["status"]
            expiration = status.get("expirationTimestamp")
            expires_at = _to_unix_time(expiration) if expiration else float("inf")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._error("what it prints is no ExecCredential with a status", repr(error)) from error
        token = status.get("token")
        if not token or not isinstance(token, str):
            status_keys = ", ".join(sorted(status)) or "nothing"
            raise self._error("it gave no token", f"its status has {status_keys}; client certificates are not used")
        return ExecCredential(token, expires_at)

    def _error(self, reason: str, details: str = "") -> Unavailable:
        suffix = f": {details}" if details else ""
        return Unavailable(f"kubeconfig: {self.argv[0]} gave no credential: {reason}{suffix}; run it by hand")


def _to_unix_time(timestamp: str) -> float:
    moment = datetime.fromisoformat(timestamp)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
