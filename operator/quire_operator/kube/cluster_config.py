# SPDX-License-Identifier: Apache-2.0
"""Address and credentials of the API server, from a kubeconfig or from the ServiceAccount of this pod.

A kubeconfig can contain a client certificate, token, token file, password or exec plugin. Kubernetes 1.26 removed
auth-provider plugins. The operator does not use kubernetes.config of the official client: that module runs plugins in
the calling thread, without a timeout, and hides their errors. The official client would also need 46 MB of memory, and
it would make the image 126 MB larger.
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

from quire_operator.kube.exec_plugin import ExecCredential, ExecPlugin
from quire_spec.errors import ConfigError, Unavailable
from quire_spec.net.addresses import format_for_url

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_REREAD_S = 60
"""A token file is read again after this number of seconds. The kubelet writes a new token long before the old one
expires."""
_EXPIRY_MARGIN_S = 60
"""If a token expires in less than this number of seconds, the operator requests a new one from the plugin."""


@dataclass(slots=True)
class ClusterConfig:
    """Address and credentials of one API server."""

    server: str
    """URL without a trailing slash."""
    ssl_context: ssl.SSLContext | None
    """TLS settings; None for plain HTTP."""
    namespace: str = "default"
    """Namespace of the kubeconfig's context, or of this pod."""
    static_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers with the token or the password from the kubeconfig. They never change."""
    token_file: Path | None = None
    exec_plugin: ExecPlugin | None = field(default=None, repr=False)
    """The plugin that the kubeconfig's exec entry describes."""
    tls_server_name: str | None = None
    """The server's certificate must be valid for this name (tls-server-name). If it is None, the certificate must be
    valid for the host in the URL."""
    proxy_url: str | None = field(default=None, repr=False)
    """URL of the proxy to the server (proxy-url); it can contain a password."""
    _token: str = field(default="", repr=False)
    _token_read_at: float = field(default=float("-inf"), repr=False)
    _token_expires_at: float = field(default=float("inf"), repr=False)
    _plugin_task: "asyncio.Task[ExecCredential] | None" = field(default=None, init=False, repr=False, compare=False)
    """The task that runs the plugin now. All requests that wait for a token share its result."""

    async def auth_headers(self) -> Mapping[str, str]:
        """Return the headers that authenticate a request.

        Raises:
            Unavailable: no valid token is available now.
        """
        if self.token_file is not None:
            if time.monotonic() - self._token_read_at > _TOKEN_REREAD_S:
                self._token, self._token_read_at = _read_token(self.token_file), time.monotonic()
        elif self.exec_plugin is not None:
            if not self._token or time.time() > self._token_expires_at - _EXPIRY_MARGIN_S:
                credential = await self._get_credential(self.exec_plugin)
                self._token, self._token_expires_at = credential.token, credential.expires_at
        else:
            return self.static_headers
        return {"Authorization": f"Bearer {self._token}"}

    def invalidate_token(self, rejected_headers: Mapping[str, str] | None = None) -> None:
        """Drop the token in `rejected_headers`, so that the next request gets a new token.

        If a concurrent request has already received a newer token, that token is kept. None drops any token.
        """
        if rejected_headers is None or rejected_headers.get("Authorization") == f"Bearer {self._token}":
            self._token, self._token_read_at, self._token_expires_at = "", float("-inf"), float("-inf")

    async def _get_credential(self, exec_plugin: ExecPlugin) -> ExecCredential:
        """Run the plugin and return its token. Concurrent requests share one run of the plugin, and also its error if
        it fails."""
        if self._plugin_task is None:
            self._plugin_task = asyncio.create_task(exec_plugin.get_credential(), name="exec plugin")
            self._plugin_task.add_done_callback(self._on_plugin_done)
        return await asyncio.shield(self._plugin_task)

    def _on_plugin_done(self, task: "asyncio.Task[ExecCredential]") -> None:
        self._plugin_task = None
        if not task.cancelled():
            task.exception()  # Without this, asyncio would log an error if all waiting requests were cancelled.

    @classmethod
    def from_environment(cls, kubeconfig: str | None = None, context: str | None = None) -> "ClusterConfig":
        """Read the configuration from the first of these sources that exists: the file `kubeconfig`, the file in the
        variable KUBECONFIG, the ServiceAccount of this pod, and ~/.kube/config.

        Raises: ConfigError: none of these sources exists, or the first existing source is invalid.
        """
        kubeconfig_path = kubeconfig or os.environ.get("KUBECONFIG", "").partition(os.pathsep)[0]
        if kubeconfig_path:
            return cls.from_kubeconfig(Path(kubeconfig_path).expanduser(), context)
        if "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT_DIR / "token").exists():
            return cls.from_pod()
        default_path = Path("~/.kube/config").expanduser()
        if default_path.exists():
            return cls.from_kubeconfig(default_path, context)
        raise ConfigError("no cluster: give --kubeconfig FILE, set KUBECONFIG, or run in a pod with a ServiceAccount")

    @classmethod
    def from_pod(cls) -> "ClusterConfig":
        """Read the ServiceAccount files that are mounted into this pod."""
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        server = f"https://{format_for_url(host)}:{port}"
        ssl_context = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT_DIR / "ca.crt"))
        namespace = (SERVICE_ACCOUNT_DIR / "namespace").read_text().strip()
        return cls(server, ssl_context, namespace, token_file=SERVICE_ACCOUNT_DIR / "token")

    @classmethod
    def from_kubeconfig(cls, path: Path, context: str | None = None) -> "ClusterConfig":
        """Read one context of a kubeconfig. By default, this is the current context.

        Raises:
            ConfigError: the file cannot be read, or lacks an entry that the context names.
        """
        if not path.exists():
            raise ConfigError(f"kubeconfig {path}: does not exist; give another with --kubeconfig")
        try:
            config = yaml.load(path.read_text(), yaml.CSafeLoader)
            name = context or config["current-context"]
            context_entry = _named_entry(config, "contexts", "context", name)
            cluster = _named_entry(config, "clusters", "cluster", context_entry["cluster"])
            user = _named_entry(config, "users", "user", context_entry["user"])
            server = cluster["server"].rstrip("/")
            ssl_context = _build_ssl_context(cluster, user, path.parent) if server.startswith("https://") else None
            proxy_url = _check_proxy_url(cluster.get("proxy-url"))
        # The ssl module raises OSErrors, and the base64 module raises ValueErrors.
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"kubeconfig {path}: {error!r}; see kubectl config view --kubeconfig {path}") from error
        return cls(
            server,
            ssl_context,
            context_entry.get("namespace", "default"),
            static_headers=_static_headers(user),
            token_file=path.parent / user["tokenFile"] if "tokenFile" in user else None,
            exec_plugin=ExecPlugin.from_kubeconfig(user["exec"], path) if user.get("exec") else None,
            tls_server_name=cluster.get("tls-server-name") or None,
            proxy_url=proxy_url,
        )


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise Unavailable(f"token file {path}: {error.strerror}") from error
    if not token:
        raise Unavailable(f"token file {path} is empty")
    return token


def _named_entry(config: Mapping[str, Any], section: str, field_name: str, name: str) -> Mapping[str, Any]:
    named_entry = next((entry[field_name] for entry in config[section] if entry["name"] == name), None)
    if named_entry is None:
        raise KeyError(f"no {field_name} named {name}")
    return named_entry or {}


def _static_headers(user: Mapping[str, Any]) -> dict[str, str]:
    if "token" in user:
        return {"Authorization": f"Bearer {user['token']}"}
    if "username" in user:
        encoded = base64.b64encode(f"{user['username']}:{user.get('password', '')}".encode()).decode()
        return {"Authorization": f"Basic {encoded}"}
    return {}


def _check_proxy_url(url: str | None) -> str | None:
    if url and not str(url).startswith(("http://", "https://")):
        # The message does not contain the URL, which may contain a password.
        raise ValueError("proxy-url is not http(s)://host:port; other proxies are not supported")
    return url or None


def _build_ssl_context(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
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
        with tempfile.NamedTemporaryFile("wb") as cert_file:
            cert_file.write(base64.b64decode(user["client-certificate-data"]) + b"\n")
            cert_file.write(base64.b64decode(user["client-key-data"]))
            cert_file.flush()
            context.load_cert_chain(cert_file.name)
    return context
