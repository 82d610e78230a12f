"""Mistakes that others made, as small edits of our files, and the check that has to notice each.

tests/strategies/test_mistakes.py plants them. docs/traps.md shows the table that this prints:

    python tests/support/mistakes.py
"""

from dataclasses import dataclass, field
from typing import Any

THREADS = {
    "transformers": "huggingface",
    "accelerate": "huggingface",
    "axolotl": "axolotl-ai-cloud",
}
THREADS |= {"torchtitan": "pytorch", "pytorch": "pytorch", "DeepSpeed": "deepspeedai"}
THREADS |= {"Megatron-LM": "NVIDIA", "torchtune": "meta-pytorch"}


@dataclass
class Mistake:
    """An edit of a file: `edits` are pairs of a text that the file has once, and its replacement.

    Args:
        check: which test notices it, a function of tests/strategies/test_mistakes.py.
        shows: what differs then; for losses, after two steps, relative to the right ones.
        own: flags of the launch.
        test: the test of the suite that notices it, if it is not the one of the check.
    """

    name: str
    threads: str
    file: str
    edits: list[tuple[str, str]]
    check: str
    shows: str
    own: dict[str, Any] = field(default_factory=dict)
    test: str = ""

    def apply(self, text: str) -> str:
        for before, after in self.edits:
            assert text.count(before) == 1, f"{self.file} has this {text.count(before)}x: {before}"
            text = text.replace(before, after)
        return text


