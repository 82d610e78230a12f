"""The run around a training loop: flags, how a process ends, the run directory and its metrics.

Nothing here depends on a parallel strategy, an optimizer's rule, or a training loop.
"""

import contextlib
import ctypes
import datetime
import fcntl
import gc
import json
import math
import os
import re
import secrets
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import xxhash
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

import common
from common import (
    Refusal,
    counted,
    differences,
    fingerprint,
    gather,
    lost_connection,
    refuse,
    refusing,
    say,
)
from model import weights_fingerprint

# --- Flags ----------------------------------------------------------------------------------------


def flag(default: Any, help: str) -> Any:
    """Declare a command-line flag: a dataclass field with a default and a help text."""
    return field(default=default, metadata={"help": help})


@dataclass(config={"allow_inf_nan": False})
class Flags:
    """The flags that all scripts share. A script's Config adds its own and changes defaults."""

    # model
    model: str = flag("tiny", "tiny, qwen2-0.5b, or a directory or hub id with a config.json")
    init_from: str | None = flag(
        None, "start from the weights, model and tokenizer of a run directory or Hugging Face model"
    )
    untested_model: bool = flag(
        False, "train a model type that was never compared with plain transformers, with a warning"
    )

    # data
    tokenizer: str = flag("bytes", "bytes, a tiktoken encoding (gpt2), or a directory or hub id")
    dataset: str | list[str] = flag(
        "stdlib", "stdlib, a hub id, or .parquet .jsonl .json .txt files, globs, folders or URLs"
    )
    dataset_config: str | None = flag(None, "configuration name of a hub dataset")
    dataset_revision: str | None = flag(None, "commit, tag or branch of a hub dataset")
    dataset_split: str = flag("train", "split, as in datasets.load_dataset")
    max_length: PositiveInt = flag(512, "longest sequence in tokens; longer documents are split")
    pad_to_multiple_of: PositiveInt = flag(1, "round sequence lengths up to a multiple of this")
    batching: Literal["bucketed", "packed"] = flag(
        "bucketed", "padded sequences of similar length, or whole documents packed into one"
    )
    micro_batch_tokens: PositiveInt = flag(
        2048, "token positions of one forward pass of one rank, padding included"
    )
    global_batch_tokens: PositiveInt = flag(
        4096, "token positions of one optimizer step, over all ranks and micro-batches"
    )
    eval_every: PositiveInt = flag(200, "steps between validations")
    eval_tokens: PositiveInt = flag(
        250_000, "size of the validation set in tokens (whole documents, the first by hash)"
    )
    seed: NonNegativeInt = flag(0, "seed of initial weights and data order")

    # optimization
    steps: NonNegativeInt = flag(
        550, "optimizer steps of the whole run; 0 prepares the data and exits"
    )
    learning_rate: PositiveFloat | None = flag(
        None, "peak learning rate; default: by the model's size, lower with --init_from"
    )
    min_learning_rate: NonNegativeFloat | None = flag(
        None, "learning rate at the end of the decay; default: a fiftieth of the peak"
    )
    warmup_steps: NonNegativeInt = flag(20, "steps of linear warm-up")
    decay_steps: PositiveInt | None = flag(
        None, "decay over the last N steps only (warmup-stable-decay); default: after the warm-up"
    )
    weight_decay: NonNegativeFloat = flag(
        0.1, "weight decay of matrices (embeddings, norms and biases have none)"
    )
    grad_clip: NonNegativeFloat = flag(1.0, "clip the gradient norm to this; 0 disables clipping")

    # precision, memory and speed
    precision: Literal["auto", "fp32", "bf16"] = flag(
        "auto", "compute precision. auto: bf16 on GPUs that have it, otherwise fp32"
    )
    activation_checkpointing: Annotated[
        str, Field(pattern=r"^(none|full|selective|1(\.0*)?|0(\.\d*)?|\.\d+)$")
    ] = flag("none", "none, full, selective, or the fraction of the blocks that recompute, 0 to 1")
    compile: bool = flag(False, "compile each transformer block")
    flash_attention: Literal["torch", "FA3", "FA4"] = flag(
        "torch", "attention kernels: PyTorch's own, or FlashAttention 3 or 4 from its package"
    )

    # checkpoints
    checkpoint_every: NonNegativeInt = flag(
        100, "steps between checkpoints; the last step saves too. 0: no checkpoints and no hf/"
    )
    keep_checkpoints: PositiveInt = flag(2, "how many of the newest checkpoints to keep")
    checkpoint_style: Literal["stateful", "separate"] = flag(
        "separate", "model and optimizer as one Stateful object, or each as its own state dict"
    )
    async_checkpoint: bool = flag(False, "continue training while a checkpoint is written")
    resume: str = flag(
        "auto", "auto, never, or a checkpoint's path (it holds a pickle: use only trusted ones)"
    )

    # the run
    run_dir: str = flag(f"runs/{Path(sys.argv[0]).stem}", "directory for everything a run writes")
    timeout_minutes: PositiveFloat = flag(10.0, "longest wait for another rank, in minutes")
    peak_tflops: PositiveFloat | None = flag(
        None, "dense peak of one GPU in TFLOP/s, for the MFU; default: from a table, by its name"
    )
    trace_steps: list[PositiveInt] | None = flag(None, "first and last step to profile")
    wandb_project: str | None = flag(None, "also log to this Weights & Biases project")

    def __post_init__(self) -> None:
        multiple = self.pad_to_multiple_of
        if self.micro_batch_tokens // multiple * multiple < self.max_length:
            refuse("--micro_batch_tokens cannot hold a padded sequence of --max_length")
        if len(self.dataset) == 1:  # a list of one name
            [self.dataset] = self.dataset
        on_gpu = torch.cuda.is_available()
        if self.precision == "auto":
            # GPUs before Ampere only emulate bf16.
            self.precision = "bf16" if on_gpu and torch.cuda.is_bf16_supported(False) else "fp32"
        if self.flash_attention != "torch" and (self.precision == "fp32" or not on_gpu):
            refuse("--flash_attention FA3 and FA4 need a GPU and --precision bf16")


