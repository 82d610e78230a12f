"""Talk to a model: continue a text, or chat.

    python sample.py runs/fsdp2_pretrain --prompt "def "
    python sample.py runs/fsdp2_sft

The model is a run directory, a Hugging Face directory (also one of PEFT's adapters, if `peft` is
installed), or a hub id. Without --prompt, type a message, or a text to continue if the model has no
chat template. Ctrl-D ends the chat.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

OPTIONS = {"max_new_tokens": 300, "do_sample": True, "temperature": 0.6}


def refuse(message: str) -> NoReturn:
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def find_model(name: str) -> str:
    """Return what transformers can load: the hf/ of a run directory, otherwise the name itself."""
    if Path(name, "hf").is_dir():
        return f"{name}/hf"
    if Path(name, "metrics.jsonl").exists():
        newest = max(Path(name, "checkpoints").glob("step_*[0-9]"), default="CHECKPOINT")
        refuse(
            f"{name} has no hf/, because the end of a run writes it: rerun its command, or (not "
            f"with adapters) export a checkpoint: python common.py export {newest} {name}/hf"
        )
    return name


def generate(model, tokenizer, ids: torch.Tensor, skip_prompt: bool) -> list:
    """Print the tokens that follow the ids as the model generates them, and return them."""
    ids = ids.to(model.device)
    # Nothing is padded: say so, otherwise transformers guesses a mask.
    options = OPTIONS | {"attention_mask": torch.ones_like(ids)}
    options["pad_token_id"] = tokenizer.eos_token_id
    output = model.generate(ids, streamer=TextStreamer(tokenizer, skip_prompt), **options)
    return output[0, ids.shape[1] :].tolist()


def chat(model, tokenizer) -> NoReturn:
    """Answer messages until the input ends. All earlier ones are in the context."""
    messages = []
    while True:
        messages.append({"role": "user", "content": input("> ")})
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        answer = generate(model, tokenizer, encoded["input_ids"], skip_prompt=True)
        if answer[-1] in tokenizer.added_tokens_decoder:
            answer.pop()  # the token that ends a turn: the template writes it again
        messages.append({"role": "assistant", "content": tokenizer.decode(answer)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="a run directory, a Hugging Face directory, or a hub id")
    parser.add_argument("--prompt", help="a text to continue")
    parser.error = refuse
    config = parser.parse_args()
    name = find_model(config.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        refuse(
            f"{name} is not a run, and transformers cannot load it (adapters need `pip install "
            f"peft`): {str(error)[:300]}"
        )
    model.to(torch.accelerator.current_accelerator(check_available=True))
    try:
        text = config.prompt
        if tokenizer.chat_template and not text:
            chat(model, tokenizer)
        while not text:  # there is nothing to continue
            text = input("text to continue: ")
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        generate(model, tokenizer, ids, skip_prompt=False)
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    main()
