# SPDX-License-Identifier: Apache-2.0
"""The text process: builds its components and runs them. `text/__main__.py` starts it.

    frontend --GenerateRequest--> TextServer         -> RequestManager -> CoreClient      --SequenceRequest--> core
             <--OutputDeltas----- FrontendConnection <- RequestManager <- ResultCoalescer <--StepResult-------

With data_parallel_size above 1, each core has a CoreClient and a ResultCoalescer, and a CorePool is between them and
the RequestManager.

Admission, tokenizing, detokenizing, stop strings and metrics run here, so that none of them delays a step of the
engine. The process has one event loop, and imports neither torch nor transformers.
"""

import asyncio
import gc
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_engine.images.support import why_no_images
from quire_engine.ipc import process
from quire_engine.requests.limits import RequestLimits
from quire_engine.requests.processor import RequestProcessor
from quire_engine.structured_outputs.checker import GrammarChecker
from quire_engine.text.adapter_finder import AdapterFinder
from quire_engine.text.admission.admission_controller import AdmissionController
from quire_engine.text.admission.api_key_access import ApiKeyAccess
from quire_engine.text.admission.kv_transfer_roles import KVTransferRoles
from quire_engine.text.chat_renderer import ChatRenderer
from quire_engine.text.cores.core_client import CoreClient
from quire_engine.text.cores.core_metrics import CoreMetrics
from quire_engine.text.cores.core_pool import CorePool, PoolMember
from quire_engine.text.images.image_reader import ImageReader
from quire_engine.text.methods import TextMethods
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.request_manager import RequestManager
from quire_engine.text.result_coalescer import RESPONSES_PER_S_PER_CORE, ResponseThrottle, ResultCoalescer
from quire_engine.text.server import TextServer
from quire_engine.text.tokenizer_threads import TokenizerThreads
from quire_engine.text.tracing import create_tracer
from quire_engine.tokenization.chat_template import ChatTemplate
from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_engine.tokenization.tokenizer_config import read_tokenizer_config
from quire_engine.weights.checkpoint import load_eos_token_ids
from quire_engine.weights.generation_config import load_default_sampling_params
from quire_engine.weights.hub import resolve_model
from quire_spec.constants import SUPERVISOR_SOCKET, TEXT_SOCKET, core_names, process_socket
from quire_spec.documents.tokenizer_files import ALL_FORMATS
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, InvalidArgument
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.pooler_config import PoolerConfig

logger = logging.getLogger(__name__)


def main(args: process.ProcessArgs) -> None:
    """Load the tokenizer and the limits of the checkpoint, then serve."""
    config = args.config
    folder = resolve_model(config.model, config.revision, progress=False, download_dir=config.download_dir)
    tokenizer = load_tokenizer(folder, config)
    model_config = ModelConfig.load(folder, config.model_impl)
    config = config.for_model(model_config)
    eos_token_ids, sampling_defaults = load_eos_token_ids(folder, model_config), _load_sampling_defaults(config, folder)
    templates = _load_chat_templates(folder, config)
    pooler = PoolerConfig.load(folder, model_config, config.convert, config.pooling_type)
    no_images = why_no_images(config, model_config, folder)
    limits = RequestLimits.from_config(config, model_config, tokenizer, eos_token_ids, templates, pooler, no_images)
    logger.info(
        "text process starting model=%s tokenizer=%s max_model_len=%d max_prompt_bytes=%d max_num_queued_reqs=%d",
        args.served_name,
        tokenizer is not None,
        limits.max_model_len,
        limits.max_prompt_bytes,
        config.max_num_queued_reqs,
    )
    logger.info(
        "chat outputs tool_call_parser=%s reasoning_parser=%s chat_template=%s",
        limits.parser_names.tool_call_parser or "none",
        limits.parser_names.reasoning_parser or "none",
        config.chat_template or ("of the checkpoint" if limits.has_chat_template else "none"),
    )
    if model_config.images is not None:
        logger.info("images %s", no_images or f"max_images={limits.max_images}")
    if pooler is not None:
        logger.info("pooling task=%s pooling=%s size=%d", pooler.task, pooler.pooling, pooler.size)
    if not limits.has_chat_template and pooler is None:
        logger.warning(
            "the checkpoint has no chat template, so only completions are served: chat requests are errors; "
            "give a template with --chat-template FILE, or spec.openai.chatTemplate"
        )
    asyncio.run(_serve(args, folder, tokenizer, limits, templates, sampling_defaults))


def load_tokenizer(folder: Path, config: EngineConfig) -> Tokenizer | None:
    """Return the tokenizer of the checkpoint in `folder`, or None if skip_tokenizer_init is set.

    Raises:
        ConfigError: the checkpoint has no tokenizer and skip_tokenizer_init is not set, or a file is invalid.
    """
    if config.skip_tokenizer_init:
        return None
    if (tokenizer := Tokenizer.from_folder(folder)) is None:
        raise ConfigError(
            f"{folder}: has no tokenizer ({ALL_FORMATS}); add the files, or set skip_tokenizer_init and send input_ids"
        )
    return tokenizer