# The shared flags by subject: the first flag of each, as they stand in Flags.
SUBJECTS = {
    "model": "model",
    "tokenizer": "data",
    "steps": "optimization",
    "precision": "precision, memory and speed",
    "checkpoint_every": "checkpoints",
    "run_dir": "the run",
}


def parse_config(config_class: type) -> Any:
    """Parse the command line into the script's Config."""
    parser = transformers.HfArgumentParser(config_class, allow_abbrev=False)
    parser.error = refuse
    # Group the flags in --help: first the script's own and changed ones, then by subject.
    # argparse offers no way to move a flag to another group, so this uses its private lists.
    flags = parser._optionals._group_actions
    own = group = parser.add_argument_group("this script's own flags and defaults")
    for action in flags[1:]:  # after --help
        action.default = getattr(config_class, action.dest)  # it omits defaults of lists
        if action.dest in SUBJECTS:
            group = parser.add_argument_group(SUBJECTS[action.dest])
        is_own = getattr(Flags, action.dest, group) != action.default
        (own if is_own else group)._group_actions.append(action)
    del flags[1:]
    try:
        config = config_class(**vars(parser.parse_args()))
    except ValidationError as error:
        problem = error.errors()[0]
        refuse(f"--{problem['loc'][0]} {problem['msg']}")
    if config.init_from:
        config.init_from = weights = common.fetch_weights(config.init_from)
        # Weights bring their architecture and tokenizer, unless the command line sets others.
        parser.set_defaults(model=weights, tokenizer=weights)
        given = parser.parse_args()
        config.model, config.tokenizer = given.model, given.tokenizer
    return config


def micro_batches_per_rank(config: Flags, dp_size: int) -> int:
    """Return how many micro-batches of a step each of the data-parallel ranks gets."""
    number, rest = divmod(config.global_batch_tokens, config.micro_batch_tokens * dp_size)
    if rest:
        refuse(
            f"--global_batch_tokens {config.global_batch_tokens} is not a multiple of "
            f"{config.micro_batch_tokens * dp_size} (--micro_batch_tokens x {dp_size} "
            "data-parallel ranks)"
        )
    return number


def set_learning_rates(config: Flags, default: float, ratio: float = 50) -> None:
    """Fill in the peak and the minimum of the learning rate where no flag sets them."""
    config.learning_rate = config.learning_rate or default
    if config.min_learning_rate is None:
        config.min_learning_rate = config.learning_rate / ratio
    if config.min_learning_rate > config.learning_rate:
        refuse("--min_learning_rate is above --learning_rate")


