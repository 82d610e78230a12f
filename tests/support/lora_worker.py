"""Train adapters in every mode in one launch (see cases.py); test_lora.py checks it."""

import hashlib
import itertools

import cases  # also adds the root, tools and bench to sys.path
import collectives
import shared
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import common
import fsdp2_lora as script
from run import micro_batches_per_rank

CPU = torch.device("cpu")
DATA: dict = {}


def data_of(config) -> tuple:
    """Return batches for training and validation, and the model's architecture."""
    key = (config.init_from, config.batching, config.micro_batch_tokens)
    if key not in DATA:
        DATA[key] = shared.load_data(script, config)
    return DATA[key].training, DATA[key].validation, DATA[key].model_config


def digest(model: torch.nn.Module) -> str:
    """Return a hash of this rank's shards of the frozen parameters."""
    for module in model.modules():
        if hasattr(module, "reshard"):  # a validation leaves the root unsharded
            module.reshard()
    found = hashlib.sha1()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            local = getattr(parameter.detach(), "_local_tensor", parameter.detach())
            found.update(name.encode())
            found.update(local.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def full(parameter: torch.Tensor) -> torch.Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor().clone() if isinstance(parameter, DTensor) else parameter.clone()


def without_adapters(self: script.LoraLinear, inputs: torch.Tensor) -> torch.Tensor:
    if self.is_quantized:
        values = self.values.to(inputs.dtype)
        return script.QuantizedLinear.apply(inputs, self.weight, self.bias, values)
    return torch.nn.functional.linear(inputs, self.weight, self.bias)


def train(case: str, flags: dict) -> dict:
    """Return losses and norms of some steps, the adapters before and after, and what is frozen."""
    config = script.Config(**flags)
    compiled = torch._dynamo.utils.counters["stats"]
    compiled.clear()
    training, validation, model_config = data_of(config)
    training.config = validation.config = config
    model, optimizer = shared.build(script, model_config, config, CPU)
    script.load_weights(model, config.init_from)
    seen: dict = {"losses": [], "norms": []}
    frozen = digest(model)
    adapters = script.adapters_of(model)
    seen["before"] = {name: full(p) for name, p in adapters.named_parameters()}
    seen["rows"] = [p.to_local().shape[0] for p in adapters.parameters()]
    seen["start"] = seen["base"] = shared.evaluate(script, model, validation, config, CPU)
    if not config.compile:  # graphs would keep the forward that they were made of
        forward, script.LoraLinear.forward = script.LoraLinear.forward, without_adapters
        seen["base"] = shared.evaluate(script, model, validation, config, CPU)
        script.LoraLinear.forward = forward
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = training.stream(0, micro_batches_per_rank(config, ranks), rank, ranks)
    for step, batch in enumerate(itertools.islice(batches, config.steps), 1):
        measured = script.train_step(model, optimizer, batch, step, config, CPU)
        seen["losses"].append(measured["loss"])
        seen["norms"].append(measured["grad_norm"])
    seen["graphs"] = compiled["unique_graphs"]
    seen["after"] = {name: full(p) for name, p in adapters.named_parameters()}
    seen["validation"] = shared.evaluate(script, model, validation, config, CPU)
    seen["frozen as before"] = all(common.gather(frozen == digest(model)))
    frozen_gradients = [p.grad for p in model.parameters() if not p.requires_grad]
    seen["frozen gradients"] = sum(gradient is not None for gradient in frozen_gradients)
    updated = sum(len(group["params"]) for group in optimizer.param_groups)
    seen["updated"] = updated - len(seen["after"])
    with collectives.Ledger() as ledger:
        script.train_step(model, optimizer, batch, config.steps, config, CPU)
    kinds = ("all-gather", "reduce-scatter")
    seen["sent"] = sum(call.sent for call in ledger.calls if call.kind in kinds)
    return seen


def main() -> None:
    script.init_process_group(script.Config(global_batch_tokens=4096 * 4))
    cases.leave(cases.each(train))


if __name__ == "__main__":
    main()
