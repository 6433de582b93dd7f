# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model and the parameters of its config, as Python data.

repository.py writes them into the config of each model. frontend/tensors.py and stub_model.py use them to read
requests. Names, types and shapes are the same as in NVIDIA's vllm_backend (auto_complete_config), with two differences.
text_input is optional, because input_ids can replace it. Ids are INT64, because the server silently wraps numbers that
are too large for an INT32 tensor.

Source: https://github.com/triton-inference-server/vllm_backend/blob/00ea75bc67f48ad7c6283b1983620e1dbb1a9cfe/src/model.py
"""

from quire_spec import constants
from quire_spec.protocol import kv_transfer_params

FLAGS = (
    constants.STREAM,
    constants.EXCLUDE_INPUT_IN_OUTPUT,
    constants.RETURN_FINISH_REASON,
    constants.RETURN_CUMULATIVE_LOGPROB,
    constants.RETURN_LOGPROBS,
    constants.RETURN_NUM_INPUT_TOKENS,
    constants.RETURN_NUM_OUTPUT_TOKENS,
    constants.RETURN_OUTPUT_IDS,
    constants.RETURN_PROMPT_LOGPROBS,
)
"""Names of the inputs that contain one boolean."""

INPUTS: tuple[tuple[str, str, int], ...] = (
    (constants.TEXT_INPUT, "TYPE_STRING", 1),
    (constants.INPUT_IDS, "TYPE_INT64", -1),
    (constants.SAMPLING_PARAMETERS, "TYPE_STRING", 1),
    (constants.EMBEDDING_REQUEST, "TYPE_STRING", 1),
    (constants.IMAGE, "TYPE_STRING", -1),
    *((flag, "TYPE_BOOL", 1) for flag in FLAGS),
)
"""Name, type and shape of each input. Each shape has one dimension (-1: any size). All inputs are optional."""

OUTPUTS: tuple[tuple[str, str, int], ...] = (
    (constants.TEXT_OUTPUT, "TYPE_STRING", -1),
    (constants.FINISH_REASON, "TYPE_STRING", -1),
    (constants.CUMULATIVE_LOGPROB, "TYPE_FP32", -1),
    (constants.LOGPROBS, "TYPE_STRING", -1),
    (constants.NUM_INPUT_TOKENS, "TYPE_UINT32", 1),
    (constants.NUM_OUTPUT_TOKENS, "TYPE_UINT32", -1),
    (constants.OUTPUT_IDS, "TYPE_INT64", -1),
    (constants.PROMPT_LOGPROBS, "TYPE_STRING", 1),
    (kv_transfer_params.FIELD, "TYPE_STRING", 1),
)
"""Name, type and shape of each output. Each shape has one dimension (-1: any size)."""

MAX_PROMPT_BYTES = 16 * 2**20
"""Maximum size of a prompt in bytes. No model has a context that needs a longer prompt. The limit protects the memory
of the stubs and of the server."""

FORWARDED_HEADERS_VARIABLE = "QUIRE_FORWARDED_HEADERS"
"""Environment variable of the stubs. It contains a pattern. If the name of a gRPC header matches the pattern, the
server passes the header to the model as a request parameter. Over HTTP, the server passes no headers to Quire's
models."""

PARAM_SOCKET = "quire_text_socket"
"""Name of the config parameter that contains the path of the text process's socket."""
PARAM_BASE = "quire_base_model"
"""Name of the config parameter that contains the name of the base model. A model that has a different name is an
adapter."""
