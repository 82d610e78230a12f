#!/usr/bin/env bash
# Tensor parallelism of transformers (tp_plan "auto"), in training. Expected: the gradients of one
# process, as 40 other model types gave them. Seen with transformers 5.24.0, torch 2.13.0, gloo,
# 2 ranks and a small Apertus:
#
#   - the loss and all gradients but two in a block are those of one process;
#   - `alpha_p` and `alpha_n` of the activation (xIELU) have another gradient on each rank, that of
#     the rank's own part of the hidden layer. The sum over the ranks is right;
#   - so after some steps each rank has its own activation. There is no error and no warning.
#
# The plan (base_model_tp_plan in models/apertus/configuration_apertus.py) says that gradients of
# q_norm and k_norm are summed, for the same reason, but does not name the activation. Which values
# a checkpoint then holds depends on the rank that writes it. Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
packages="torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.4.6"
"$folder/env/bin/pip" install --quiet $packages
cat > "$folder/drift.py" <<'END'
import sys

import torch
import torch.distributed as dist
from transformers import ApertusConfig, ApertusForCausalLM, DistributedConfig
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)  # both ranks make the same model and the same tokens
config = ApertusConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
alone = ApertusForCausalLM(config)
folder = sys.argv[1]
if rank == 0:
    alone.save_pretrained(folder)
dist.barrier()
parallel = ApertusForCausalLM.from_pretrained(
    folder, distributed_config=DistributedConfig(tp_plan="auto"), dtype=torch.float32
)
tokens = torch.randint(3, 64, (2, 10))
for model in (alone, parallel):
    model(input_ids=tokens, labels=tokens).loss.backward()

wrong = set()
expected = dict(alone.named_parameters())
for name, parameter in parallel.named_parameters():
    gradient = parameter.grad
    if hasattr(gradient, "full_tensor"):
        gradient = gradient.full_tensor()
    right = expected[name].grad
    if not torch.allclose(gradient, right, rtol=1e-3, atol=1e-6):
        wrong.add(name)
        total = gradient.clone()
        dist.all_reduce(total)
        if rank == 0:
            seen = gradient.item(), total.item(), right.item()
            print(name, "on rank 0 %.2e, summed %.2e, alone %.2e" % seen)
        assert torch.allclose(total, right, rtol=1e-3, atol=1e-6), "the sum is wrong now"
activations = {f"model.layers.{i}.mlp.act_fn.alpha_{s}" for i in range(2) for s in "pn"}
assert wrong == activations, wrong

optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
for _ in range(5):
    optimizer.step()
    optimizer.zero_grad()
    parallel(input_ids=tokens, labels=tokens).loss.backward()
value = parallel.model.layers[1].mlp.act_fn.alpha_p.detach().float()
values = [torch.empty_like(value) for _ in range(2)]
dist.all_gather(values, value)
if rank == 0:
    print("alpha_p of the last block after 5 steps, rank by rank:", [v.item() for v in values])
assert not torch.allclose(*values, rtol=1e-3), "the ranks agree now"
dist.destroy_process_group()
END
export OMP_NUM_THREADS=1
"$folder/env/bin/torchrun" --standalone --nproc-per-node=2 "$folder/drift.py" "$folder/model"
