"""Check what everything else stands on, one thing after the other: python preflight.py

Versions, the two ceilings of the card, NCCL with one rank, the compiler, each attention kernel
against a reference, ring attention as two ranks would run it, grouped matmuls, float8, and the
copies that checkpoints make. Every check reports for itself.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import kit
import torch
import torch.distributed as dist
from kit import distance, emit, guarded, seconds_of, synchronize
from torch.nn import functional as F

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
# Positions, heads, key/value heads, head size: those of qwen2-0.5b, or less
LENGTH, HEADS, GROUPS, SIZE = (2048, 14, 2, 64) if GPU else (256, 4, 2, 48)
HALF = torch.bfloat16


def versions() -> None:
    names = "torch triton transformers datasets pyarrow pydantic huggingface_hub tokenizers "
    names += "safetensors xxhash filelock fsspec numpy pandas torchao"
    found = {}
    for name in names.split():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    more: dict[str, Any] = {"python": sys.version.split()[0], "cpus": len(os.sched_getaffinity(0))}
    more["free_gb"] = {path: shutil.disk_usage(path).free // 10**9 for path in ("/tmp", ".")}
    if GPU:
        properties = torch.cuda.get_device_properties(0)
        more |= {"gpu": properties.name, "memory_gib": properties.total_memory / 2**30}
        more |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        more["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        smi = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,clocks.sm,persistence_mode"]
        done = subprocess.run([*smi, "--format=csv,noheader"], capture_output=True, text=True)
        more["driver, mode, clock, persistence"] = done.stdout.strip()
    emit("preflight", "versions", **found, **more)


def bytes_per_second() -> float:
    """Return the bytes that a copy on the device reads and writes in a second."""
    memory = torch.randn((1 << 30) if GPU else (1 << 22), device=DEVICE)
    copied = torch.empty_like(memory)
    return 2 * memory.nbytes / seconds_of(lambda: copied.copy_(memory))


def ceilings() -> None:
    """The two numbers to compare all others with: matmul and memory."""
    size = 8192 if GPU else 512
    a, b = (torch.randn(size, size, device=DEVICE, dtype=HALF) for _ in range(2))
    taken = seconds_of(lambda: a @ b)
    emit(
        "preflight", "ceilings",
        matmul_tflops=2 * size**3 / taken / 1e12, copy_tb_per_s=bytes_per_second() / 1e12,
    )  # fmt: skip
    if GPU:
        pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
        to = torch.empty_like(pinned, device=DEVICE)
        up = seconds_of(lambda: to.copy_(pinned, non_blocking=True))
        down = seconds_of(lambda: pinned.copy_(to, non_blocking=True))
        emit("preflight", "pinned copies", up_gb_per_s=0.268 / up, down_gb_per_s=0.268 / down)
    file, began = kit.OUT / "written", time.perf_counter()
    file.write_bytes(os.urandom(1 << 20) * (512 if GPU else 8))
    os.sync()
    seconds = time.perf_counter() - began
    emit("preflight", "disk", gb_per_s=file.stat().st_size / seconds / 1e9)
    file.unlink()


def start() -> None:
    """The script's own start: NCCL with one rank, gloo beside it."""
    import common
    import fsdp2_pretrain as script

    began = time.perf_counter()
    config = script.Config(precision="bf16")
    script.init_process_group(config)
    joined = time.perf_counter() - began
    tensor = torch.ones(1 << 20, device=DEVICE)
    dist.all_reduce(tensor)
    half = torch.empty_like(tensor)
    dist.reduce_scatter_tensor(half, tensor)
    dist.all_gather_into_tensor(half, tensor)
    dist.all_to_all_single(half, tensor)
    group = dist.new_group(backend="gloo", timeout=timedelta(minutes=1))
    dist.barrier()
    dist.barrier(group)
    common.gather({"a": 1})
    dist.group.WORLD.monitored_barrier(timedelta(minutes=1))
    for of in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(minutes=1), of)
    synchronize()
    emit(
        "preflight", "one rank", join_seconds=joined,
        seconds=time.perf_counter() - began, backend=str(dist.get_backend_config()),
    )  # fmt: skip


def compiler() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * x.sum(-1, keepdim=True)

    x = torch.randn(64, 512, device=DEVICE, requires_grad=True)
    began = time.perf_counter()
    compiled = torch.compile(function)
    output = compiled(x)
    output.sum().backward()
    synchronize()
    seconds = time.perf_counter() - began
    emit("preflight", "compiler", first_seconds=seconds, distance=distance(output, function(x)))


