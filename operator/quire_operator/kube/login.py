# SPDX-License-Identifier: Apache-2.0
"""Login: which API server, and who we are there: from a kubeconfig, or from the ServiceAccount of our own pod.

Small on purpose: the official client would be most of the operator's memory. A kubeconfig's client certificate, token,
token file, password and exec plugin are known; its auth-provider plugins went out of Kubernetes in 1.26.
"""

import asyncio
import base64
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from quire_operator.kube.plugin import Credential, Plugin
from quire_spec.errors import ConfigError, Unavailable
from quire_spec.net.addresses import format_for_url

ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_FILE_S = 60
"""Age at which a token file is read again; the kubelet writes a new one long before the old one ends."""
_BEFORE_END_S = 60
"""How long before its end a plugin's token is replaced."""


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
    plugin: Plugin | None = field(default=None, repr=False)
    """A kubeconfig's exec entry."""
    server_name: str | None = None
    """That the server's certificate has to name, where that is not the URL's host (tls-server-name)."""
    proxy: str | None = field(default=None, repr=False)
    """URL of the proxy that leads to the server (proxy-url); may hold its password."""
    _token: str = field(default="", repr=False)
    _read_at: float = field(default=float("-inf"), repr=False)
    _ends_at: float = field(default=float("inf"), repr=False)
    _run: "asyncio.Task[Credential] | None" = field(default=None, init=False, repr=False, compare=False)
    """The plugin that is running; a copy in another event loop has its own."""

    async def headers(self) -> Mapping[str, str]:
        """The headers of a request, with a token that holds.

        Raises:
            Unavailable: the token cannot be had now.
        """
        if self.token_file is not None:
            if time.monotonic() - self._read_at > _TOKEN_FILE_S:
                self._token, self._read_at = _read_token(self.token_file), time.monotonic()
        elif self.plugin is not None:
            if not self._token or time.time() > self._ends_at - _BEFORE_END_S:
                credential = await self._credential(self.plugin)
                self._token, self._ends_at = credential.token, credential.ends_at
        else:
            return self.fixed
        return {"Authorization": f"Bearer {self._token}"}

    def forget(self, refused: Mapping[str, str] | None = None) -> None:
        """Get the token anew for the next request, since the API server does not take the one of these headers.

        Where another one is here by now, which a request beside this one got, that stays. None: whichever it is.
        """
        if refused is None or refused.get("Authorization") == f"Bearer {self._token}":
            self._token, self._read_at, self._ends_at = "", float("-inf"), float("-inf")

    async def _credential(self, plugin: Plugin) -> Credential:
        """What the plugin gives; requests come by the dozen, and one run, or its failure, is for all that wait."""
        if self._run is None:
            self._run = asyncio.create_task(plugin.credential(), name="exec plugin")
            self._run.add_done_callback(self._ran)
        return await asyncio.shield(self._run)

    def _ran(self, run: "asyncio.Task[Credential]") -> None:
        self._run = None
        if not run.cancelled():
            run.exception()  # whoever waited may have given up

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
    def from_pod(cls) -> "Login":
        """The ServiceAccount that is mounted into our pod."""
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        server = f"https://{format_for_url(host)}:{port}"
        tls = ssl.create_default_context(cafile=str(ACCOUNT_DIR / "ca.crt"))
        return cls(server, tls, (ACCOUNT_DIR / "namespace").read_text().strip(), token_file=ACCOUNT_DIR / "token")

    @classmethod
    def from_kubeconfig(cls, path: Path, context: str | None = None) -> "Login":
        """A context of a kubeconfig, the current one by default.

        Raises:
            ConfigError: the file cannot be read, or lacks what the context names.
        """
        if not path.exists():
            raise ConfigError(f"kubeconfig {path}: does not exist; give another with --kubeconfig")
        try:
            config = yaml.load(path.read_text(), yaml.CSafeLoader)
            name = context or config["current-context"]
            chosen = _named(config, "contexts", "context", name)
            cluster = _named(config, "clusters", "cluster", chosen["cluster"])
            user = _named(config, "users", "user", chosen["user"])
            server = cluster["server"].rstrip("/")
            tls = _tls(cluster, user, path.parent) if server.startswith("https://") else None
            proxy = _proxy(cluster.get("proxy-url"))
        # ssl's errors are OSErrors, and those of base64 ValueErrors.
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"kubeconfig {path}: {error!r}; see kubectl config view --kubeconfig {path}") from error
        return cls(
            server,
            tls,
            chosen.get("namespace", "default"),
            fixed=_fixed_headers(user),
            token_file=path.parent / user["tokenFile"] if "tokenFile" in user else None,
            plugin=Plugin.read(user["exec"], path) if user.get("exec") else None,
            server_name=cluster.get("tls-server-name") or None,
            proxy=proxy,
        )


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise Unavailable(f"token file {path}: {error.strerror}") from error
    if not token:
        raise Unavailable(f"token file {path}: is empty")
    return token


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


def _proxy(url: str | None) -> str | None:
    if url and not str(url).startswith(("http://", "https://")):
        # Not quoted: there may be a password in it.
        raise ValueError("proxy-url is not http(s)://host:port, and other proxies are not known here")
    return url or None


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
