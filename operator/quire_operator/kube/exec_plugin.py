# SPDX-License-Identifier: Apache-2.0
"""Exec plugin of a kubeconfig (client-go credential plugin): a program that prints a token.

Only tokens are supported; a plugin that returns a client certificate is rejected.
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


@dataclass(frozen=True, slots=True)
class ExecCredential:
    """A token from a plugin."""

    token: str
    expires_at: float
    """Unix time at which the token expires; infinite if the plugin does not return a time."""


@dataclass(frozen=True, slots=True)
class ExecPlugin:
    """A kubeconfig's exec entry."""

    argv: tuple[str, ...]
    api_version: str
    """apiVersion of the ExecCredential that the plugin reads and prints."""
    env: Mapping[str, str]
    """The plugin gets these environment variables in addition to those of the operator."""
    install_hint: str
    """The kubeconfig's explanation of how to install the plugin; often empty."""

    @classmethod
    def from_kubeconfig(cls, entry: Any, kubeconfig: Path) -> Self:
        """Parse the exec entry of a kubeconfig's user.

        Raises:
            ConfigError: a field is missing, or the plugin needs a terminal.
        """
        location = f"kubeconfig {kubeconfig}: users[].user.exec"
        try:
            command, api_version = entry["command"], entry["apiVersion"]
            env = {str(pair["name"]): str(pair["value"]) for pair in entry.get("env") or ()}
            args = [str(arg) for arg in entry.get("args") or ()]
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{location}: {error!r}; the entry must contain command and apiVersion") from error
        if entry.get("interactiveMode") == "Always":
            raise ConfigError(
                f"{location}.interactiveMode: Always needs a terminal, but none exists here; use IfAvailable or Never"
            )
        if os.sep in command:
            # As in kubectl, a path is relative to the folder of the kubeconfig. A name without a slash is searched in
            # PATH.
            command = str(kubeconfig.parent.absolute() / command)
        return cls((command, *args), api_version, env, str(entry.get("installHint") or "").strip())

    async def get_credential(self) -> ExecCredential:
        """Run the plugin.

        Raises:
            Unavailable: the plugin did not start, failed, took too long, or printed no token.
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
                # Kill the whole process group, because a child of the plugin may keep the pipes open.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            stderr_text = err.decode(errors="replace").strip()[-_MAX_STDERR_CHARS:]
            raise self._error(f"exit status {process.returncode}", stderr_text or "no output on standard error")
        return self._parse_output(out)

    def _parse_output(self, out: bytes) -> ExecCredential:
        try:
            status = json.loads(out)["status"]
            expiration = status.get("expirationTimestamp")
            expires_at = _to_unix_time(expiration) if expiration else float("inf")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._error("its output is not an ExecCredential with a status", repr(error)) from error
        token = status.get("token")
        if not token or not isinstance(token, str):
            keys = ", ".join(sorted(status)) or "nothing"
            raise self._error(
                "no token in its output", f"its status contains {keys}; client certificates are not supported"
            )
        return ExecCredential(token, expires_at)

    def _error(self, reason: str, details: str = "") -> Unavailable:
        suffix = f": {details}" if details else ""
        return Unavailable(f"kubeconfig: {self.argv[0]} returned no credential: {reason}{suffix}; run it by hand")


def _to_unix_time(timestamp: str) -> float:
    moment = datetime.fromisoformat(timestamp)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
