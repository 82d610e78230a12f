"""A checkpoint as files for transformers: the same tensors, one file of weights at a time."""

import functools
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import huggingface_hub
import pytest
import torch
import torch.distributed.checkpoint as dcp
from launching import ROOT, small_shape
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import common

split = huggingface_hub.split_torch_state_dict_into_shards


@pytest.fixture(scope="module")
def checkpoint(run, weights_directory) -> Path:
    """Return one that started from a model in bf16. Its checkpoint is in fp32, as always."""
    large = 2**70  # more than a generator of torch accepts; any seed works
    flags = {"init_from": weights_directory, "tokenizer": "bytes", "seed": large}
    run_dir = run("ddp_pretrain.py", 1, steps=1, **flags)
    return run_dir / "checkpoints/step_00000001"


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the model's tensors of a checkpoint."""
    described = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    prefix = "app.model."
    state = {
        name.removeprefix(prefix): torch.empty(tensor.size)
        for name, tensor in described.items()
        if name.startswith(prefix)
    }
    dcp.load({"app": {"model": state}}, checkpoint_id=checkpoint, no_dist=True)
    return state


@pytest.mark.parametrize("dtype", ["", "bfloat16", "float32"])
def test_shards_hold_the_tensors_of_the_checkpoint(checkpoint, tmp_path, monkeypatch, dtype):
    """In the dtype of --init_from's files unless told otherwise."""
    small = functools.partial(split, max_shard_size="20KB")
    monkeypatch.setattr(huggingface_hub, "split_torch_state_dict_into_shards", small)
    out = tmp_path / "out"
    common.export(checkpoint, out, dtype)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    expected = torch.float32 if dtype == "float32" else torch.bfloat16
    tensors = functools.reduce(lambda a, b: a | b, map(load_file, files))
    before = stored(checkpoint)
    del before["lm_head.weight"]  # tied to the embedding
    assert tensors.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(tensors[name], tensor.to(expected)), name
    assert AutoConfig.from_pretrained(out).dtype == expected
    model = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(tensors[name], p) for name, p in model.named_parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_command_exports_what_the_end_of_a_run_exports(checkpoint, tmp_path):
    command = [sys.executable, "common.py", "export", checkpoint, tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    at_the_end = checkpoint.parents[1] / "hf"
    assert {path.name for path in at_the_end.iterdir()} == set(os.listdir(tmp_path / "out"))
    for path in at_the_end.iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


MOE = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", MOE)
def test_the_command_writes_experts_one_by_one(kind, checkpoint, tmp_path, monkeypatch):
    """As `save_pretrained` does, with the names that other programs read."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(kind, **sizes, **heads, **MOE[kind])
    model = AutoModelForCausalLM.from_config(config)
    shutil.copytree(checkpoint, tmp_path / "moe", ignore=shutil.ignore_patterns("*.distcp"))
    config.save_pretrained(tmp_path / "moe/hf")
    with warnings.catch_warnings(action="ignore"):  # of no process group
        state = {"app": {"model": model.state_dict()}}
        dcp.save(state, checkpoint_id=tmp_path / "moe", no_dist=True)
    small = functools.partial(split, max_shard_size="20KB")
    monkeypatch.setattr(huggingface_hub, "split_torch_state_dict_into_shards", small)
    monkeypatch.setattr(sys, "argv", ["common.py", "export", tmp_path / "moe", tmp_path / "out"])
    common.command_line()
    model.save_pretrained(tmp_path / "theirs")
    [theirs] = map(load_file, (tmp_path / "theirs").glob("*.safetensors"))
    files = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    ours = functools.reduce(lambda a, b: a | b, files.values())
    assert any(".experts.3." in name for name in ours) and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file in files for name in files[file]}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))
    common.export(tmp_path / "moe", tmp_path / "hf")  # hf/ of a run, which --init_from reads
    stacked = [load_file(path) for path in (tmp_path / "hf").glob("*.safetensors")]
    assert set().union(*stacked) == model.state_dict().keys()


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 4.0}])
def test_older_readers_find_the_rotations(checkpoint, tmp_path, scaling):
    """transformers 4 reads them under two names, and takes a default for what is not there."""
    shutil.copytree(checkpoint, tmp_path / "copy")
    config = tmp_path / "copy/hf/config.json"
    rotation = {"rope_theta": 12345.0, "rope_type": "default"} | scaling
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_parameters": rotation}))
    common.export(tmp_path / "copy", tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["rope_theta"] == 12345.0 and written["rope_scaling"] == rotation
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == rotation


# Export with files of 32 MB, and print by how many MB that raises the peak of resident memory.
# (ru_maxrss would begin with the peak of the process that started this one.)
MEASURED = """
import functools, re, sys
from pathlib import Path
import huggingface_hub
import common

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

split = huggingface_hub.split_torch_state_dict_into_shards
small = functools.partial(split, max_shard_size="32MB")
huggingface_hub.split_torch_state_dict_into_shards = small
common.export(Path(sys.argv[1]), Path(sys.argv[2]))  # loads what an export imports
before = peak()
common.export(Path(sys.argv[3]), Path(sys.argv[4]))
print(peak() - before)
"""


@pytest.mark.drill
def test_an_export_holds_one_file_of_weights_in_memory(checkpoint, tmp_path):
    """The model has 375 MB."""
    config = small_shape(hidden_size=512, intermediate_size=2048, num_hidden_layers=25)
    config.save_pretrained(tmp_path / "large/hf")
    description = common.read_description(checkpoint)
    (tmp_path / "large/checkpoint.json").write_text(json.dumps(description))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state = {name: torch.ones(tensor.shape) for name, tensor in model.state_dict().items()}
    size = sum(tensor.nbytes for tensor in state.values()) // 2**20
    assert size > 350
    with warnings.catch_warnings(action="ignore"):  # of no process group
        dcp.save({"app": {"model": state}}, checkpoint_id=tmp_path / "large", no_dist=True)
    paths = [checkpoint, tmp_path / "small_out", tmp_path / "large", tmp_path / "large_out"]
    command = [sys.executable, "-c", MEASURED, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(list((tmp_path / "large_out").glob("*.safetensors"))) > 10
    assert int(done.stdout) < 110, f"{done.stdout} of {size} MB"
