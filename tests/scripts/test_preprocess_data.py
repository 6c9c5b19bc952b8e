"""scripts/data/preprocess_data.py: what it reads and refuses in this process, what it writes through Megatron in one
of its own."""

import gzip
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EOD = 256


class Bytes:
    vocab_size = 512
    eod = EOD

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.fixture
def preprocess(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("data.preprocess_data")


def encoded(
    preprocess: ModuleType, *lines: str | bytes, keys: tuple[str, ...] = ("text",), eod: bool = True, workers: int = 1
) -> list:
    raw = [
        preprocess.Line("x.jsonl", n, line.encode() if isinstance(line, str) else line)
        for n, line in enumerate(lines, start=1)
    ]
    return list(preprocess.encode_all(raw, preprocess.Encoder(list(keys), Bytes(), eod), workers))


def test_a_text_is_its_tokens_and_the_end_of_document_and_nothing_stays_nothing(preprocess: ModuleType) -> None:
    documents = encoded(preprocess, '{"text": "aé"}', '{"text": ""}', "\n")
    assert [document["text"] for document in documents] == [[97, 195, 169, EOD], [], []]


def test_workers_keep_the_order(preprocess: ModuleType) -> None:
    lines = [json.dumps({"text": str(number)}) for number in range(200)]
    assert encoded(preprocess, *lines, workers=3) == encoded(preprocess, *lines)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        (b'{"text": "\xff"}', "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"body": "x"}', "has no key 'text'; it has 'body'"),
        ('{"text": 3}', "holds int"),
        ('{"text": ["a", "b"]}', "holds list"),
        ('{"text": "\\ud800"}', "the tokenizer refuses key 'text'"),
    ],
)
def test_a_bad_line_is_named(preprocess: ModuleType, line: str | bytes, message: str, workers: int) -> None:
    with pytest.raises(preprocess.InputError, match=r"^x\.jsonl, line 2: ") as caught:
        encoded(preprocess, '{"text": "fine"}', line, '{"also": "bad"}', workers=workers)
    assert message in str(caught.value)


def test_input_may_be_packed_or_a_pattern(preprocess: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text("1\n2\n")
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as stream:
        stream.write(b"0\n")
    lines = list(preprocess.read_lines(preprocess.input_files(str(tmp_path / "*.jsonl*"))))
    assert [(Path(line.file).name, line.number, line.raw.strip()) for line in lines] == [
        ("a.jsonl.gz", 1, b"0"),
        ("b.jsonl", 1, b"1"),
        ("b.jsonl", 2, b"2"),
    ]
    with pytest.raises(preprocess.InputError, match="no such file"):
        preprocess.input_files(str(tmp_path / "c.jsonl"))


def test_output_that_exists_is_not_replaced_unasked(preprocess: ModuleType, tmp_path: Path) -> None:
    outputs = [preprocess.Output(str(tmp_path / "p"), "text")]
    preprocess.check_outputs(outputs, overwrite=False)
    (tmp_path / "p_text_document.idx").write_text("old")
    with pytest.raises(preprocess.InputError, match=r"p_text_document\.idx exist already"):
        preprocess.check_outputs(outputs, overwrite=False)
    preprocess.check_outputs(outputs, overwrite=True)


def test_a_folder_that_cannot_be_made_is_named(preprocess: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(preprocess.InputError, match="cannot be made"):
        preprocess.check_outputs([preprocess.Output(str(tmp_path / "file" / "p"), "text")], overwrite=False)


def test_the_index_appears_last(preprocess: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted between the two renames, nothing is left that a reader would take for a data set: not even the old
    index."""
    output = preprocess.Output(str(tmp_path / "p"), "text")
    for suffix in ("bin", "idx"):
        output.final(suffix).write_text("old")
        output.unfinished(suffix).write_text("new")
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        output.publish()
    assert not output.final("idx").exists()
    output.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["p_text_document.bin"]


# --- Through the installed Megatron, with the tokenizer of the quickstart
# ---------------------------------------------------------------

# Importing Megatron takes seconds, so one process does several runs; and it is not this one, which stays clean for
# other tests.
SEVERAL_RUNS = """
import json, sys
from data import preprocess_data
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["preprocess_data.py", "--tokenizer-type", "ByteLevelTokenizer", *arguments]
    print("status", preprocess_data.main())
"""


def run_each(scripts: Path, *runs: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SEVERAL_RUNS, json.dumps(runs)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=scripts)


def read_data_set(prefix: Path) -> tuple[list[list[int]], list[int]]:
    """The sequences and where documents begin, read by the published layout of .idx and not by Megatron's reader."""
    raw = Path(f"{prefix}.idx").read_bytes()
    magic, version, dtype, num_sequences, num_documents = struct.unpack_from("<9sQBQQ", raw)
    assert (magic, version, dtype) == (b"MMIDIDX\0\0", 1, 8)  # 8: uint16
    start = struct.calcsize("<9sQBQQ")
    lengths = np.frombuffer(raw, np.int32, num_sequences, start)
    offsets = np.frombuffer(raw, np.int64, num_sequences, start + 4 * num_sequences)
    documents = np.frombuffer(raw, np.int64, num_documents, start + 12 * num_sequences)
    tokens = Path(f"{prefix}.bin").read_bytes()
    pairs = zip(lengths, offsets, strict=True)
    return [np.frombuffer(tokens, np.uint16, length, offset).tolist() for length, offset in pairs], documents.tolist()


def test_what_is_written_and_that_a_fault_leaves_nothing(scripts: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"text": "abc", "title": "T"}\n{"text": "", "title": "U"}\n{"text": "é", "title": "VW"}\n')
    bad.write_text('{"text": "abc"}\n{"text": \n')
    prefix = tmp_path / "p"
    flags = ["--output-prefix", str(prefix), "--append-eod"]
    result = run_each(
        scripts,
        ["--input", str(bad), "--workers", "2", *flags],
        ["--input", str(good), "--json-keys", "text", "title", "--log-interval", "2", *flags],
        ["--input", str(good), *flags],
    )
    assert [line for line in result.stdout.splitlines() if "status" in line] == ["status 1", "status 0", "status 1"], (
        result.stderr
    )
    assert "Traceback" not in result.stderr
    assert f"{bad}, line 2: is not JSON" in result.stderr
    assert "2 documents, 1 empty ones left out" in result.stdout
    assert "Processed 2 documents" in result.stderr
    assert "exist already" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "good.jsonl"] + [
        f"p_{key}_document.{suffix}" for key in ("text", "title") for suffix in ("bin", "idx")
    ]
    assert read_data_set(tmp_path / "p_text_document") == ([[97, 98, 99, EOD], [195, 169, EOD]], [0, 1, 2])
    assert read_data_set(tmp_path / "p_title_document") == ([[84, EOD], [85, EOD], [86, 87, EOD]], [0, 1, 2, 3])
