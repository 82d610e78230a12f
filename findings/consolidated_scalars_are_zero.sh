#!/usr/bin/env bash
# PyTorch's distributed checkpoints can be written as safetensors: each rank writes its shards, and
# these are then consolidated into the files that Hugging Face reads. Expected: a tensor without
# dimensions comes out like any other. Seen with torch 2.13.0 and safetensors 0.8.0, for one tensor
# of shape [] and one of shape [1] that both hold 4.5:
#
#   - the sharded file holds 4.5 twice;
#   - the consolidated file holds 0 in the tensor of shape [], with the right name, shape and type.
#     There is no error and no warning.
#
# Such tensors are CLIP's `logit_scale`, learned gates, and the scales of weights that are quantized
# per tensor. A model exported so loads without an error and computes with 0. The cause is
# _write_sub_tensor_to_file_optimized in torch/distributed/checkpoint/_consolidate_hf_safetensors.py:
# it takes an empty shape for an empty tensor. Give the tensor the shape [1], or write the file with
# safetensors. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 safetensors==0.8.0 numpy==2.4.6
cd "$folder"
"$folder/env/bin/python" - <<'END'
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

tensors = {"scalar": torch.tensor(4.5), "vector": torch.tensor([4.5])}
writer = dcp.HuggingFaceStorageWriter("hf", save_distributed=True, enable_consolidation=True)
dcp.save(tensors, storage_writer=writer)
read = {}
for folder in ("hf/sharded", "hf"):
    [file] = Path(folder).glob("*.safetensors")
    read[folder] = load_file(file)
    print(f"{folder}:", read[folder])
assert read["hf/sharded"] == tensors, "the shards have changed"
assert read["hf"]["vector"] == tensors["vector"], "a tensor of shape [1] is wrong now"
assert read["hf"]["scalar"].shape == () and read["hf"]["scalar"] == 0, "the scalar is right now"
END