# --- How a process ends ---------------------------------------------------------------------------


def launch(main: Callable) -> None:
    """Run a script's `main`, and what it returns: a function that rank 0 ends the run with.

    The exit code is 2 for input that cannot work, and 1 for a failure once training has begun.
    torchrun repeats the error of the rank that failed first when it ends.
    """
    if "WORLD_SIZE" not in os.environ:  # without torchrun: one rank
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "0",
        }
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # Have the kernel send SIGTERM when torchrun dies. Otherwise ranks would train on unseen.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
        # If it has died already, init has adopted this rank. (In containers, init can be torchrun.)
        if os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():
            os._exit(1)
    # Sequences of many lengths fragment the GPU's memory; expandable segments avoid that.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that are not UTF-8
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the first step there is nothing to save
    try:
        finish = main()
        # The communication threads can abort at exit while a model is alive. `main` has returned,
        # so nothing but cycles refers to its model.
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        if finish:
            finish()
    except (Exception, dcp.CheckpointException) as error:  # DCP's is not an Exception
        code = 2 if isinstance(error, Refusal) and not Run.current else 1
        report(error)
        if Run.current:
            Run.current.close(code)
        # A regular shutdown with live communication threads can hang or abort.
        os._exit(code)


def report(error: BaseException) -> None:
    """Print why this rank ends, and leave it for the summary that torchrun prints at its end."""
    message = traceback.format_exc()
    first = os.environ["LOCAL_RANK"] == "0"  # of the ranks of this node
    is_cause = first or dist.is_initialized()  # before `init_process_group`, all ranks fail alike
    if isinstance(error, Refusal):
        message = f"error: {error}"
        error.__traceback__ = error.__context__ = error.__cause__ = None  # torchrun prints them
        is_cause = first
    elif lost_connection(error):
        is_cause = False
        message = (
            f"rank {os.environ['RANK']} lost another rank, or waited for it longer than "
            f"--timeout_minutes: {error!r:.400}"
        )
    elif isinstance(error, torch.OutOfMemoryError):
        message += (
            "error: out of GPU memory. The cheapest first: smaller --micro_batch_tokens, "
            "--activation_checkpointing selective, then full, more ranks, --cpu_offload true"
        )
    # torchrun kills every rank as soon as one exits, so the rank with the root cause prints first
    # and the others wait five seconds.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not is_cause:
        time.sleep(5)
    print(message, file=sys.stderr)
    get_error_handler().record_exception(error)


def refuse_non_finite(step: int, loss: float, grad_norm: float) -> None:
    """End the run if the loss or the gradient norm is not finite. Call it before the update."""
    if not math.isfinite(loss + grad_norm):
        refuse(
            f"step {step}: the loss ({loss}) or the gradient norm ({grad_norm}) is not finite; "
            "lower --learning_rate, or look at the data of this step"
        )


def refuse_untrained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """End the run if the first step left a parameter without a gradient on all ranks. A collective.

    The optimizer has no state for such a parameter, so no checkpoint could be resumed. Single ranks
    may lack gradients, as they may lack a shard.
    """
    of_ranks = gather(
        {name: p in optimizer.state for name, p in model.named_parameters() if p.requires_grad}
    )
    names = sorted(set().union(*of_ranks))
    nowhere = [name for name in names if not any(trained.get(name) for trained in of_ranks)]
    if nowhere:
        refuse(
            f"no gradient reaches {', '.join(nowhere[:3])}: freeze what the model does not "
            "use, or leave layers whose forward it does not call out of --target"
        )


# --- Ranks ----------------------------------------------------------------------------------------


