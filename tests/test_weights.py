"""What is in a Hugging Face directory is what trains and what is exported."""

import copy
import json
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import AutoConfig, AutoTokenizer

import common

TEXT = "don't  WE'LL 12345 e\u0301\n\n x"


def save_tokenizer(directory: Path, **settings) -> Path:
    """Save the bytes tokenizer with other settings in its tokenizer_config.json (None: without)."""
    copy.deepcopy(common.load_tokenizer("bytes")).save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: settings[key] for key in settings if settings[key]}))
    return directory


def refused(function, *arguments) -> str:
    """Return the one line on stderr with which a call is refused."""
    with pytest.raises(common.Refusal) as end:
        function(*arguments)
    line = str(end.value)
    assert "\n" not in line
    return line


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
    load_uncached = common.load_tokenizer.__wrapped__
    assert "tokenizer.json" in refused(load_uncached, str(directory))


@pytest.mark.parametrize("template", ["<bos> $A", "$A <eos>", "<bos> $A <eos>", "$A"])
def test_a_document_begins_as_the_tokenizer_begins_a_text(tmp_path, template):
    """And it ends with one eos token, whether the tokenizer writes that or not."""
    tokenizer = copy.deepcopy(common.load_tokenizer("bytes"))
    del tokenizer.encoding
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
