# SPDX-License-Identifier: Apache-2.0
"""Loads and unloads the models of --model-repository, and tracks their states. The server runs these models in addition
to Quire's models.

The module is level-triggered: after each change of a process or an adapter, `run` compares the models that are loaded
with the models that must be loaded. A model is loaded by its name only. The server sees only links to the folders of
the models. A model has no link if Quire uses its name. If a model fails to load, the other models do not wait for it. A
model that has failed is loaded again only if the server restarts, or if a client requests this through the admin port.
An ensemble can fail because the model of an adapter is missing. Therefore an ensemble that has failed is loaded again
after each change.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

from quire_server.adapters.manager import READINESS_GATE_S
from quire_server.clients.handles import ProcessHandles, ServerHandle
from quire_server.supervisor.managed_process import RestartBackoff
from quire_spec import constants
from quire_spec.documents.model_repository import CONFIG_FILE, find_other_models
from quire_spec.documents.pod_status import OtherModelState, OtherModelStatus
from quire_spec.errors import ConfigError, InvalidArgument, NotFound, QuireError, truncated_repr
from quire_spec.protocol.client import ConnectionLost

logger = logging.getLogger(__name__)

_MAX_LOADS = 6
"""Maximum concurrent loads. The server starts a process for each load. More processes at the same time would only
compete for the CPU."""
_FAILURES = (InvalidArgument, NotFound)


class OtherModels:
    """The models of one repository folder. All methods except `run` can be used only while `run` is running."""

    def __init__(
        self,
        folder: Path | None,
        links: Path,
        handles: ProcessHandles,
        own_names: Callable[[], Set[str]],
        own_folder: Path | None = None,
    ) -> None:
        """Find the models in `folder`; `run` loads all of them. If `folder` is None, there are no models.

        Args:
            links: folder for links to the models. This method creates it, and the server loads the models from it.
            own_names: function that returns the names of the base model and of the adapters.
            own_folder: folder of the model that Quire serves itself, if this folder is in `folder`.

        Raises:
            ConfigError: see `find_other_models`.
        """
        self._folder, self._links, self._own_folder = folder, links, own_folder
        self._handles, self._own_names = handles, own_names
        self._server: ServerHandle | None = None
        self._statuses: dict[str, OtherModelStatus] = {}
        self._ensembles: dict[str, frozenset[str]] = {}
        """Maps each ensemble to the names of the models that it calls."""
        self._desired: set[str] = set()
        self._gating: set[str] = set()
        self._gate_deadline = 0.0
        self._changed = asyncio.Event()
        self._backoffs: dict[str, RestartBackoff] = {}
        self._ready_at: dict[str, float] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Function that is called when the state of a model changes."""
        if folder is not None:
            links.mkdir(parents=True, exist_ok=True)
            for name in find_other_models(folder, own_names(), own_folder):
                self._link(name)
                self._desired.add(name)
                self._statuses[name] = OtherModelStatus(name, OtherModelState.LOADING)

    # State

    @property
    def names(self) -> Set[str]:
        """The names of the repository's models. An adapter cannot have one of these names."""
        return self._statuses.keys()

    def statuses(self) -> list[OtherModelStatus]:
        """Return the state of each model, sorted by name."""
        return [self._statuses[name] for name in sorted(self._statuses)]

    def is_loading(self) -> bool:
        """Return True while a model is loading. If a stub dies while its model is loading, the supervisor may not know
        yet which model the stub belongs to."""
        return any(status.state is OtherModelState.LOADING for status in self._statuses.values())

    def gating(self) -> list[str]:
        """Return the models that delay readiness. These are the models that have been loading since the server
        started."""
        if self._server is not self._handles.server:
            return sorted(self._desired)
        return sorted(self._gating) if asyncio.get_running_loop().time() < self._gate_deadline else []

    def readiness(self, own: Mapping[str, bool]) -> dict[str, bool]:
        """Return a mapping that shows for each model of the repository whether it can respond. `own` shows the same for
        Quire's own models. An ensemble can respond if all models that it calls can respond."""
        loaded = {name: status.state is OtherModelState.READY for name, status in self._statuses.items()}
        return {
            name: is_loaded and all(own.get(part, loaded.get(part, True)) for part in self._ensembles.get(name, ()))
            for name, is_loaded in loaded.items()
        }

    # Reconciliation

    def resync(self) -> None:
        """Make `run` compare the loaded models with the desired models again."""
        self._changed.set()

    async def run(self) -> None:
        """Keep the models loaded until this task is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._server is not self._handles.server:
                self._on_server_change(self._handles.server)
            if self._server is not None and self._desired:
                with contextlib.suppress(ConnectionLost):
                    await self._reconcile(self._server)

    def _on_server_change(self, server: ServerHandle | None) -> None:
        self._server = server
        self._gating = set(self._desired)
        self._gate_deadline = asyncio.get_running_loop().time() + READINESS_GATE_S
        for name in self._desired:
            self._set_state(name, OtherModelState.LOADING)

    async def _reconcile(self, server: ServerHandle) -> None:
        loaded = {entry["name"] for entry in await server.repository_index() if entry.get("state") == "READY"}
        missing = {name for name in self._desired - loaded if self._statuses[name].state is not OtherModelState.FAILED}
        semaphore = asyncio.Semaphore(_MAX_LOADS)

        async def load(name: str) -> None:
            async with semaphore:
                with contextlib.suppress(*_FAILURES):
                    await self._load(server, name)

        # Load the ensembles last. When the server loads an ensemble, it also loads the models that the ensemble calls.
        # If one of them was already being loaded, the two loads would collide.
        await asyncio.gather(*map(load, sorted(missing - self._ensembles.keys())))
        for name in sorted(self._ensembles.keys() & (self._desired - loaded)):
            await load(name)

    async def _load(self, server: ServerHandle, name: str) -> None:
        """Load or reload a model. Raises InvalidArgument if the server rejects the model, and ConnectionLost if the
        server has ended."""
        try:
            await server.load_other_model(name)
        except QuireError as error:
            if isinstance(error, ConnectionLost) and server is not self._handles.server:
                raise
            if self._statuses[name].error != str(error):
                logger.error("model failed to load model=%s error=%s", name, error)
            self._set_state(name, OtherModelState.FAILED, str(error))
            raise InvalidArgument(f"model {name!r}: {error}") from error
        self._ready_at[name] = asyncio.get_running_loop().time()
        self._set_state(name, OtherModelState.READY)

    async def reload_dead(self, name: str) -> None:
        """Reload a model after one of its stubs died. The server itself has already ended the requests of this model
        with an error."""
        if name not in self._desired or (server := self._handles.server) is None:
            return
        self._set_state(name, OtherModelState.LOADING)
        uptime_s = asyncio.get_running_loop().time() - self._ready_at.get(name, 0.0)
        delay_s = self._backoffs.setdefault(name, RestartBackoff()).delay_s(uptime_s)
        logger.warning("stub died, reloading its model model=%s reload_in_s=%g", name, delay_s)
        await asyncio.sleep(delay_s)
        with contextlib.suppress(ConnectionLost, *_FAILURES):
            if name in self._desired:
                await server.unload_other_model(name)
                await self._load(server, name)
        # When the server unloads a model, it also unloads the ensembles that call the model. They must be loaded again.
        self.resync()

    def _set_state(self, name: str, state: OtherModelState, error: str = "") -> None:
        status = OtherModelStatus(name, state, error)
        if self._statuses.get(name) != status:
            self._statuses[name] = status
            if state is not OtherModelState.LOADING:
                self._gating.discard(name)
            self.on_change()

    # Admin port

    async def index(self) -> list[dict[str, str]]:
        """Return the name, version, state and reason of every model of the server. A model that was never loaded has
        only a name. Raises ConnectionLost if the server is not running."""
        index = await self._require_server().repository_index()
        known = {entry["name"] for entry in index}
        return index + [{"name": name} for name in self._found() if name not in known]

    async def load(self, name: str) -> None:
        """Load a model by name, or reload it if its files have changed.

        Raises:
            InvalidArgument: the name belongs to a model of Quire, or the server rejects the model.
            NotFound: the repository has no such model.
            ConnectionLost: the server is not running.
        """
        server = self._require_server()
        self._require_free(name)
        if name not in self._found():
            raise NotFound(f"model {truncated_repr(name)}: not a model of the repository {str(self._folder)!r}")
        self._link(name)
        self._desired.add(name)
        if name not in self._statuses:
            self._set_state(name, OtherModelState.LOADING)
        await self._load(server, name)
        self.resync()

    async def unload(self, name: str) -> None:
        """Unload a model by name. It stays unloaded until it is loaded by name, or until the supervisor restarts.

        Raises:
            InvalidArgument: the name belongs to a model of Quire, or an ensemble calls the model.
            NotFound: the model was never loaded.
            ConnectionLost: the server is not running.
        """
        server = self._require_server()
        self._require_free(name)
        if name not in self._statuses:
            raise NotFound(f"model {truncated_repr(name)}: was never loaded; GET /v2/repository/index lists the names")
        users = sorted(e for e, models in self._ensembles.items() if name in models and e in self._desired)
        if users:
            raise InvalidArgument(f"model {name!r}: the ensemble {users[0]!r} calls it; unload the ensemble first")
        self._desired.discard(name)
        await server.unload_other_model(name)
        self._set_state(name, OtherModelState.UNLOADED)

    def _require_server(self) -> ServerHandle:
        if self._handles.server is None:
            raise ConnectionLost("server: not running; try again")
        return self._handles.server

    def _require_free(self, name: str) -> None:
        if name in self._own_names():
            raise InvalidArgument(
                f"model {name!r}: is the base model or an adapter; PUT /adapters changes the adapters of this pod"
            )
        if self._folder is None:
            raise NotFound(f"model {truncated_repr(name)}: the service has no model repository; set --model-repository")
        constants.check_model_name(name, "model")

    def _found(self) -> tuple[str, ...]:
        """Return the models that are in the folder now, without the model that Quire serves itself."""
        if self._folder is None:
            return ()
        try:
            return find_other_models(self._folder, frozenset(), self._own_folder)
        except ConfigError as error:
            logger.error("model repository cannot be read error=%s", error)
            return ()

    def _link(self, name: str) -> None:
        assert self._folder is not None, "only models of the folder are linked"
        link = self._links / name
        link.unlink(missing_ok=True)
        link.symlink_to((self._folder / name).absolute())
        self._ensembles.pop(name, None)
        if parts := _read_ensemble(link / CONFIG_FILE):
            self._ensembles[name] = parts


def _read_ensemble(config_file: Path) -> frozenset[str]:
    """Return the names of the models that an ensemble calls. The result is empty if the model is not an ensemble, or if
    its configuration file is invalid."""
    # Imported here because the import takes 0.2 s, and most services have no other models.
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    config: Any = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(config_file.read_text(), config)
    except (OSError, UnicodeDecodeError, text_format.ParseError):
        return frozenset()
    return frozenset(step.model_name for step in config.ensemble_scheduling.step)
