"""The load of a server, read from its metrics."""

from __future__ import annotations

import pytest

from launcher_scripts.jobs.status import ServerLoad, is_ready, parse_load, query_load

TEXT = """\
# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0)
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5
nv_gpu_utilization{gpu_uuid="GPU-2"} 0.25
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 1073741824.000000
nv_gpu_memory_used_bytes{gpu_uuid="GPU-2"} 2147483648
nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 8.589934592e9
nv_gpu_memory_total_bytes{gpu_uuid="GPU-2"} 8589934592
nv_inference_request_success{model="a",version="1"} 90
launcher_request_success_total{finished_reason="stop",model_name="a {b}"} 3
launcher_request_success_total{finished_reason="length",model_name="c"} 4
launcher_num_requests_running{model_name="a"} 5
launcher_num_requests_running{model_name="c"} 1
launcher_num_requests_waiting{model_name="a"} 2
launcher_kv_cache_tokens{model="a"} 200
launcher_kv_cache_tokens_used{model="a"} 50
"""


def test_samples_of_all_gpus_and_models_are_combined() -> None:
    found = parse_load(TEXT)
    assert found == ServerLoad(0.375, 3 * 2.0**30, 16 * 2.0**30, 0.25, 7, 6, 2)
    assert found.gpu_text() == "38% 3.0/16.0 GiB"
    assert found.kv_text() == "25%"
    assert found.rows_text() == "6+2"


def test_a_server_without_gpus_says_nothing_of_them() -> None:
    found = parse_load("nv_cpu_utilization 0.1\n# nv_gpu_utilization 1\nIt works!\n")
    assert found == ServerLoad()
    assert (found.gpu_text(), found.kv_text(), found.rows_text()) == ("", "", "")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no.such.host.invalid:80", "node7:http"])
def test_a_server_that_is_gone_is_not_ready(address: str) -> None:
    assert not is_ready({"http": address})
    assert query_load(address) == ServerLoad()
