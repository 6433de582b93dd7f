# SPDX-License-Identifier: Apache-2.0
"""`quire operate`: runs the operator as a process. Called by cli/main.py; kopf owns the event loop."""

import argparse
import asyncio
import logging
import os

from quire_operator.api.spec_defaults import SpecDefaults
from quire_operator.controller import log_config
from quire_operator.controller.controller import ControllerSettings
from quire_operator.controller.operator_process import OperatorOptions, default_identity
from quire_operator.kube.cluster_config import ClusterConfig
from quire_sources.http.borders import Borders
from quire_spec.errors import ConfigError
from quire_spec.net.addresses import format_for_url, listen_address

logger = logging.getLogger(__name__)

_LIVENESS_PATH = "/health/live"


def run(args: argparse.Namespace) -> int:
    """Reconcile LLMServices until SIGTERM or SIGINT; return the exit status."""
    try:
        # Imported here: people who only plan need not have it.
        from quire_operator.controller import kopf_handlers
    except ImportError as error:
        raise ConfigError(f"quire operate needs {error.name}; pip install 'quire-llm[operator]'") from error
    log_config.configure(args.log_format, args.log_level)
    cluster_config = ClusterConfig.from_environment(args.kubeconfig, args.context)
    options = OperatorOptions(
        cluster_config=cluster_config,
        settings=ControllerSettings(
            namespaces=tuple(args.namespaces),
            workers=args.workers,
            identity=args.identity or default_identity(cluster_config),
            images={"GPU": args.gpu_image, "CPU": args.cpu_image},
            borders=Borders() if args.source_networks is None else Borders.parse(args.source_networks),
            defaults=SpecDefaults.read(args.defaults),
            resync_s=args.resync,
        ),
        host=args.host,
        port=args.port,
    )
    host = format_for_url(listen_address(args.host, os.environ))
    liveness_endpoint = f"http://{host}:{args.liveness_port}{_LIVENESS_PATH}" if args.liveness_port else None
    try:
        asyncio.run(kopf_handlers.run_operator(options, liveness_endpoint=liveness_endpoint))
    except Exception as error:
        # If our start-up handler fails, kopf raises an ActivityError. Its cause is the error of the handler.
        logger.error("operator ended error=%s", error.__cause__ or error)
        return 1
    return 0
