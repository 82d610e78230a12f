"""Training time that a checkpoint costs, awaited and in the background (`--async_checkpoint`).

    torchrun --standalone --nproc-per-node=1 bench/checkpoints.py [WIDTH] [ROUNDS]

The same four training steps of fsdp2_pretrain.py, with a model of that width (256: 47 MiB of
checkpoint, 1024: 727 MiB), without a checkpoint, with one and with one in the background, in turn.
What they take longer than without is lost: copies, sums, syncs, and what the writing thread takes
from the training thread. One rank on two cores has a core to spare for it, two ranks have none.
"""

import statistics
import tempfile
import time
from functools import partial

import shared
import torch.distributed as dist

import common
import fsdp2_pretrain as script

STEPS = 4


def main() -> None:
    width, rounds = shared.read(__doc__, width=256, rounds=8)
    device = script.init_process_group(script.Config())
    with tempfile.TemporaryDirectory(dir=shared.ROOT) as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        shared.qwen2(width, 4 * width, 4, 4, 2, 512).save_pretrained(f"{own}/shape")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        config = script.Config(
            model=f"{own}/shape", max_length=256, micro_batch_tokens=256, precision="fp32",
            global_batch_tokens=256 * ranks, run_dir=folders[0],
        )  # fmt: skip
        session = shared.Session(script, config)
        data = session.data
        run = shared.make_run(config, data, session.size, device)
        checkpoints = common.Checkpoints(
            run.directory / "checkpoints",
            keep=1,
            facts=run.facts,
            rank=rank,
            world_size=ranks,
            timeout=run.timeout,
        )
        batches, step = [*session.batches(0, STEPS)], 0

        def seconds(kind: str) -> float:
            nonlocal step
            dist.barrier()
            started = time.perf_counter()
            config.async_checkpoint = kind == "background"
            if kind != "none":
                save = partial(session.save_checkpoint, checkpoints.group)
                checkpoints.write(save, {"step": step}, config.async_checkpoint)
            for batch in batches:
                session.train_step(batch, 1e-4)
                step += 1
            checkpoints.wait()
            dist.barrier()
            return time.perf_counter() - started

        kinds = ["none", "awaited", "background"]
        for kind in kinds:
            seconds(kind)  # imports, first allocations
        took = [{kind: seconds(kind) for kind in kinds} for _ in range(rounds)]
        size = sum(f.stat().st_size for f in checkpoints.last.rglob("*") if f.is_file())
        dist.barrier()
        session.close()
    if rank == 0:
        plain = statistics.median(one["none"] for one in took) / STEPS
        print(f"checkpoint of {size / 2**20:,.0f} MiB, step of {plain:.2f} s")
        print("| checkpoint | seconds of training lost, median (least to most) |\n| --- | --- |")
        for kind in kinds[1:]:
            lost = [one[kind] - one["none"] for one in took]
            print(
                f"| {kind} | {statistics.median(lost):.2f} ({min(lost):.2f} to {max(lost):.2f}) |"
            )
    shared.leave()


if __name__ == "__main__":
    main()
