"""Training time that a checkpoint costs, with and without `--async_checkpoint`, beside dcp.save.

    torchrun --standalone --nproc-per-node=1 bench/checkpoints.py [WIDTH] [ROUNDS]

Runs the same four training steps of fsdp2_pretrain.py in turn without a checkpoint, with one, with
nothing but `dcp.save` of the same state, and with one in the background. WIDTH is the model's (256:
checkpoints of 47 MiB, 1024: 727 MiB). The difference is lost: copies, syncs, and what the writing
thread takes from the training thread. One rank on two cores leaves a core to the writing thread,
two ranks do not.
"""

import shutil
import statistics
import tempfile
import time

import _tools  # noqa: F401
import shared
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import common
import fsdp2_pretrain as script

STEPS = 4


def main() -> None:
    width, rounds = shared.read(__doc__, width=256, rounds=8)
    script.init_process_group(script.Config())
    with tempfile.TemporaryDirectory(dir=shared.ROOT) as own:
        folders = [own]  # all ranks need the one of rank 0
        dist.broadcast_object_list(folders)
        shape = f"{folders[0]}/shape"
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if rank == 0:
            shared.qwen2(width, 4 * width, 4, 4, 2, 512).save_pretrained(shape)
        dist.barrier()
        config = script.Config(
            model=shape, max_length=256, micro_batch_tokens=256, global_batch_tokens=256 * ranks,
            precision="fp32", run_dir=f"{folders[0]}/run", keep_checkpoints=1,
        )  # fmt: skip
        session = shared.Session(script, config)
        run, checkpoints = session.run()
        run.begin(checkpoints, {"step": 0, "metrics_bytes": 0}, "as in a benchmark", "steps")
        batches, step = [*session.batches(0, STEPS)], 0

        def seconds(kind: str) -> float:
            nonlocal step
            dist.barrier()
            started = time.perf_counter()
            config.async_checkpoint = kind == "background"
            if kind == "dcp.save":
                state = common.ApplicationState(session.model, session.optimizer).state_dict()
                dcp.save(state, checkpoint_id=f"{folders[0]}/plain/{step}")
            elif kind != "none":
                checkpoints.save(session.model, session.optimizer, {"step": step, "tokens": 0})
            for batch in batches:
                session.train_step(batch)
                step += 1
            checkpoints.wait()
            dist.barrier()
            took = time.perf_counter() - started
            if rank == 0:
                shutil.rmtree(f"{folders[0]}/plain", ignore_errors=True)
            return took

        kinds = ["none", "waiting", "dcp.save", "background"]
        for kind in kinds:
            seconds(kind)  # imports, first allocations
        took = [{kind: seconds(kind) for kind in kinds} for _ in range(rounds)]
        size = sum(f.stat().st_size for f in checkpoints.newest.rglob("*") if f.is_file())
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