MISTAKES = [
    Mistake(
        "gradients averaged over ranks, but not multiplied by their number",
        "torchtitan#2318",
        "fsdp2_pretrain.py",
        [("scale = dist.get_world_size() / batch", "scale = 1 / batch")],
        "agreement",
        "gradient norm 0.5",
    ),
    Mistake(
        "mean of the micro-batches' means in training",
        "transformers#34191 torchtitan#2206",
        "fsdp2_pretrain.py",
        [
            (
                "(loss * scale).backward()",
                '(loss / (micro_batch["labels"] >= 0).sum() / len(batch.micro_batches)).backward()',
            )
        ],
        "agreement",
        "loss 5e-5, gradient norm 3e-4, validation loss 6e-5",
    ),
    Mistake(
        "mean of the micro-batches' means in validation",
        "torchtitan#4167",
        "fsdp2_pretrain.py",
        [
            (
                "total[0] += model(**micro_batch)\n",
                'total[0] += model(**micro_batch) / (micro_batch["labels"] >= 0).sum().clamp(1)\n',
            ),
            (
                'total[1] += (micro_batch["labels"] != common.IGNORED).sum()',
                'total[1] += (micro_batch["labels"] != common.IGNORED).any()',
            ),
        ],
        "agreement",
        "validation loss 5e-4",
    ),
    Mistake(
        "gradients zeroed between micro-batches",
        "torchtitan#3575",
        "fsdp2_pretrain.py",
        [
            (
                "total_loss += loss.detach()",
                "total_loss += loss.detach()\n        if not last: model.zero_grad()",
            )
        ],
        "agreement",
        "loss 1e-3, gradient norm 0.5, validation loss 1e-3",
    ),
    Mistake(
        "gradient sync off by one",
        "pytorch#118298",
        "ddp_pretrain.py",
        [("last = i == len(batch.micro_batches) - 1", "last = i == len(batch.micro_batches)")],
        "agreement",
        "loss 2e-3, gradient norm 6e-2, validation loss 2e-3",
    ),
    Mistake(
        "gradient norm of this rank's shards",
        "pytorch#126457",
        "fsdp2_pretrain.py",
        [
            (
                "norm = norm.full_tensor()",
                "norm = nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])",
            )
        ],
        "agreement",
        "gradient norm 0.2",
    ),
    Mistake(
        "tied embedding untied by `to_empty`",
        "torchtitan#2495",
        "fsdp2_pretrain.py",
        [("    model.tie_weights()  # `init", "    # `init")],
        "agreement",
        "loss 4e-2, gradient norm 0.3, validation loss 4e-2",
    ),
    Mistake(
        "TP: the bias of a row-wise layer added by every rank",
        "torchtitan#4245",
        "fsdp2_tp_pretrain.py",
        [
            (
                "        fully_shard(block, reshard_after_forward",
                "        block.self_attn.o_proj.register_forward_hook(\n"
                "            lambda o, _, out: out + o.bias * (config.tensor_parallel - 1)\n"
                "        )\n"
                "        fully_shard(block, reshard_after_forward",
            )
        ],
        "agreement",
        "loss 4e-3, gradient norm 0.7, validation loss 5e-3",
        {"model": "biased"},
        "test_a_planted_mistake_is_noticed",
    ),
    Mistake(
        "TP: `to_local` of a norm's weight, so that its gradients are not summed over the group",
        "torchtitan#2532 torchtitan#4054 Megatron-LM#1446",
        "fsdp2_tp_pretrain.py",
        [
            (
                "    tensor_parallel(model, parallelize_plan=ROOT_PLAN)\n",
                "    tensor_parallel(model, parallelize_plan=ROOT_PLAN)\n"
                "    norm = model.get_decoder().norm\n"
                "    norm.forward = lambda hidden: DTensor.from_local(\n"
                "        nn.functional.rms_norm(hidden.to_local(), norm.weight.shape,\n"
                "            norm.weight.to_local(), norm.variance_epsilon),\n"
                "        hidden.device_mesh, hidden.placements, shape=hidden.shape,\n"
                "        stride=hidden.stride())\n",
            )
        ],
        "agreement",
        "loss 8e-6, gradient norm 3e-4, validation loss 1e-5",
    ),
    Mistake(
        "TP: data by rank and not by group",
        "DeepSpeed#99 accelerate#3092",
        "fsdp2_tp_pretrain.py",
        [
            (
                "return rank // config.tensor_parallel, dp_size",
                "return rank, ranks",
            )
        ],
        "agreement",
        "loss 0.5, gradient norm 7e-2, validation loss 4e-3",
    ),
    Mistake(
        "TP: a loss that the group shares counted on each rank",
        "torchtune#2436",
        "fsdp2_tp_pretrain.py",
        [("scale = dp_size / batch", "scale = dist.get_world_size() / batch")],
        "agreement",
        "gradient norm 1",
    ),
    Mistake(
        "CP: gradients scaled by the number of groups and not of ranks",
        "Megatron-LM#906",
        "fsdp2_cp_pretrain.py",
        [("scale = dist.get_world_size() / batch", "scale = dp_rank_and_size(config)[1] / batch")],
        "agreement",
        "gradient norm 0.5",
    ),
    Mistake(
        "CP: validation counts tokens before it splits the sequences",
        "torchtitan#3257",
        "fsdp2_cp_pretrain.py",
        [
            (
                "        micro_batch = local_micro_batch(micro_batch, run.config, run.device)\n"
                "        total[0] += model(**micro_batch)\n"
                '        total[1] += (micro_batch["labels"] != common.IGNORED).sum()\n',
                '        total[1] += (micro_batch["labels"] >= 0).sum()\n'
                "        micro_batch = local_micro_batch(micro_batch, run.config, run.device)\n"
                "        total[0] += model(**micro_batch)\n",
            )
        ],
        "agreement",
        "validation loss 0.5",
    ),
    Mistake(
        "CP: parts of a sequence joined along the wrong dimension",
        "torchtitan#3206 torchtitan#3681",
        "fsdp2_cp_pretrain.py",
        [
            (
                "return torch.cat(received.unbind(), dim=2)",
                "return torch.stack(received.unbind(), dim=3).flatten(2, 3)",
            )
        ],
        "agreement",
        "loss 6e-3, gradient norm 0.4, validation loss 7e-3",
    ),
    Mistake(
        "CP: each rank counts positions from 0",
        "",
        "fsdp2_cp_pretrain.py",
        [
            (
                '    if config.batching == "packed":\n        # Attention sees',
                '    part["position_ids"] = part["position_ids"] - part["position_ids"][:, :1]\n'
                '    if config.batching == "packed":\n        # Attention sees',
            )
        ],
        "agreement",
        "loss 3e-5, gradient norm 6e-4, validation loss 2e-5",
        {"batching": "bucketed"},
    ),
    Mistake(
        "PP: the loss divided by the tokens only after backward",
        "torchtitan#4194",
        "fsdp2_pp_pretrain.py",
        [("return loss * scale", "return loss * 1")],
        "agreement",
        "gradient norm 2e3",
    ),
    Mistake(
        "PP: gradients of a tied embedding not summed over the two stages that hold it",
        "",
        "fsdp2_pp_pretrain.py",
        [("dist.all_reduce(gradient, group=model.embedding_group)", "pass")],
        "agreement",
        "loss 1e-2, gradient norm 0.5, validation loss 9e-3",
    ),
    Mistake(
        "EP: gradients of experts averaged like the others",
        "pytorch#160285",
        "fsdp2_ep_pretrain.py",
        [
            ("module.set_gradient_divide_factor(1.0)", "pass"),
            ("            module.set_force_sum_reduction_for_comms(True)\n", ""),
            ("scale = 1 / batch", "scale = dist.get_world_size() / batch"),
        ],
        "agreement",
        "gradient norm 0.2",
        test="test_a_strategy_is_right",
    ),
    Mistake(
        "EP: biases of experts moved by the tokens of one rank",
        "torchtitan#3666 torchtitan#3686",
        "fsdp2_ep_pretrain.py",
        [("    dist.all_reduce(counts)  # of all ranks\n", "")],
        "experts",
        "loss, expert load",
    ),
    Mistake(
        "attention across the documents of a packed sequence",
        "axolotl#3796",
        "model.py",
        [
            (
                "lengths = [length for length in boundaries.diff().tolist() if length]",
                "lengths = [heads[0].shape[2]]",
            )
        ],
        "reference",
        "loss",
    ),
    Mistake(
        "documents split among the ranks before they are shuffled",
        "torchtitan#3131",
        "common.py",
        [
            (
                "        order = rng.permutation(len(lengths))\n",
                "        shares = np.array_split(np.arange(len(lengths)), dist.get_world_size())\n"
                "        order = np.concatenate([rng.permutation(share) for share in shares])\n",
            )
        ],
        "world sizes",
        "loss",
    ),
    Mistake(
        "data starts anew after a resume",
        "torchtitan#3908",
        "common.py",
        [("        while done > 0:\n", "        while False:\n")],
        "resumes",
        "loss",
    ),
    Mistake(
        "AdamW's moments not restored",
        "pytorch#140898 accelerate#3971",
        "common.py",
        [
            (
                'optim_state_dict=now | state_dict["optimizer"],\n        )\n',
                "optim_state_dict=now,\n        )\n        self.optimizer.state.clear()\n",
            )
        ],
        "resumes",
        "loss",
    ),
    Mistake(
        "a tied head in the exported files",
        "torchtitan#3764",
        "common.py",
        [("        del tensors[head]\n", "        pass\n")],
        "export",
        "names of tensors",
    ),
    # Copiers of this collection met these.
    Mistake(
        "a cross entropy in bf16, without autocast",
        "",
        "model.py",
        [("cross_entropy(logits.float(), labels", "cross_entropy(logits, labels")],
        "bf16",
        "loss",
    ),
    Mistake(
        "TP: heads counted by number",
        "",
        "by_hand/tensor.py",
        [("unflatten(2, (-1, 3, HEAD))", "unflatten(2, (WIDTH // HEAD, 3, -1))")],
        "by hand",
        "loss",
    ),
    Mistake(
        "an optimizer built before `fully_shard`",
        "",
        "by_hand/fsdp.py",
        [
            (
                "    for layer in [*model, model]:\n        fully_shard(layer)\n"
                "    return model, torch.optim.AdamW(model.parameters(), lr=0.003)\n",
                "    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)\n"
                "    for layer in [*model, model]:\n        fully_shard(layer)\n"
                "    return model, optimizer\n",
            )
        ],
        "by hand",
        "loss",
    ),
]


def links(threads: str) -> str:
    """`transformers#34191` -> a link to the thread. GitHub redirects issues to pull requests."""
    found = [thread.split("#") for thread in threads.split()]
    return ", ".join(
        f"[{name}#{number}](https://github.com/{THREADS[name]}/{name}/issues/{number})"
        for name, number in found
    )


# The test of the suite that does what the check does.
TESTS = {
    "agreement": "test_mode_agrees_with_ddp",
    "reference": "test_a_strategy_is_right",
    "world sizes": "test_world_sizes_agree",
    "experts": "test_plain_loop_balances_experts_alike",
    "resumes": "test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one",
    "export": "test_shards_hold_the_tensors_of_the_checkpoint",
    "bf16": "test_a_planted_mistake_is_noticed",
    "by hand": "test_all_strategies_have_the_same_losses",
}


def table() -> str:
    lines = ["| mistake | threads | what differs | test |", "| --- | --- | --- | --- |"]
    for mistake in MISTAKES:
        test = mistake.test or TESTS[mistake.check]
        cells = mistake.name, links(mistake.threads), mistake.shows, f"`{test}`"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
