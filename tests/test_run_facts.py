"""What a run's folder says of itself, and when two of them are of one kind."""

import json
from pathlib import Path

import pytest

from paged.run_facts import RunFacts, differences, is_hardware, model_name


@pytest.mark.parametrize(
    ("device", "hardware", "same"),
    [
        ("cpu", "cpu", True),
        ("cpu", "h200", False),
        ("cuda", "h200", True),
        ("cuda", "cpu", False),
        ("NVIDIA H200", "h200", True),
        ("NVIDIA H100 80GB HBM3", "h100", True),
        ("NVIDIA H100 80GB HBM3", "h200", False),
        ("NVIDIA A100-SXM4-80GB", "a100_80g", True),
        ("NVIDIA A100-SXM4-40GB", "a100_80g", False),
        ("NVIDIA L4", "l4", True),
        ("NVIDIA L40S", "l4", False),
        ("NVIDIA A10G", "a10g", True),
        ("NVIDIA A10", "a10g", False),
    ],
)
def test_devices_are_told_by_their_drivers_names(device: str, hardware: str, same: bool) -> None:
    assert is_hardware(device, hardware) == same
    assert bool(differences({"hardware": device}, {"hardware": hardware})) != same


def test_only_what_both_know_can_differ() -> None:
    theirs = {"model": "org/big", "tp": None, "dtype": "float16", "kv_dtype": "fp8", "numerics": "fast"}
    ours = {"model": "big", "tp": 4, "dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "hardware": "h200"}
    assert differences(theirs, ours) == {"dtype": ("float16", "bfloat16")}
    assert differences({"model": "org/bigger"}, ours) == {"model": ("org/bigger", "big")}
    assert differences({"kv_dtype": "float16"}, ours) == {"kv_dtype": ("float16", "float8_e4m3fn")}


def test_a_models_folder_is_named_by_its_last_part(tmp_path: Path) -> None:
    assert model_name(str(tmp_path)) == tmp_path.name
    assert model_name("/not/here/any/more") == "more"
    assert model_name("org/big") == "org/big"


def test_a_folder_with_nothing_says_nothing(tmp_path: Path) -> None:
    facts = RunFacts.read(tmp_path)
    assert (facts.model, facts.dtype, facts.tp, facts.device, facts.spec, dict(facts.versions)) == (None,) * 5 + ({},)


def test_the_folder_of_a_log_is_read(tmp_path: Path) -> None:
    memory = {"weights_bytes": 5, "graph_bytes": 3, "context_bytes": 0, "planned": {"activation_bytes": 9}}
    summary = {"device": "NVIDIA H200", "peak_device_bytes": 7, "memory": memory}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "steps.jsonl").write_text("")
    facts = RunFacts.read(tmp_path / "steps.jsonl")
    assert (facts.device, facts.peak_bytes, facts.context_bytes) == ("NVIDIA H200", 7, None)
    assert (facts.weights_bytes, facts.activation_bytes, facts.graph_bytes) == (5, None, 3)