def set_up_gpu(config: Flags) -> torch.device:
    """Choose the GPU of this rank, and how it computes; returns the device."""
    ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if ranks > gpus:
        refuse(
            f"{ranks} ranks cannot share {gpus} GPUs: use --nproc-per-node={gpus}, or "
            'CUDA_VISIBLE_DEVICES="" to train on CPUs'
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if config.precision == "fp32":
        # Use TF32 matmuls: several times faster, with 10 instead of 23 bits of mantissa.
        torch.set_float32_matmul_precision("high")
    # Use PyTorch's own attention kernels, or replace its FlashAttention 2, in SDPA and for packed
    # batches.
    version = config.flash_attention
    if version != "torch":
        major, minor = torch.cuda.get_device_capability()
        if major not in {"FA3": [9], "FA4": [9, 10]}[version]:
            refuse(
                f"--flash_attention {version} does not run on compute capability {major}.{minor}"
            )
        with refusing(
            f"--flash_attention {version} needs its package (FA4: pip install --pre flash-attn-4; "
            "FA3: build the folder hopper/ of github.com/Dao-AILab/flash-attention)"
        ):
            torch.nn.attention.activate_flash_attention_impl(version)
    # SDPA prefers cuDNN's attention. It builds a plan for each new shape, which costs more than it
    # saves unless padding keeps the number of shapes small.
    torch.backends.cuda.enable_cudnn_sdp(version == "torch" and config.pad_to_multiple_of > 1)
    return device


CORES = Path("/sys/devices/system/cpu")  # of Linux


def advise_on_threads() -> None:
    """Say how many threads an optimizer on the CPU could use. torchrun sets one per rank."""
    # The hardware threads of a core have the same list of CPUs.
    cores = {path.read_text() for path in CORES.glob("cpu*/topology/core_cpus_list")}
    threads = len(cores) // int(os.environ["LOCAL_WORLD_SIZE"])
    if threads > torch.get_num_threads():
        say(f"the optimizer runs on the CPU: export OMP_NUM_THREADS={threads}")


def max_over_ranks(*values: float) -> list[float]:
    """Return the largest of each number over all ranks. A collective."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


# Dense bf16 TFLOP/s with fp32 accumulation, by a pattern of a GPU's name. The first one counts.
# From NVIDIA's data sheets (which quote twice as much, with sparsity), for GeForce from its white
# papers on GA102, Ada and RTX Blackwell, for the A10G from AWS. GeForce cards run bf16 at half the
# rate of fp16 with fp16 accumulation, which advertisements quote. V100s have no bf16.
PEAK_TFLOPS = {
    "GB[23]00": 2500,
    "B[23]00": 2250,
    "H[12]00 NVL": 835,
    "H100 PCIe": 756,
    "G?H[12]00": 989,
    "H20": 148,
    "A100": 312,
    "A30": 165,
    "A40": 150,
    "A10": 125,
    "A10G": 70,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX PRO 6000": 504,
    "RTX 6000 Ada": 364,
    "RTX A6000": 155,
    "RTX A5000": 111,
    "RTX 5090$": 210,
    "RTX 4090$": 165,
    "RTX 3090$": 71,
}


def peak_tflops(name: str) -> float | None:
    """Return the peak of a GPU by its CUDA name, None if it is not known."""
    return next((PEAK_TFLOPS[key] for key in PEAK_TFLOPS if re.search(rf"\b{key}\b", name)), None)


# --- A run: its directory, metrics and progress ---------------------------------------------------


class Run:
    """A run's directory, metrics, terminal output and Weights & Biases. Rank 0 writes.

    Every rank creates one. It changes nothing in the directory until `begin`, which locks it.
    `facts` goes into config.json and the checkpoints. It must be equal on all ranks.

    Args:
        model: as it is before a strategy shards it.
        flops: of forward and backward, per token, target token and squared sequence length. Zeros
            if they are not known: `mfu` is null then.
        documents: of `common.load_documents`.
    """

    current = None  # the run of this process, once it trains
    checkpoints = wandb = profiler = None
    metrics = open(os.devnull, "a")  # rank 0 opens another file in `begin`
    printed = -math.inf  # when a step was printed last: never
    stop_signals = 0  # that this rank has received
    stopping = False  # because any rank has received one
    unvalidated = False  # a stop has cut off the validation of this step

    def __init__(
        self,
        config: Flags,
        model: transformers.PreTrainedModel,
        flops: tuple,
        tokenizer: common.Tokenizer,
        documents: Any,
        device: torch.device,
    ):
        self.config, self.flops, self.tokenizer, self.device = config, flops, tokenizer, device
        self.directory = Path(config.run_dir).absolute()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model_config, self.generation_config = model.config, model.generation_config
        if config.init_from:  # export in the same dtype
            model.config.dtype = transformers.AutoConfig.from_pretrained(config.init_from).dtype
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
        self.peak = (config.peak_tflops or peak_tflops(gpu)) if any(flops) else None

        data = documents.data
        self.num_documents = np.count_nonzero(data["num_targets"])
        self.num_tokens = np.sum(data["lengths"])
        architecture = model.config.to_diff_dict() | {"transformers_version": "", "dtype": ""}
        content = np.bitwise_xor(data["group"], data["lengths"])
        self.facts = vars(config) | {
            "weights_hash": config.init_from and weights_fingerprint(config.init_from),
            "model_hash": fingerprint(architecture),
            "tokenizer_hash": fingerprint(tokenizer.backend_tokenizer.to_str()),
            "data_hash": xxhash.xxh3_128_hexdigest(content),
            "parameters": model.num_parameters(),
            "world_size": self.world_size,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        for rank, facts in enumerate(gather(self.facts)):
            different = differences(facts, self.facts, facts)
            if different:
                refuse(f"rank {rank} has {', '.join(different)}")

    def save_files(self, directory: Path) -> None:
        """Write what a checkpoint's `hf/` holds beside the weights."""
        self.model_config.save_pretrained(directory)
        self.generation_config.to_json_file(directory / "generation_config.json")
        common.save_tokenizer(self.tokenizer, directory)

    def begin(self, checkpoints: common.Checkpoints, progress: dict, mesh: str, work: str) -> None:
        """Start training after `progress`: all checks have passed. A collective.

        Rank 0 locks the directory, drops the lines of metrics.jsonl that the checkpoint did not
        have, and says what begins: on which mesh, and the `work` of a step. From here on signals
        only request a stop.
        """
        config = self.config
        for group in dist.distributed_c10d._world.pg_map:  # a mesh has torch's default
            group.set_timeout(datetime.timedelta(minutes=config.timeout_minutes))
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signal_number, self.request_stop)
        if self.rank == 0:
            with refusing(f"--run_dir {self.directory} cannot be written or is in use", OSError):
                self.open_files(progress)
            if config.wandb_project:
                self.open_wandb(progress)
        if checkpoints.newest:
            say(f"resuming from {checkpoints.newest}")
        say(
            f"{self.facts['parameters']:,} parameters, {self.num_documents:,} documents, "
            f"{self.num_tokens:,} tokens; writing {config.run_dir}\n"
            f"{config.precision} on {counted(self.world_size, 'rank')} ({mesh}), {work}, "
            f"learning rate {config.learning_rate:g}"
        )
        if getattr(config, "cpu_offload", False):
            advise_on_threads()
        self.unvalidated = progress.get("unvalidated", False)
        self.trace(progress["step"])
        # All ranks collect garbage in the same step (`log_step`). Otherwise each would delay all
        # others in turn.
        gc.disable()
        self.checkpoints = checkpoints
        Run.current = self
        dist.barrier()

    def open_files(self, progress: dict) -> None:
        """Lock the directory, and write to it all that is known before the first step."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.metrics = open(f"{self.directory}/metrics.jsonl", "a", buffering=1)
        try:
            # This lock ends with the process, however it dies. Forks do not inherit it.
            fcntl.lockf(self.metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EAGAIN and EACCES: somebody else has it
            raise
        except OSError as error:  # some NFS and Lustre
            say(f"no file lock here ({error}): take care that no two runs write to one directory")
        common.write_json(self.directory / "config.json", self.facts)
        self.metrics.truncate(progress["metrics_bytes"])
        common.remove(self.directory / "hf")  # of fewer steps
        # The script and the files beside it that it imports, as they run now.
        script = Path(sys.argv[0]).absolute()
        for source in script.parent.glob("*.py"):
            if source == script or source.stem in sys.modules:
                shutil.copy(source, self.directory)

    def open_wandb(self, progress: dict) -> None:
        """Log to Weights & Biases as well. A resumed run continues there under the same id."""
        path = self.directory / "wandb_id"
        if progress["step"] == 0 or not path.exists():
            path.write_text(secrets.token_hex(8))
        with refusing("--wandb_project"):
            import wandb

            self.wandb = wandb.init(
                project=self.config.wandb_project,
                name=self.directory.name,
                id=path.read_text(),
                dir=self.directory,
                config=self.facts,
                resume="allow",
            )

    def request_stop(self, *_) -> None:
        self.stop_signals += 1

    def stops_validation(self) -> bool:
        """Return whether any rank got a signal to stop. A collective.

        If so, the validation ends without a line, and a resumed run does it first.
        """
        [self.stopping] = max_over_ranks(self.stop_signals)
        self.unvalidated = self.stopping > 0
        return self.unvalidated

    def position(self, step: int, tokens: int) -> dict:
        """Return what a checkpoint records of the progress."""
        return {
            "step": step,
            "tokens": tokens,
            "metrics_bytes": self.metrics.tell(),
            "unvalidated": self.unvalidated,
        }

    def trace(self, step: int) -> None:
        """Profile rank 0 from the first of --trace_steps to the last; `step` is done."""
        steps = self.config.trace_steps or [0]
        if self.rank == 0 and step + 1 == min(steps):
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if self.profiler and step == max(steps):
            self.profiler.stop()
            self.profiler.export_chrome_trace(f"{self.directory}/trace.json")

    def log(self, line: dict) -> None:
        """Write a line of metrics.jsonl, and log it to Weights & Biases."""
        print(json.dumps(line), file=self.metrics)
        if self.wandb:
            self.wandb.log(line, step=line["step"])  # it ignores what a resumed run repeats

    def log_step(
        self,
        step: int,
        batch: common.GlobalBatch,
        started: float,
        data_seconds: float,
        aim: str = "loss",
        **measured,
    ) -> None:
        """Log an optimizer step that started then, and print its `aim` every ten seconds."""
        now = time.perf_counter()
        seconds = now - started
        counts = batch.num_tokens, batch.num_targets, batch.squared_lengths
        flops = sum(each * count for each, count in zip(self.flops, counts))
        line = {
            "step": step,
            **measured,
            "padding_fraction": batch.padding_fraction,
            "tokens_per_second": batch.num_tokens / seconds,
            "step_seconds": seconds,
            "data_seconds": data_seconds,
            "mfu": self.peak and flops / seconds / self.world_size / self.peak / 1e12,
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
            # Each time the allocator found no room and had to return its cache to the driver.
            "allocator_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        }
        self.log(line)
        self.trace(step)
        if step % 100 == 0:
            gc.collect(1)  # what is new: the imports' objects would take longer than a step
        if step == self.config.steps or now - self.printed > 10:
            say(
                f"step {step}/{self.config.steps}  {aim} {line[aim]:.4f}  "
                f"norm {line['grad_norm']:.2f}  {line['tokens_per_second']:,.0f} tokens/s"
            )
            self.printed = now

    def log_validation(self, step: int, loss: float | None, bytes_per_target: float) -> None:
        """Log a validation, in nats per target token, under its training step (None: cut off)."""
        if loss is None:
            return
        line = {
            "step": step,
            "validation_loss": loss,
            "validation_perplexity": math.exp(min(loss, 700)),
        }
        if bytes_per_target:
            line["validation_bits_per_byte"] = loss / math.log(2) / bytes_per_target
        self.log(line)
        say(f"step {step}: validation loss {loss:.4f}")

    def finish(self, step: int, next_command: str, read: Callable = common.read_checkpoint) -> None:
        """End the run: rank 0 writes hf/ and says what is next. `read` is that of `export`."""
        config, checkpoint = self.config, self.checkpoints.newest
        if config.checkpoint_every == 0:
            say(f"ended after step {step}; no checkpoint and no hf/ (--checkpoint_every 0)")
        elif step < config.steps or self.unvalidated:
            say(
                f"stopped after step {step}, saved in {checkpoint or 'nothing yet'}; "
                "rerun the same command with --resume auto to continue"
            )
        elif self.rank == 0:
            with refusing(f"cannot write {self.directory}/hf ({checkpoint} is complete)"):
                common.export(checkpoint, self.directory / "hf", read=read)
            say(
                f"files: {config.run_dir}/metrics.jsonl, and hf/ beside it for transformers\n"
                f"try:   python sample.py {config.run_dir}"
            )
            if "stdlib" in config.dataset:  # the next script has no flags for other data
                say(f"next:  {next_command.format(run_dir=config.run_dir)}")
        self.close(0)

    def close(self, code: int) -> None:
        """Keep what is still being written when the program ends, also by an error."""
        with contextlib.suppress(Exception, dcp.CheckpointException):
            self.checkpoints.wait()
        if self.wandb:
            self.wandb.finish(exit_code=code)  # otherwise the last steps would be lost
