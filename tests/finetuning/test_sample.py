"""sample.py: what it loads and refuses, and what a chat sends to the model."""

import subprocess
import sys

import pytest
import torch
import transformers
from launching import ROOT, small_shape

import common
import conversations
import fsdp2_sft
import sample

transformers.logging.disable_progress_bar()  # its lines would stand beside those that are tested
PLAIN = common.load_tokenizer("bytes")
CHAT = conversations.chat_tokenizer(fsdp2_sft.Config(), "new tokens")[0]


def save_model(directory, tokenizer=PLAIN) -> None:
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(small_shape())
    model.save_pretrained(directory)
    common.save_tokenizer(tokenizer, directory)


def type_in(monkeypatch, *lines: str) -> None:
    """Let `input` return these lines, and then end as on Ctrl-D."""
    left = list(lines)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr("builtins.input", read)


def ask(monkeypatch, capsys, *words: str, typed: tuple = ()) -> tuple[int, str, str]:
    """Run sample.py; returns its exit code, and what it writes to stdout and stderr."""
    type_in(monkeypatch, *typed)
    monkeypatch.setattr(sys, "argv", ["sample.py", *words])
    monkeypatch.setitem(sample.OPTIONS, "max_new_tokens", 12)
    code = 0
    try:
        sample.main()
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


class Parrot:
    """Stands in for a model: keeps what it is given, and answers with the text of its own."""

    device = "cpu"

    def __init__(self, *answers: str):
        self.answers, self.given = list(answers), []

    def generate(self, ids, streamer, **options):
        self.given.append(CHAT.decode(ids[0]))
        answer = CHAT(self.answers.pop(0), return_tensors="pt")["input_ids"]
        return torch.cat([ids, answer], 1)


def test_a_chat_keeps_the_conversation(monkeypatch):
    type_in(monkeypatch, "one", "two")
    parrot = Parrot("<|begin_of_thought|>\nyes<|im_end|>", "cut")
    with pytest.raises(EOFError):
        sample.chat(parrot, CHAT)
    first, second = parrot.given
    assert first == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    answer = "<|begin_of_thought|>\nyes<|im_end|>\n"
    assert second == f"{first}{answer}<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"


def test_a_run_is_continued_or_talked_to(monkeypatch, capsys, tmp_path):
    save_model(tmp_path / "base/hf")
    save_model(tmp_path / "tuned/hf", CHAT)
    base, tuned = str(tmp_path / "base"), str(tmp_path / "tuned")
    code, printed, _ = ask(monkeypatch, capsys, base, "--prompt", "def ")
    assert code == 0 and printed.startswith("def ") and len(printed) > len("def ")
    code, printed, _ = ask(monkeypatch, capsys, f"{base}/hf", "--prompt", "def ")
    assert code == 0 and printed.startswith("def ")
    # It has no chat template. What is empty cannot be continued.
    code, printed, _ = ask(monkeypatch, capsys, base, "--prompt", "", typed=("", "def "))
    assert code == 0 and printed.startswith("def ") and len(printed) > len("def ")
    code, printed, _ = ask(monkeypatch, capsys, tuned, typed=("hello",))
    assert code == 0 and printed.strip() and "hello" not in printed  # the prompt is not repeated


@pytest.mark.parametrize(
    "name, words, reason",
    [
        ("base", ("--promt", "a"), "unrecognized arguments: --promt a"),
        ("unfinished", (), "python common.py export {}/checkpoints/step_00000020 {}/hf"),
        ("adapter", (), "(adapters need `pip install peft`)"),
        ("nothing", (), "nothing is not a run, and transformers cannot load it"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(monkeypatch, capsys, tmp_path, name, words, reason):
    save_model(tmp_path / "base/hf")
    for step in ("step_00000003", "step_00000020", "step_00000021.tmp"):
        (tmp_path / "unfinished/checkpoints" / step).mkdir(parents=True)
    (tmp_path / "unfinished/metrics.jsonl").touch()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    monkeypatch.setattr("transformers.models.auto.auto_factory.is_peft_available", lambda: False)
    code, printed, said = ask(monkeypatch, capsys, str(tmp_path / name), *words)
    assert code == 2 and printed == ""
    said = "".join(line for line in said.splitlines(True) if "Loading weights" not in line)
    [line] = said.splitlines()
    assert line.startswith("error: ") and reason.format(*2 * [tmp_path / name]) in line


def test_adapters_are_loaded_with_their_base(monkeypatch, capsys, tmp_path):
    """In PEFT's form, as fsdp2_lora.py writes it."""
    peft = pytest.importorskip("peft")
    save_model(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    wanted = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(base, wanted).save_pretrained(tmp_path / "adapter")
    common.save_tokenizer(PLAIN, tmp_path / "adapter")
    code, printed, _ = ask(monkeypatch, capsys, str(tmp_path / "adapter"), "--prompt", "def ")
    assert code == 0 and printed.startswith("def ")


def test_it_streams_from_a_terminal(tmp_path):
    """The program itself, without a network: a message, and the end of the input."""
    save_model(tmp_path / "hf", CHAT)
    (tmp_path / "sample.py").write_text(
        (ROOT / "sample.py").read_text().replace('"max_new_tokens": 300', '"max_new_tokens": 9')
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "sample.py", tmp_path], input="hello\n", capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("> ") and len(done.stdout) > len("> \n> \n")
