"""What a file says is what trains: no reader guesses types, and one bad row costs one row."""

import json
import os
from pathlib import Path

import datasets
import pyarrow
import pytest
from launching import all_of, data_config
from pyarrow import parquet

import common


def keep(row: dict, tokenizer) -> tuple:
    """Tokenize a row as its JSON, so that a test sees what `tokenize` passes on."""
    text = json.dumps(row, ensure_ascii=False)
    return [*text.encode(), 256], [True] * (len(text.encode()) + 1), text, 0


def rows_of(path, columns: list[str]) -> list[dict]:
    """Return the rows that a file gives, in its order."""
    config = data_config(dataset=path if isinstance(path, list) else str(path))
    documents = all_of(common.load_documents(config, columns, keep, common.load_tokenizer("bytes")))
    found = [documents.read(i)[0][:-1] for i in range(len(documents.lengths))]
    return [json.loads(bytes(tokens.tolist())) for tokens in found]


VALUES = ["007", 7, 1.5, True, None, "1.10", "NA", "2024-01-01", "42", '"quoted"', '{"a": 1}']
VALUES += ["a\nb", "\u2028", "\r", ["parts", {"text": "x"}], {"nested": {"deep": [1, "2"]}}]


def test_each_row_of_jsonl_has_its_own_types(tmp_path):
    """datasets would write all of a column as JSON texts, or parse texts that look like JSON."""
    rows = [{"value": value, "other": 1} for value in VALUES] + [{"late": "x"}]
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    expected = [{name: row[name] for name in row if name != "other"} for row in rows]
    assert rows_of(file, ["value", "late"]) == expected


def test_a_broken_line_costs_one_line(tmp_path, capfd):
    """A byte order mark, as Windows writes it, costs nothing."""
    lines = ['\ufeff{"text": "a"}', '{"text": ', "", "7", "[1]", '"text"', '{"text": "b"}', "{}"]
    file = tmp_path / "broken.jsonl"
    file.write_text("\n".join(lines))
    config = data_config(dataset=str(file))
    tokenizer = common.load_tokenizer("bytes")
    documents = all_of(common.load_documents(config, ["text"], common.tokenize_text, tokenizer))
    said = capfd.readouterr().out
    assert [bytes(documents.read(i)[0][:-1].tolist()) for i in range(2)] == [b"a", b"b"]
    assert "2 documents are left out, because they are broken JSON" in said
    assert "4 documents are left out, because they hold no text" in said


def test_half_a_surrogate_pair_costs_one_row(tmp_path, capfd):
    """As an escape in JSON it is valid UTF-8, but no text."""
    file = tmp_path / "half.jsonl"
    file.write_text('{"text": "a \\ud83d"}\n{"text": "\\ud83d\\ude00"}\n')
    config, tokenizer = data_config(dataset=str(file)), common.load_tokenizer("bytes")
    documents = all_of(common.load_documents(config, ["text"], common.tokenize_text, tokenizer))
    [length] = documents.lengths
    assert bytes(documents.read(0)[0][:length].tolist()).decode() == "\U0001f600"
    assert "because they hold half a surrogate pair" in capfd.readouterr().out


@pytest.mark.parametrize("value", [["a"], 7, {"b": "c"}])
def test_mixed_types_in_json_are_refused(tmp_path, value):
    """One type holds for the whole column here, and texts would change without a word."""
    file = tmp_path / "mixed.json"
    file.write_text(json.dumps([{"text": "42"}, {"text": value}]))
    with pytest.raises(common.Refusal, match="cannot be read"):
        rows_of(file, ["text"])


def test_another_file_with_the_name_and_time_of_the_first_is_read(tmp_path):
    """As a copy that keeps times puts it there. datasets looks at names and times only."""
    file = tmp_path / "copied.jsonl"
    for text in ("first", "the second one"):
        file.write_text(json.dumps({"text": text}))
        os.utime(file, (1_700_000_000, 1_700_000_000))
        assert rows_of(file, ["text"]) == [{"text": text}]


def write_texts(path: Path, *texts: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_each_form_of_dataset_is_read_as_that(tmp_path):
    """Names with brackets and blanks, globs, folders (those of Spark have such names), several."""
    one, two = (
        write_texts(tmp_path / "docs[1].jsonl", "a"),
        write_texts(tmp_path / "b c.jsonl", "b"),
    )
    write_texts(tmp_path / "docs1.jsonl", "c")
    write_texts(tmp_path / "[folder]/x.jsonl", "d")
    (tmp_path / "[folder]/README.md").write_text("not read")
    (tmp_path / "x.parquet").mkdir()
    datasets.Dataset.from_list([{"text": "e"}]).to_parquet(tmp_path / "x.parquet/part-0.parquet")
    forms = {
        one: "a", two: "b", tmp_path / "docs?.jsonl": "c", tmp_path / "docs*.jsonl": "ca",
        tmp_path / "[folder]": "d", tmp_path / "x.parquet": "e", tmp_path / "x.parquet/*": "e",
    }  # fmt: skip
    for form, texts in forms.items():
        assert rows_of(form, ["text"]) == [{"text": text} for text in texts], form
    assert rows_of([str(two), str(one)], ["text"]) == [{"text": "b"}, {"text": "a"}]
    (tmp_path / "y.txt").write_text("y\n")
    for several in ([two, tmp_path / "y.txt"], ["stdlib", two], [two, tmp_path / "nowhere.jsonl"]):
        with pytest.raises(common.Refusal, match="cannot be read"):
            rows_of([*map(str, several)], ["text"])
    with pytest.raises(common.Refusal, match="files of one kind"):
        rows_of(tmp_path, ["text"])


# Columns of the first and of the second file, and the texts that are read (None: refused).
SHARDS = {
    "a column that nobody reads": ({"text": ["a"]}, {"text": ["b"], "x": [1]}, "ab"),
    "no value in one": ({"text": pyarrow.nulls(1)}, {"text": ["b"]}, "b"),
    "other types that nobody reads": (
        {"text": ["a"], "x": [1]}, {"text": ["b"], "x": [1.5]}, "ab",
    ),
    "no rows": ({"text": pyarrow.array([], pyarrow.string())}, {"text": ["b"]}, "b"),
    "integers, then texts": ({"text": [7]}, {"text": ["007"]}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARDS)
def test_parquet_files_may_differ_in_what_is_not_read(tmp_path, case):
    *files, texts = SHARDS[case]
    for i, columns in enumerate(files):
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{i}.parquet")
    if texts is None:
        with pytest.raises(common.Refusal, match="can't be aligned"):
            rows_of(tmp_path, ["text"])
    else:
        rows = [row.get("text") for row in rows_of(tmp_path, ["text"])]
        assert [text for text in rows if text] == [*texts]


def test_a_query_is_no_part_of_the_name_of_a_url():
    assert common.suffix_of("https://x.org/a.jsonl.gz?download=true&as=b.txt") == ".jsonl"


def test_another_column_of_the_same_file_is_tokenized_again(tmp_path):
    file = tmp_path / "two.jsonl"
    file.write_text("".join(json.dumps({"a": f"a{i}", "b": f"b{i}"}) + "\n" for i in range(3)))
    for name in ("a", "b"):
        assert rows_of(file, [name]) == [{name: f"{name}{i}"} for i in range(3)]
