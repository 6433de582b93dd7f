# SPDX-License-Identifier: Apache-2.0
"""The text process: `python -m quire_engine.text_process`. Puts its parts together and runs them.

    frontend --Submit--> TextServer -> Desk -> CoreLink --Generate--> engine core
             <--Events--    Port   <- Desk <- Joiner   <--StepResult--

Everything about text happens here, so that none of it costs a step of the engine: tokenizing, admission, detokenizing,
stop strings, metrics. One event loop; it imports neither torch nor transformers.
"""

import asyncio
import gc
import logging
import os

from quire_engine import process
from quire_engine.admission import Admission, Limits
from quire_engine.core_link import CoreLink
from quire_engine.desk import Desk
from quire_engine.hub import resolve_model
from quire_engine.joiner import Joiner
from quire_engine.metrics import Metrics
from quire_engine.pace import RESPONSES_PER_S_PER_CORE, Pace
from quire_engine.text import TOKENIZER_FILE, Tokenizer
from quire_engine.text_server import TextServer
from quire_spec.constants import CORE_SOCKET, TEXT_SOCKET
from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig

_log = logging.getLogger("quire.text")


def main(args: process.Arguments) -> None:
    """Load what belongs to the checkpoint, then serve."""
    folder = resolve_model(args.config.model, args.config.revision, progress=False)
    tokenizer = Tokenizer.find(folder)
    limits = Limits.of(args.config, ModelConfig.load(folder), tokenizer)
    _log.info(
        "text starts model=%s tokenizer=%s max_model_len=%d max_prompt_bytes=%d max_num_queued_reqs=%d",
        *(args.served_name, tokenizer is not None, limits.max_model_len),
        *(limits.max_prompt_bytes, limits.max_num_queued_reqs),
    )
    if tokenizer is None:
        _log.warning("the model has no %s: it takes token ids, and refuses texts folder=%s", TOKENIZER_FILE, folder)
    asyncio.run(_serve(args, tokenizer, limits))


async def _serve(args: process.Arguments, tokenizer: Tokenizer | None, limits: Limits) -> None:
    process.watch_loop(asyncio.get_running_loop())
    metrics = Metrics(args.config, args.served_name, limits.max_model_len)
    link = CoreLink(args.socket(CORE_SOCKET), args.served_name)
    desk = Desk(Admission(limits, args.served_name, tokenizer is not None), tokenizer, metrics, link.send)
    pace = _pace(args.config)
    server = TextServer(desk, tokenizer, metrics, limits.max_frame_bytes, pace)
    await server.listen(args.socket(TEXT_SOCKET))
    # What was made so far stays: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    await link.run(Joiner(desk, pace))


def _pace(config: EngineConfig) -> Pace:
    """An engine on a device of its own loses nothing by responses; one on this CPU gets most of it."""
    if config.device != "cpu":
        return Pace(None)
    return Pace(RESPONSES_PER_S_PER_CORE * len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    process.run("quire_engine.text_process", main)
