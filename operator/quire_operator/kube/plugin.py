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
_MAX_WORDS = 200
_INPUT_NEEDED = "Always"
"""An interactiveMode that a program without a terminal cannot serve."""


@dataclass(frozen=True, slots=True)
class Credential:
    """What a plugin gave."""

    token: str
    ends_at: float
    """Seconds since 1970; infinite: it does not say."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A kubeconfig's exec entry."""

    argv: tuple[str, ...]
    version: str
    """apiVersion of the ExecCredential that it reads and prints."""
    env: Mapping[str, str]
    """Added to our own."""
    hint: str
    """How to install it, in the kubeconfig's words; mostly empty."""

    @classmethod
    def read(cls, entry: Any, kubeconfig: Path) -> Self:
        """The plugin that a user of this kubeconfig has.

        Raises:
            ConfigError: something is missing, or it wants a person to type.
        """
        where = f"kubeconfig {kubeconfig}: users[].user.exec"
        try:
            command, version = entry["command"], entry["apiVersion"]
            env = {str(pair["name"]): str(pair["value"]) for pair in entry.get("env") or ()}
            args = [str(arg) for arg in entry.get("args") or ()]
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{where}: {error!r}; it needs command and apiVersion") from error
        if entry.get("interactiveMode") == _INPUT_NEEDED:
            raise ConfigError(f"{where}.interactiveMode: {_INPUT_NEEDED} needs a terminal; use IfAvailable or Never")
        if os.sep in command:
            # As kubectl does; a bare name is looked up in PATH.
            command = str(kubeconfig.parent.absolute() / command)
        return cls((command, *args), version, env, str(entry.get("installHint") or "").strip())

    async def credential(self) -> Credential:
        """Run it.

        Raises:
            Unavailable: it could not be started, failed, took too long, or printed no token.
        """
        asked = {"apiVersion": self.version, "kind": "ExecCredential", "spec": {"interactive": False}}
        environment = {**os.environ, **self.env, "KUBERNETES_EXEC_INFO": json.dumps(asked)}
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
            raise self._failed(error.strerror or str(error), self.hint) from error
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                out, err = await process.communicate()
        except TimeoutError as error:
            raise self._failed(f"no answer within {_TIMEOUT_S:g} s") from error
        finally:
            if process.returncode is None:
                # With what it started, which may hold its pipes open.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            said = err.decode(errors="replace").strip()[-_MAX_WORDS:]
            raise self._failed(f"exit status {process.returncode}", said or "nothing on its standard error")
        return self._read(out)

    def _read(self, out: bytes) -> Credential:
        try:
            status = json.loads(out)["status"]
            ends = status.get("expirationTimestamp")
            ends_at = _seconds(ends) if ends else float("inf")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._failed("what it prints is no ExecCredential with a status", repr(error)) from error
        token = status.get("token")
        if not token or not isinstance(token, str):
            given = ", ".join(sorted(status)) or "nothing"
            raise self._failed("it gave no token", f"its status has {given}; client certificates are not used")
        return Credential(token, ends_at)

    def _failed(self, what: str, words: str = "") -> Unavailable:
        said = f": {words}" if words else ""
        return Unavailable(f"kubeconfig: {self.argv[0]} gave no credential: {what}{said}; run it by hand")


def _seconds(timestamp: str) -> float:
    found = datetime.fromisoformat(timestamp)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
