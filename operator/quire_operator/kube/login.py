# SPDX-License-Identifier: Apache-2.0
"""Login: which API server, and who we are there: from a kubeconfig, or from the ServiceAccount of our own pod.

Small on purpose: the official client would be most of the operator's memory. A kubeconfig's client certificate, token,
token file, password and exec plugin are known; its auth-provider plugins went out of Kubernetes in 1.26.
"""

import asyncio
import base64
import json
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from quire_spec.errors import ConfigError, Unavailable

ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_FILE_S = 60
"""Age at which a token file is read again; the kubelet writes a new one long before the old one ends."""
_EXEC_TIMEOUT_S = 60


@dataclass(slots=True)
class Login:
    """Where the API server is, and how to be let in."""

    server: str
    """URL without a slash at its end."""
    tls: ssl.SSLContext | None
    """None for plain HTTP."""
    namespace: str = "default"
    """Of the kubeconfig's context, or of our pod."""
    fixed: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers that never change: a token or a password of the kubeconfig."""
    token_file: Path | None = None
    plugin: Mapping[str, Any] | None = field(default=None, repr=False)
    """A kubeconfig's exec entry."""
    _token: str = field(default="", repr=False)
    _read_at: float = field(default=float("-inf"), repr=False)
    _ends_at: float = field(default=float("inf"), repr=False)

    async def headers(self) -> Mapping[str, str]:
        """The headers of a request, with a token that holds.

        Raises:
            ConfigError, Unavailable: the token cannot be had.
        """
        if self.token_file is None and self.plugin is None:
            return self.fixed
        now = time.monotonic()
        if self.token_file is not None and now - self._read_at > _TOKEN_FILE_S:
            self._token, self._read_at = self.token_file.read_text().strip(), now
        if self.plugin is not None and (not self._token or time.time() > self._ends_at - _TOKEN_FILE_S):
            self._token, self._ends_at = await _run_plugin(self.plugin)
        return {"Authorization": f"Bearer {self._token}"}

    def forget(self) -> None:
        """Get the token anew for the next request: the API server does not take this one."""
        self._token, self._read_at, self._ends_at = "", float("-inf"), float("-inf")

    @classmethod
    def find(cls, kubeconfig: str | None = None, context: str | None = None) -> "Login":
        """The kubeconfig that is named, else that of KUBECONFIG, else our pod's, else ~/.kube/config.

        Raises:
            ConfigError: there is none, or it cannot be used.
        """
        named = kubeconfig or os.environ.get("KUBECONFIG", "").partition(os.pathsep)[0]
        if named:
            return cls.from_kubeconfig(Path(named).expanduser(), context)
        if "KUBERNETES_SERVICE_HOST" in os.environ and (ACCOUNT_DIR / "token").exists():
            return cls.from_pod()
        home = Path("~/.kube/config").expanduser()
        if home.exists():
            return cls.from_kubeconfig(home, context)
        raise ConfigError("no cluster: give --kubeconfig FILE, set KUBECONFIG, or run in a pod with a ServiceAccount")

    @classmethod
    def from_pod(cls, folder: Path = ACCOUNT_DIR) -> "Login":
        """The ServiceAccount that is mounted into our pod."""
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        return cls(server, tls, (folder / "namespace").read_text().strip(), token_file=folder / "token")

    @classmethod
    def from_kubeconfig(cls, path: Path, context: str | None = None) -> "Login":
        """A context of a kubeconfig, the current one by default.

        Raises:
            ConfigError: the file cannot be read, or lacks what the context names.
        """
        try:
            config = yaml.load(path.read_text(), yaml.CSafeLoader)
            name = context or config["current-context"]
            chosen = _named(config, "contexts", "context", name)
            cluster = _named(config, "clusters", "cluster", chosen["cluster"])
            user = _named(config, "users", "user", chosen["user"])
            server = cluster["server"].rstrip("/")
        except (OSError, yaml.YAMLError, KeyError, TypeError, StopIteration) as error:
            raise ConfigError(f"kubeconfig {path}: {error!r}; see kubectl config view --kubeconfig {path}") from error
        tls = _tls(cluster, user, path.parent) if server.startswith("https://") else None
        return cls(
            server,
            tls,
            chosen.get("namespace", "default"),
            fixed=_fixed_headers(user),
            token_file=path.parent / user["tokenFile"] if "tokenFile" in user else None,
            plugin=user.get("exec"),
        )


def _named(config: Mapping[str, Any], section: str, field_name: str, name: str) -> Mapping[str, Any]:
    found = next((entry[field_name] for entry in config[section] if entry["name"] == name), None)
    if found is None:
        raise KeyError(f"no {field_name} named {name}")
    return found or {}


def _fixed_headers(user: Mapping[str, Any]) -> dict[str, str]:
    if "token" in user:
        return {"Authorization": f"Bearer {user['token']}"}
    if "username" in user:
        pair = base64.b64encode(f"{user['username']}:{user.get('password', '')}".encode()).decode()
        return {"Authorization": f"Basic {pair}"}
    return {}


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    data = cluster.get("certificate-authority-data")
    file = cluster.get("certificate-authority")
    context = ssl.create_default_context(
        cafile=str(folder / file) if file else None, cadata=base64.b64decode(data).decode() if data else None
    )
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if "client-certificate" in user:
        context.load_cert_chain(folder / user["client-certificate"], folder / user["client-key"])
    elif "client-certificate-data" in user:
        # The ssl module reads certificates from files only.
        with tempfile.NamedTemporaryFile("wb") as pair:
            pair.write(base64.b64decode(user["client-certificate-data"]) + b"\n")
            pair.write(base64.b64decode(user["client-key-data"]))
            pair.flush()
            context.load_cert_chain(pair.name)
    return context


async def _run_plugin(plugin: Mapping[str, Any]) -> tuple[str, float]:
    """Token and when it ends, from a program that prints an ExecCredential.

    Source: https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
    """
    asked = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
    extra = {entry["name"]: entry["value"] for entry in plugin.get("env") or ()}
    environment = {**os.environ, **extra, "KUBERNETES_EXEC_INFO": json.dumps(asked)}
    argv = [plugin["command"], *(plugin.get("args") or ())]
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(_EXEC_TIMEOUT_S):
            out, err = await process.communicate()
        status = json.loads(out)["status"] if process.returncode == 0 else {}
    except (OSError, TimeoutError, ValueError, KeyError) as error:
        raise Unavailable(f"kubeconfig: {argv[0]} gave no credential ({error!r}); run it by hand") from error
    if "token" not in status:
        said = err.decode(errors="replace").strip()[-200:]
        raise Unavailable(f"kubeconfig: {argv[0]} gave no token ({said or 'exit status'} {process.returncode})")
    ends = status.get("expirationTimestamp")
    return status["token"], _seconds(ends) if ends else float("inf")


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()