async def _serve(
    args: process.ProcessArgs,
    folder: Path,
    tokenizer: Tokenizer | None,
    limits: RequestLimits,
    templates: ChatTemplateFiles,
    sampling_defaults: Mapping[str, Any],
) -> None:
    tracer = create_tracer(args.config.otlp_traces_endpoint, args.served_name)
    process.install_exit_handlers(asyncio.get_running_loop(), tracer.close)
    metrics = RequestMetrics(args.config, args.served_name, limits.max_model_len)
    clients = _create_clients(args)
    cores = (
        clients[0]
        if len(clients) == 1
        else CorePool(clients, CoreMetrics(metrics.registry, args.served_name, len(clients)), args.config)
    )
    access = ApiKeyAccess(args.api_key_rules)
    admission = AdmissionController(limits, args.served_name, args.config.max_num_queued_reqs, access)
    chat_renderer = grammar_checker = None
    if tokenizer is not None:
        chat_renderer = ChatRenderer(templates, tokenizer, limits.max_prompt_bytes)
        grammar_checker = GrammarChecker(folder, limits.vocab_size, limits.eos_token_ids)
    image_reader = None if limits.images is None else ImageReader(folder, limits.images)
    workers = [worker for worker in (chat_renderer, grammar_checker, image_reader) if worker is not None]
    tokenizer_threads = TokenizerThreads()
    components = chat_renderer, grammar_checker, tokenizer_threads.run, image_reader
    processor = RequestProcessor(limits, tokenizer, *components)
    finder = AdapterFinder(admission, args.socket_path(SUPERVISOR_SOCKET))
    roles = KVTransferRoles(args.config, args.served_name, args.advertised_host)
    request_manager = RequestManager(
        admission, processor, metrics, cores, finder=finder, tracer=tracer, kv_transfer_roles=roles
    )
    throttle = _create_throttle(args.config)
    methods = TextMethods(
        admission,
        processor,
        workers,
        request_manager,
        metrics,
        sampling_defaults,
        read_tokenizer_config(folder) | {"chat_template": templates.default},
        clients,
        cores.states,
        finder,
    )
    if isinstance(cores, CorePool):
        cores.listener = request_manager
        coalescers = [ResultCoalescer(PoolMember(cores, number), throttle) for number in range(len(clients))]
    else:
        coalescers = [ResultCoalescer(request_manager, throttle)]
    for client, coalescer in zip(clients, coalescers, strict=True):
        client.listener = coalescer
    server = TextServer(request_manager, metrics, methods, limits.max_payload_bytes, throttle, coalescers)
    await server.listen(args.socket_path(TEXT_SOCKET))
    # All objects that exist here live as long as the process, so the garbage collector does not need to scan them.
    gc.collect()
    gc.freeze()
    try:
        await cores.run()
    finally:
        for worker in workers:
            await worker.aclose()


def _create_clients(args: process.ProcessArgs) -> list[CoreClient]:
    names = core_names(args.config.data_parallel_size)
    peers = ["the engine core"] if len(names) == 1 else [f"engine {name}" for name in names]
    return [
        CoreClient(args.socket_path(process_socket(name)), args.served_name, peer)
        for name, peer in zip(names, peers, strict=True)
    ]


def _load_chat_templates(folder: Path, config: EngineConfig) -> ChatTemplateFiles:
    """Return the configured chat template. If none is configured, return the templates of the checkpoint.

    Raises:
        ConfigError: the configured template cannot be read, or is invalid.
    """
    files = ChatTemplateFiles.from_folder(folder)
    if config.chat_template is None:
        return files
    files = files.replaced_by(Path(config.chat_template))
    try:
        ChatTemplate(files.sources)
    except InvalidArgument as error:
        raise ConfigError(f"chat_template: {config.chat_template} is not a template: {error}") from error
    return files


def _load_sampling_defaults(config: EngineConfig, folder: Path) -> dict[str, Any]:
    """Return the default sampling parameters, which are passed to frontends that apply them.

    The result is empty if the parameters in the checkpoint are invalid.

    Raises:
        ConfigError: the configuration names a folder, and the parameters in this folder are invalid.
    """
    try:
        return load_default_sampling_params(folder, config.generation_config).to_mapping()
    except ConfigError as error:
        if config.generation_config != "auto":
            raise
        logger.warning("sampling defaults of the checkpoint are ignored error=%s", error)
        return {}


def _create_throttle(config: EngineConfig) -> ResponseThrottle:
    """Return a throttle for responses.

    It delays responses only if the engine runs on the CPU, because the engine then shares the cores with this
    process.
    """
    if config.device != "cpu":
        return ResponseThrottle(None)
    return ResponseThrottle(RESPONSES_PER_S_PER_CORE * len(os.sched_getaffinity(0)))
