# SPDX-License-Identifier: Apache-2.0
"""Which node of a group a machine is."""

import re

import pytest

from quire_server.rank.__main__ import main
from quire_server.rank.group_member import GroupMember
from quire_spec import constants
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

GROUP = {"pipeline_parallel_size": 4, "nnodes": 4, "rank_key_file": "/key"}
POD = {"LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "llama-0.llama-0.ns", "LWS_GROUP_SIZE": "4"}


@pytest.mark.parametrize(
    ("node_rank", "master_addr", "field", "environment", "expected"),
    [
        (None, None, None, POD, GroupMember(2, "llama-0.llama-0.ns")),
        (3, "10.0.0.1", "10.0.0.9", POD, GroupMember(3, "10.0.0.1")),
        (1, None, "10.0.0.9", {}, GroupMember(1, "10.0.0.9")),
        (None, None, None, POD | {"LWS_GROUP_SIZE": "2"}, "engine.nnodes: is 4, but LWS_GROUP_SIZE is '2'"),
        (None, "10.0.0.1", None, {}, "--node-rank: missing"),
        (0, "10.0.0.1", None, {}, "--node-rank: must be from 1 to 3"),
        (4, "10.0.0.1", None, {}, "--node-rank: must be from 1 to 3"),
        (1, None, None, {}, "--master-addr: missing"),
    ],
)
def test_options_come_before_fields_and_variables(node_rank, master_addr, field, environment, expected):
    config = EngineConfig.from_json({"model": "/m", "master_addr": field} | GROUP)
    if isinstance(expected, GroupMember):
        assert GroupMember.find(config, node_rank, master_addr, environment) == expected
        return
    with pytest.raises(ConfigError, match=re.escape(expected)):
        GroupMember.find(config, node_rank, master_addr, environment)


def test_a_wrong_document_is_a_configuration_error(tmp_path, capsys):
    file = tmp_path / "pod.json"
    file.write_text("{}")
    folders = [f"--run-dir={tmp_path / 'run'}", f"--cache-dir={tmp_path / 'cache'}"]
    assert main([f"--config={file}", *folders, "--node-rank=1"]) == constants.EXIT_CONFIG
    assert "pod.json" in capsys.readouterr().err
