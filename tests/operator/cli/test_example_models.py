# SPDX-License-Identifier: Apache-2.0
"""examples/models: each service fits its hardware, by a plan for the config of its checkpoint.

The line `# config:` in a file names a config class of transformers, whose defaults are those of a published checkpoint,
and the keys in which config.json of the checkpoint differs.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire_operator.cli.main import main
from quire_spec.model.encoders.table import ENCODERS

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples/models").glob("*.yaml"))


def _config(line: str) -> dict[str, Any]:
    """Return config.json for `NAME(KEY=VALUE, ...)`."""
    call = ast.parse(line, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
    config = getattr(transformers, call.func.id)(**values)
    family = call.func.id.removesuffix("Config")
    kind = "ForConditionalGeneration" if hasattr(config, "vision_config") else "ForCausalLM"
    kind = "Model" if f"{family}Model" in ENCODERS else kind
    return config.to_dict() | {"architectures": [family + kind]}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_plan_fits(path, tmp_path, capsys):
    match = re.search(r"^# config: (.*)$", path.read_text(), re.M)
    assert match is not None
    (tmp_path / "config.json").write_text(json.dumps(_config(match[1])))
    status = main(["plan", "-f", str(path), "--model-config", str(tmp_path / "config.json")])
    output = capsys.readouterr()
    assert (status, output.err) == (0, "")
    assert "It fits" in output.out
    assert main(["validate", "-f", str(path)]) == 0
