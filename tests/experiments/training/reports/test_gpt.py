import gzip
import json
import lzma
import re
import shutil

import numpy as np
import pytest

from experiments import train
from experiments.data.ngrams import NGramModel
from experiments.data.text import joined
from experiments.training import run_directory
from experiments.training.checkpoints import path_of, read
from experiments.training.reports.gpt import compared, references
from jaxbp.training.loop import TIMINGS


def metrics_of(run_dir):
    lines = [line._asdict() for line in run_directory.read_metrics(run_dir)]
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]


def test_the_run_compares_its_loss_with_other_methods_on_the_same_bytes(gpt_run):
    config, _ = run_directory.load(gpt_run.directory)
    dataset, found = config.load(), json.loads((gpt_run.directory / "compression.json").read_text())
    text = joined(dataset.test_labels)
    assert found["validation_bytes"] == len(text) and found["train_bytes"] == dataset.train_labels.size
    bits, last = found["bits_per_byte"], metrics_of(gpt_run.directory)[-1]
    assert bits == {
        "gpt": last["test_loss"],
        "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz": 8 * len(lzma.compress(text)) / len(text),
        "order 4": NGramModel(joined(dataset.train_labels), 4).bits_per_byte(text),
    }
    assert last["train_accuracy"] is None and last["test_accuracy"] is None


def test_the_output_says_which_methods_are_better():
    lines = compared({"gpt": 2.0, "gzip -9": 1.9, "xz": 2.1, "order 4": 2.0}, 1234)
    assert lines == [
        "bits per byte of 1,234 validation bytes:",
        "  gpt      2.0000",
        "  gzip -9  1.9000, better than gpt",
        "  xz       2.1000, worse than gpt",
        "  order 4  2.0000",
    ]


def test_text_of_one_repeated_line_is_compressed_by_all_methods():
    text = b"a line of text that is repeated\n" * 200
    assert all(0 < bits < 1 for bits in references(text, text).values())


def test_the_output_ends_with_samples_the_comparison_and_the_loss(gpt_run):
    loss = f"validation bits/byte {metrics_of(gpt_run.directory)[-1]['test_loss']:.4f}"
    assert gpt_run.output.splitlines()[-1] == loss
    assert re.search(rf"^epoch 2/2  train bits/byte \d\.\d+  {loss}  [\d,]+ rows/s$", gpt_run.output, re.MULTILINE)
    samples = (gpt_run.directory / "samples.txt").read_text()
    assert samples in gpt_run.output and samples.count("sample ") == 3
    assert "order 4" in gpt_run.output.partition(samples)[2]


def test_the_result_has_the_comparison(gpt_run):
    result = json.loads((gpt_run.directory.parent / "result.json").read_text())
    assert result["compression"] == json.loads((gpt_run.directory / "compression.json").read_text())
    assert result["test_loss"] == metrics_of(gpt_run.directory)[-1]["test_loss"]


def stopped_after_one_epoch(gpt_run, run_dir):
    shutil.copytree(gpt_run.directory, run_dir)
    shutil.rmtree(path_of(run_dir / "checkpoints", 2))
    (run_dir / "files.sha256").unlink()
    return ["gpt", "--resume", "--run-dir", str(run_dir)]


@pytest.mark.parametrize("epochs_done", [0, 1])
def test_a_run_repeated_or_resumed_with_moved_text_has_the_same_bits(gpt_run, tmp_path, epochs_done):
    run_dir, moved = tmp_path / "run", shutil.copy(gpt_run.directory.parent / "own.txt", tmp_path / "moved.txt")
    begin = [*gpt_run.settings, "--run-dir", str(run_dir)]
    args = [*stopped_after_one_epoch(gpt_run, run_dir), "--text", str(moved)] if epochs_done else begin
    assert train.main(args) == 0
    assert metrics_of(run_dir) == metrics_of(gpt_run.directory)
    first, second = (read(path_of(folder / "checkpoints", 2)).arrays for folder in (gpt_run.directory, run_dir))
    assert first.keys() == second.keys() and len(first) > 20
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], strict=True)


def test_a_run_does_not_resume_with_other_text(gpt_run, tmp_path, capsys):
    (tmp_path / "other.txt").write_bytes((gpt_run.directory.parent / "own.txt").read_bytes().replace(b"x", b"y"))
    args = stopped_after_one_epoch(gpt_run, tmp_path / "run")
    assert train.main([*args, "--text", str(tmp_path / "other.txt")]) == 2
    assert "wants the same data" in capsys.readouterr().err
