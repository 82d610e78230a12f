"""Write the inputs of programs.py, the same on every machine: python inputs.py [FOLDER].

documents.jsonl and conversations.jsonl of invented words, weights of two tiny models (dense and
mixture of experts) under the names that the scripts read, and config.json files of real sizes. The
scripts draw initial weights on the device, where CPU and GPU differ, so runs that are compared
start from these.
"""

import json
import sys

import kit
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from model import build_config
from run import Flags

QWEN2 = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 50304},
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
           "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 50304},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 50304},
    # with the vocabulary of Qwen2.5, for fine-tuning and sampling
    "0.5b-chat": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                  "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936},
}  # fmt: skip


def text(rng: np.random.Generator, words: list[str], size: int) -> str:
    return " ".join(rng.choice(words, size))


def main() -> None:
    folder = kit.INPUTS if len(sys.argv) < 2 else kit.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    words = ["".join(rng.choice(letters, rng.integers(1, 9))) for _ in range(200)]
    with (folder / "documents.jsonl").open("w") as file:
        for _ in range(600):
            size = int(np.clip(rng.lognormal(3.5, 1), 3, 300))
            file.write(json.dumps({"text": text(rng, words, size)}) + "\n")
    with (folder / "conversations.jsonl").open("w") as file:
        for _ in range(400):
            size = int(np.clip(rng.lognormal(3, 1), 3, 150))
            prompt, answer = text(rng, words, size), text(rng, words, int(rng.integers(3, 30)))
            file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")
    for name, shape in {"dense": "tiny", "moe": "tiny-moe"}.items():
        torch.manual_seed(0)
        config = build_config(Flags(model=shape), 320, 256)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / name, save_original_format=False)
    for name, shape in QWEN2.items():
        config = AutoConfig.for_model(
            "qwen2", tie_word_embeddings=True, max_position_embeddings=32768,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **shape,
        )  # fmt: skip
        config.save_pretrained(folder / name)


main()
