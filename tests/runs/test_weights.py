"""What is in a Hugging Face directory is what trains and what is exported."""

import copy
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import small_shape
from safetensors.torch import load_file, save_file
from launching import refused
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import common
from common import fetch_weights
from model import read_config, weights_fingerprint

TEXT = "don't  WE'LL 12345 e\u0301\n\n x"


def save_tokenizer(directory: Path, **settings) -> Path:
    """Save the bytes tokenizer with other settings in its tokenizer_config.json (None: without)."""
    copy.deepcopy(common.load_tokenizer("bytes")).save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: settings[key] for key in settings if settings[key]}))
    return directory


# --- Tokenizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPTNeoXTokenizer", "PreTrainedTokenizerFast"])
def test_ids_are_those_of_tokenizer_json(tmp_path, name, model_type):
    """transformers' class has another pre-tokenizer. A run's hf/ keeps the ids for everybody."""
    directory = save_tokenizer(tmp_path / "given", tokenizer_class=name)
    AutoConfig.for_model(model_type).save_pretrained(directory)
    tokenizer = common.load_tokenizer(str(directory))
    ids = list(TEXT.encode())
    assert common.encode_text(TEXT, tokenizer).tolist() == ids
    common.save_tokenizer(tokenizer, tmp_path / "hf")
    AutoConfig.for_model(model_type).save_pretrained(tmp_path / "hf")
    for trust in (False, None, True):
        again = AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=trust)
        assert again(TEXT)["input_ids"] == ids
        assert again.special_tokens_map == tokenizer.special_tokens_map


def test_the_class_knows_an_end_token_that_the_files_lack(tmp_path):
    """As those of gpt2 on the hub. Files without a tokenizer.json are refused."""
    directory = save_tokenizer(tmp_path, tokenizer_class="GPT2Tokenizer", eos_token=None)
    assert common.load_tokenizer(str(directory)).eos_token_id == 256
    (directory / "tokenizer.json").unlink()
    assert "is not bytes, a tiktoken encoding" in refused(common.load_tokenizer, str(directory))


@pytest.mark.parametrize("template", ["<bos> $A", "$A <eos>", "<bos> $A <eos>", "$A"])
def test_a_document_begins_as_the_tokenizer_begins_a_text(tmp_path, template):
    """And it ends with one eos token, whether the tokenizer writes that or not."""
    tokenizer = copy.deepcopy(common.load_tokenizer("bytes"))
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>"})
    special = [("<bos>", 257), ("<eos>", 258)]
    processor = processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.save_pretrained(tmp_path)
    tokens, *_ = common.tokenize_text({"text": "a<bos>b"}, common.load_tokenizer(str(tmp_path)))
    bos = [257] if "<bos>" in template else []
    assert tokens.tolist() == [*bos, *b"a<bos>b", 258]
    plain = AutoTokenizer.from_pretrained(tmp_path)
    assert tokens[:2].tolist() == plain("ab")["input_ids"][:2] or not bos


@pytest.mark.parametrize("asked", [True, False, None])
@pytest.mark.parametrize("template", ["<bos> $A", "$A"])
def test_add_bos_token_is_obeyed(tmp_path, template, asked):
    """Where it is not what tokenizer.json does. AutoTokenizer reads the same from a run's hf/."""
    tokenizer = copy.deepcopy(common.load_tokenizer("bytes"))
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    processor = processors.TemplateProcessing(single=template, special_tokens=[("<bos>", 257)])
    tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | ({} if asked is None else {"add_bos_token": asked})
    file.write_text(json.dumps(settings))
    loaded = common.load_tokenizer(str(tmp_path))
    ids = [257] * (template != "$A" if asked is None else asked) + [*b"ab"]
    assert common.encode_text("ab", loaded).tolist() == ids
    common.save_tokenizer(loaded, tmp_path / "hf")
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("ab")["input_ids"] == ids
    assert common.encode_text("ab", common.load_tokenizer(str(tmp_path / "hf"))).tolist() == ids


# --- Weights --------------------------------------------------------------------------------------


def save_model(directory: Path, **settings) -> dict[str, torch.Tensor]:
    """Save a small model; returns the tensors of its files."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(small_shape(**settings)).save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def load(directory: Path) -> torch.nn.Module:
    """Load the weights of a directory as a script does."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    common.load_weights(model, fetch_weights(str(directory)))
    return model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "name", ["model.fp16", "a_backup", "adapter_model", "model-00003-of-00003"]
)
@pytest.mark.parametrize("shards", [False, True])
def test_only_files_that_transformers_reads(tmp_path, name, shards):
    """One beside them would be read, too, and might win."""
    tensors = save_model(tmp_path)
    if shards:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        model.save_pretrained(tmp_path, max_shard_size="100KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load(tmp_path).state_dict()
    assert all(loaded[key].equal(tensor) for key, tensor in tensors.items())
    other = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    save_file(other, tmp_path / f"{name}.safetensors")
    assert "is in several files" in refused(load, tmp_path)


@pytest.mark.usefixtures("one_rank")
def test_a_tensor_in_two_files_is_refused(tmp_path):
    tensors = save_model(tmp_path)
    names = sorted(tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({names[0]: tensors[names[0]]}, tmp_path / "b.safetensors")
    weight_map = dict.fromkeys(names[1:], "a.safetensors") | {names[0]: "b.safetensors"}
    common.write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    assert f"{names[0]} is in several files" in refused(load, tmp_path)


def test_quantized_weights_are_refused(tmp_path):
    save_model(tmp_path, quantization_config={"quant_method": "fp8"})
    config = SimpleNamespace(model=str(tmp_path), batching="bucketed", max_length=8)
    assert "its quantization_config is not supported" in refused(read_config, config, 257)


@pytest.mark.usefixtures("one_rank")
def test_tensors_of_other_names_are_refused(tmp_path):
    """As those of vision-language models, and experts that are stored one by one."""
    tensors = save_model(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"language_model." + key: tensor for key, tensor in tensors.items()}, file)
    assert "which the model lacks (docs/runs.md says" in refused(load, tmp_path)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("size", [4, 100, -100])
def test_a_file_that_was_cut_is_refused(tmp_path, size):
    """In its length, its header, and its last tensor: a download that did not end."""
    save_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert f"--init_from {tmp_path}: " in refused(load, tmp_path)


@pytest.mark.usefixtures("one_rank")
def test_a_head_under_a_tied_config_is_refused(tmp_path):
    """transformers would untie them if they differ. The head was dropped without a word."""
    tensors = save_model(tmp_path, tie_word_embeddings=True)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    assert "it has a lm_head.weight" in refused(load, tmp_path)


def test_weights_are_known_by_their_files(tmp_path):
    """Of large ones, the first and the last MiB. The file is sparse."""
    known = partial(weights_fingerprint, str(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(bytes(3 * 2**20))
    (tmp_path / "config.json").write_text("{}")
    seen = [known()]
    (tmp_path / "config.json").unlink()
    assert known() == seen[0]
    for size, place in ((3, 1.5), (1024, 0.5), (1024, 1023.5), (1024, 512)):  # MiB
        with open(tmp_path / "a.safetensors", "r+b") as file:
            file.truncate(size * 2**20)
            file.seek(int(place * 2**20))
            file.write(b"1")
        seen.append(known())
    assert len({*seen}) == 4 and seen[-1] == seen[-2]
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    assert known() not in seen
    (tmp_path / "b.safetensors").write_bytes(b"")
    assert refused(known).startswith(f"cannot read {tmp_path}: ")
