# SPDX-License-Identifier: Apache-2.0
"""Process that decodes and resizes images: `python -m quire_engine.text.images.image_worker`, started by the reader.

An image file of a client can take any amount of time and memory. Therefore, this process has a memory limit, and the
text process kills it when an image takes too long. The process reads lines, each of which contains a JSON object. The
first line contains the folder of the checkpoint, and each further line contains an image. The process answers each line
with one line.
"""

import base64
import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from quire_engine.images.processor import ImageProcessor
from quire_engine.ipc.process import set_parent_death_signal
from quire_spec.errors import Code, InvalidArgument, error_text
from quire_spec.model.images.image_config import ImageConfig

MAX_MEMORY_BYTES = 3 * 2**30


def answer(processor: ImageProcessor, data: bytes) -> dict[str, Any]:
    """Return an image as a vision tower reads it, or an error."""
    try:
        image = processor.process(data)
    except InvalidArgument as error:
        return {"error_code": error.code, "error": error_text(error)}
    except MemoryError:
        return {"error_code": Code.INVALID_ARG, "error": "needs too much memory; send a smaller image"}
    except Exception as error:
        return {"error_code": Code.INTERNAL, "error": f"image processor: {type(error).__name__}"}
    tensors = {
        name: {"dtype": tensor.dtype, "shape": tensor.shape, "data": base64.b64encode(tensor.data).decode()}
        for name, tensor in image.tensors.items()
    }
    sizes = {"num_tokens": image.num_tokens, "grid": image.grid, "line_length": image.line_length}
    return {**sizes, "digest": image.digest.hex(), "tensors": tensors}


def main() -> None:
    """Answer each line of the standard input, until the input ends."""
    set_parent_death_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    config = json.loads(sys.stdin.readline())
    processor = ImageProcessor(Path(config["folder"]), ImageConfig(**config["images"]))
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(processor, base64.b64decode(json.loads(line)["data"]))), flush=True)


if __name__ == "__main__":
    main()