def heads(length: int, number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.randn(1, number, length, SIZE, device=DEVICE, dtype=torch.float32)
    return tensor.to(dtype).requires_grad_()


def gradients(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    weight = torch.randn(output.shape, device=DEVICE).to(output.dtype)
    return list(torch.autograd.grad(output, inputs, weight))


def packed_attention() -> None:
    """Variable-length attention with grouped heads and empty documents, against each alone."""
    from model import attend_one_by_one, document_attention

    torch.manual_seed(0)
    half = [heads(LENGTH, n, HALF) for n in (HEADS, GROUPS, GROUPS)]
    full = [tensor.detach().float().requires_grad_() for tensor in half]
    ends = [0, 17, LENGTH // 8, LENGTH // 2, LENGTH // 2 + 1, LENGTH - 5, LENGTH, LENGTH, LENGTH]
    boundaries = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    module = torch.nn.Module()
    arguments = {"cu_seq_lens_q": boundaries, "max_length_q": LENGTH}
    output, _ = document_attention(module, *half, None, **arguments)
    reference = attend_one_by_one(*full, boundaries, None)
    halves = attend_one_by_one(*half, boundaries, None)
    found, expected = gradients(output, half), gradients(reference, full)
    by_half = gradients(halves, half)
    emit(
        "preflight", "packed attention",
        output=distance(output, reference), output_of_sdpa_bf16=distance(halves, reference),
        gradients=[distance(a, b) for a, b in zip(found, expected)],
        gradients_of_sdpa_bf16=[distance(a, b) for a, b in zip(by_half, expected)],
    )  # fmt: skip


def ring_attention() -> None:
    """Each of two ranks of ring attention, played by one process, against full causal attention."""
    import fsdp2_cp_pretrain as script

    torch.manual_seed(0)
    length, dtype = LENGTH // 2, HALF if GPU else torch.float32
    full = [heads(2 * length, n) for n in (HEADS, GROUPS, GROUPS)]
    chunks = [[0, 3], [1, 2]]  # of the sequence, an early and a late one for each rank

    def own(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        quarters = tensor.chunk(4, dim=2)
        return torch.cat([quarters[i] for i in chunks[rank]], dim=2)

    reference = F.scaled_dot_product_attention(*full, is_causal=True, enable_gqa=True)
    parts = [[own(tensor, rank).detach().to(dtype) for tensor in full] for rank in (0, 1)]
    keys_values = [torch.stack(part[1:]) for part in parts]
    plain = script.travel, script.pass_on
    for rank in (0, 1):
        group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        script.travel = lambda tensor, group, rank=rank: iter(
            [keys_values[rank], keys_values[1 - rank]]
        )
        script.pass_on = lambda tensor, group: tensor  # so gradients of both turns add up
        try:
            query = parts[rank][0].clone().requires_grad_()
            traveling = keys_values[rank].clone().requires_grad_()
            output = script.RingAttention.apply(query, traveling, None, group)
            weight = torch.randn_like(output)
            of_query, of_keys = torch.autograd.grad(output, [query, traveling], weight)
        finally:
            script.travel, script.pass_on = plain
        mine = own(reference, rank)
        expected = torch.autograd.grad(mine, full, weight.float(), retain_graph=True)
        both = torch.stack([own(expected[1], r) for r in (0, 1)]).sum(0)
        values = torch.stack([own(expected[2], r) for r in (0, 1)]).sum(0)
        emit(
            "preflight", f"ring attention, rank {rank} of 2",
            output=distance(output, mine),
            of_query=distance(of_query, own(expected[0], rank)),
            of_keys=distance(of_keys[0], both), of_values=distance(of_keys[1], values),
            expected="below 0.02 in bf16; else the gradients are wrong",
        )  # fmt: skip


def kernels() -> None:
    """Forward and backward of each attention kernel for 16,384 positions, in milliseconds."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch = 16384 // LENGTH if GPU else 1
    shapes = [(batch, n, LENGTH, SIZE) for n in (HEADS, GROUPS, GROUPS)]
    inputs = [torch.randn(s, device=DEVICE, dtype=HALF, requires_grad=True) for s in shapes]
    flops = 3.5 * 2 * 2 * batch * HEADS * LENGTH * LENGTH * SIZE / 2  # causal
    torch.backends.cuda.enable_cudnn_sdp(True)
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        with guarded("preflight", f"attention {name}"), sdpa_kernel(getattr(SDPBackend, name)):

            def both() -> None:
                output = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
                output.backward(output)

            seconds = seconds_of(both)
            rate = flops / seconds / 1e12
            emit("preflight", f"attention {name}", ms=seconds * 1e3, tflops=rate)
    if GPU:
        from torch.nn.attention.varlen import varlen_attn

        flat = [t.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for t in inputs]
        ends = torch.arange(0, 16384 + 1, LENGTH, dtype=torch.int32, device=DEVICE)

        def packed() -> None:
            output = varlen_attn(
                *flat, ends, ends, LENGTH, LENGTH, window_size=(-1, 0), enable_gqa=True
            )
            output.backward(output)

        seconds = seconds_of(packed)
        emit("preflight", "attention varlen", ms=seconds * 1e3, tflops=flops / seconds / 1e12)


def new_shapes() -> None:
    """What the first call of each kernel with a new length costs: cuDNN plans a kernel for each."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        with guarded("preflight", f"new lengths {name}"), sdpa_kernel(getattr(SDPBackend, name)):
            taken = []
            for length in range(501, 511):
                shapes = [(4, n, length, SIZE) for n in (HEADS, GROUPS, GROUPS)]
                inputs = [
                    torch.randn(s, device=DEVICE, dtype=HALF, requires_grad=True) for s in shapes
                ]
                synchronize()
                began = time.perf_counter()
                output = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
                output.backward(output)
                synchronize()
                taken.append(time.perf_counter() - began)
            emit("preflight", f"new lengths {name}", ms=1e3 * sorted(taken)[len(taken) // 2])


def experts() -> None:
    """Grouped matmuls with uneven and empty groups, against a loop."""
    counts = torch.tensor([37, 0, 5, 66, 17, 0, 103, 28], device=DEVICE)
    ends = counts.cumsum(0, dtype=torch.int32)
    dtype = HALF if GPU else torch.float32
    rows = torch.randn(256, 192, device=DEVICE, dtype=dtype, requires_grad=True)
    weight = torch.randn(8, 320, 192, device=DEVICE, dtype=dtype, requires_grad=True)
    output = F.grouped_mm(rows, weight.mT, offs=ends)
    parts = rows.float().split(counts.tolist())
    reference = torch.cat([part @ w.float().mT for part, w in zip(parts, weight)])
    found, expected = gradients(output, [rows, weight]), gradients(reference, [rows, weight])
    both = [distance(a, b) for a, b in zip(found, expected)]
    emit("preflight", "grouped matmuls", output=distance(output, reference), gradients=both)


def float8() -> None:
    from model import use_float8

    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(896, 4864, bias=False)).to(DEVICE, HALF)
    model = SimpleNamespace(get_decoder=lambda: inner)
    x = torch.randn(4096, 896, device=DEVICE, dtype=HALF, requires_grad=True)
    plain = inner(x)
    expected = gradients(plain, [x, inner[0].weight])
    use_float8(model)
    output = inner(x)
    found = gradients(output, [x, inner[0].weight])
    both = [distance(a, b) for a, b in zip(found, expected)]
    emit(
        "preflight", "float8", layer=type(inner[0]).__name__,
        output=distance(output, plain), gradients=both,
    )  # fmt: skip
    # Bucketed micro-batches have any number of tokens. The gradient of the weight sums over them.
    with guarded("preflight", "float8, a number of tokens that 16 does not divide"):
        gradients(inner(x[: 4100 - 8]), [inner[0].weight])
        emit("preflight", "float8, a number of tokens that 16 does not divide", ok=True)


def staging() -> None:
    """The pinned copy of --async_checkpoint: equal, and the second one reuses the memory."""
    from torch.distributed.checkpoint import staging as dcp

    stager = dcp.BlockingAsyncStager(GPU)
    whole = torch.randn(3, 1 << 22, device=DEVICE)
    state = {"model": {"a": whole[1], "b": torch.randn(7, device=DEVICE)}, "step": 3}
    equal = []
    for _ in range(2):
        staged = stager.stage(state)
        equal.append(
            all(torch.equal(staged["model"][k].cpu(), state["model"][k].cpu()) for k in "ab")
        )
        state["model"]["a"].add_(1)
    began = time.perf_counter()
    stager.stage(state)
    synchronize()
    seconds = time.perf_counter() - began
    emit("preflight", "staging", equal=equal, gb_per_s=whole.nbytes / seconds / 1e9)


def main() -> None:
    kit.quiet()
    kit.alone()
    # The compiler last but for the timings: it takes longest.
    checks = [versions, ceilings, start, packed_attention, ring_attention, experts, staging, float8]
    for check in [*checks, compiler, kernels, new_shapes]:
        with guarded("preflight", check.__name__):
            kit.need(5)
            check()
        sys.stdout.flush()
    os._exit(0)


main()
