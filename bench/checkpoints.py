"""What checkpoints cost, and what a prepared start saves, with `fsdp2_pretrain.py`'s own parts.

    torchrun --standalone --nproc-per-node=1 bench/checkpoints.py lost WIDTH ROUNDS
    torchrun --standalone --nproc-per-node=2 bench/checkpoints.py start

`lost`: the same four training steps of a model of that width (256: 47 MiB, 1024: 727 MiB) without a
checkpoint, with one and with one in the background, in turn. What they take longer than without is
lost; copying to CPU memory, hashing, syncing and what the writing thread takes from the training
thread are all in it. One rank on two cores has a core to spare for it, two ranks have none.

`start`: seconds to fill the 0.5B shape (GPT-2's vocabulary) from Hugging Face files in bf16
(`--init_from`) and from a prepared checkpoint of step 0, in turn, files in the page cache; and the
most memory of `common.py export`. Takes 8 GB of disk.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import arguments
import torch
import torch.distributed as dist
from pairs import leave
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
import fsdp2_pretrain as script  # noqa: E402


def prepare(shape: PreTrainedConfig, config: script.Config, device: torch.device):
    """What `main` of the script prepares, for a model of the given shape."""
    run = common.Run(config, device)
    tokenizer, training, _ = common.load_batches(config, device)
    checkpoints = common.Checkpoints(run, shape, tokenizer, training)
    model, decayed = script.build_model(config, shape, device)
    optimizer = script.build_optimizer(model, decayed, config)
    state = script.State(model, optimizer, run.progress)
    save = partial(script.save_checkpoint, state, config, checkpoints.stager)
    run.start(shape, optimizer)
    return SimpleNamespace(**locals())


def summary(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def lost(config: script.Config, device: torch.device, width: int, rounds: int) -> None:
    """Print training time lost per checkpoint; one is written before the first of the steps."""
    steps = 4
    shape = Qwen2Config(
        vocab_size=512, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    this = prepare(shape, config, device)
    batches = [this.training.global_batch(step) for step in range(steps)]

    def seconds(kind: str) -> float:
        dist.barrier()
        started = time.perf_counter()
        config.async_checkpoint = kind == "async"
        if kind != "none":
            this.checkpoints.write(this.save)
        for batch in batches:
            script.train_step(this.model, this.optimizer, batch, config, device, 1e-4)
            this.run.progress.step += 1
            this.run.should_stop(this.checkpoints)
        this.checkpoints.wait()
        dist.barrier()
        return time.perf_counter() - started

    kinds = ["none", "sync", "async"]
    for kind in kinds:
        seconds(kind)  # imports, first allocations
    seconds_lost: dict[str, list[float]] = {"sync": [], "async": []}
    for _ in range(rounds):
        took = {kind: seconds(kind) for kind in kinds}
        for kind, values in seconds_lost.items():
            values.append(took[kind] - took["none"])

    path = common.complete_checkpoints(this.run.directory)[0]
    files = [file for file in path.rglob("*") if file.is_file()]
    started = time.perf_counter()
    for file in files:
        common.sha256(file)
    hashing = (time.perf_counter() - started) / dist.get_world_size()  # the ranks share it
    this.run.close()
    if common.rank() == 0:
        sync, background = seconds_lost["sync"], seconds_lost["async"]
        size = sum(file.stat().st_size for file in files) / 2**20
        print(f"checkpoint of {size:,.0f} MiB, step of {took['none'] / steps:.2f} s")
        print("| training time lost per checkpoint | seconds, median (least to most) |")
        print("| --- | --- |")
        print(f"| training waits for it | {summary(sync)} |")
        print(f"| of that, SHA-256 | {hashing:.2f} |")
        print(f"| `--async_checkpoint` | {summary(background)} |")
        print(f"async / sync: {statistics.median(background) / statistics.median(sync):.2f}")


def start(config: script.Config, device: torch.device, rounds: int = 3) -> None:
    """Print seconds to read the weights from either kind of files, and the memory of an export."""
    shape = script.architecture(script.Config(model="qwen2-0.5b"), 50257)
    this = prepare(shape, config, device)
    hub, took = Path(config.run_dir) / "bf16", {"init_from": [], "prepared": []}
    if common.rank() == 0:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
        model = model.to_empty(device="cpu")
        model.tie_weights()
        model.save_pretrained(hub)
    this.checkpoints.write(this.save)
    path = common.complete_checkpoints(this.run.directory)[0]
    for _ in range(rounds):
        for kind, values in took.items():
            dist.barrier()
            started = time.perf_counter()
            if kind == "init_from":
                common.load_weights(this.model, str(hub))
            else:
                common.damage(path)  # as `Checkpoints.find` does
                script.load_checkpoint(this.state, config, path)
            dist.barrier()
            values.append(time.perf_counter() - started)
    this.run.close()
    if common.rank() == 0:
        for kind, values in took.items():
            print(f"{kind}: {summary(values)} s")
        ratio = statistics.median(took["init_from"]) / statistics.median(took["prepared"])
        print(f"init_from / prepared: {ratio:.2f}")
        imports = peak_memory("import transformers.models.qwen2.modeling_qwen2")
        peak = peak_memory(f"common.export_checkpoint('{path}', '{config.run_dir}/exported')")
        weights = 4 * this.run.parameters
        print(f"export: {(peak - imports) / weights:.2f} copies of the fp32 weights, at most")


def peak_memory(code: str) -> int:
    """Most resident bytes of a Python process that runs the code (Linux)."""
    program = f"import common; {code}; print(open('/proc/self/status').read())"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1])


def main() -> None:
    parser = arguments.parser(__doc__)
    kinds = parser.add_subparsers(dest="measure", required=True)
    kinds.add_parser("start").set_defaults(measure=start)
    of_lost = kinds.add_parser("lost")
    of_lost.set_defaults(measure=lost)
    for name in ("width", "rounds"):
        of_lost.add_argument(name, metavar=name.upper(), type=arguments.positive)
    given = vars(parser.parse_args())
    measure = given.pop("measure")
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        config = script.Config(
            bucket_edges=[256], micro_batch_tokens=256, keep_checkpoints=1, steps=10**6,
            global_batch_tokens=256 * common.world_size(), precision="fp32",
        )  # fmt: skip
        device = script.init_process_group(config)
        config.run_dir = common.gather(folder)[0]
        measure(config, device, **given)
        dist.barrier()  # nobody writes into the folder any more
    leave()


if __name__ == "__main__":
    main()
