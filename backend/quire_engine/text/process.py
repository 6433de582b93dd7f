# SPDX-License-Identifier: Apache-2.0
"""The text process: `python -m quire_engine.text.process`. Puts its parts together and runs them.

    frontend --Submit--> TextServer -> Desk -> CoreLink --Generate--> engine core
             <--Events--    Port   <- Desk <- Joiner   <--StepResult--

Everything about text happens here, so that none of it costs a step of the engine: tokenizing, admission, detokenizing,
stop strings, metrics. One event loop; it imports neither torch nor transformers.
"""

import asyncio
import gc
import logging
import os

from quire_engine.ipc import process
from quire_engine.text.admission import AdmissionController, RequestLimits
from quire_engine.text.core_client import CoreClient
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.request_manager import RequestManager
from quire_engine.text.result_coalescer import RESPONSES_PER_S_PER_CORE, ResponseThrottle, ResultCoalescer
from quire_engine.text.server import TextServer
from quire_engine.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer
from quire_engine.weights.hub import resolve_model
from quire_spec.constants import CORE_SOCKET, TEXT_SOCKET
from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig

logger = logging.getLogger(__name__)


def main(args: process.ProcessArgs) -> None:
    """Load what belongs to the checkpoint, then serve."""
    folder = resolve_model(args.config.model, args.config.revision, progress=False)
    tokenizer = Tokenizer.from_folder(folder)
    limits = RequestLimits.from_config(args.config, ModelConfig.load(folder), tokenizer)
    logger.info(
        "text starts model=%s tokenizer=%s max_model_len=%d max_prompt_bytes=%d max_num_queued_reqs=%d",
        *(args.served_name, tokenizer is not None, limits.max_model_len),
        *(limits.max_prompt_bytes, limits.max_num_queued_reqs),
    )
    if tokenizer is None:
        logger.warning("the model has no %s: it takes token ids, and refuses texts folder=%s", TOKENIZER_FILE, folder)
    asyncio.run(_serve(args, tokenizer, limits))


async def _serve(args: process.ProcessArgs, tokenizer: Tokenizer | None, limits: RequestLimits) -> None:
    process.install_exit_handlers(asyncio.get_running_loop())
    metrics = RequestMetrics(args.config, args.served_name, limits.max_model_len)
    core_client = CoreClient(args.socket_path(CORE_SOCKET), args.served_name)
    request_manager = RequestManager(
        AdmissionController(limits, args.served_name, tokenizer is not None), tokenizer, metrics, core_client.send
    )
    throttle = _create_throttle(args.config)
    server = TextServer(request_manager, tokenizer, metrics, limits.max_frame_bytes, throttle)
    await server.listen(args.socket_path(TEXT_SOCKET))
    # What was made so far stays: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    await core_client.run(ResultCoalescer(request_manager, throttle))


def _create_throttle(config: EngineConfig) -> ResponseThrottle:
    """An engine on a device of its own loses nothing by responses; one on this CPU gets most of it."""
    if config.device != "cpu":
        return ResponseThrottle(None)
    return ResponseThrottle(RESPONSES_PER_S_PER_CORE * len(os.sched_getaffinity(0)))
