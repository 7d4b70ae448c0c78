"""What the README and the examples say runs as it stands, on the real pair: SmolLM2-135M and its drafter."""

import json
import subprocess
import sys
from pathlib import Path

import mktestdocs
import pytest
import torch
from conftest import VOCAB, left_padded, make_target

from dspark_hf import DSparkDraftModel


ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_readmes_code_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    mktestdocs.check_md_file(Path("README.md"), memory=True)
    printed = capsys.readouterr().out
    assert "Why is the sky blue?" in printed
    assert "accepted length" in printed


@pytest.mark.slow
def test_the_demo_gives_the_targets_own_tokens():
    command = [sys.executable, "examples/01_generate.py", "--max-new-tokens", "64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the same tokens: yes" in done.stdout


def test_the_reference_drafters_modelling_files_are_the_packages_own():
    for name in ("configuration_dspark.py", "modeling_dspark.py"):
        published = ROOT / "examples" / "smollm2-135m-dspark" / name
        assert published.read_text() == (ROOT / "modeling" / name).read_text(), (
            f"copy modeling/{name} over {published}"
        )


def test_the_training_example_trains_a_drafter_that_drafts(tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    torch.manual_seed(0)
    rows = [{"prompt_ids": [1, 5, 9], "response_ids": torch.randint(3, VOCAB, (16,)).tolist()} for _ in range(80)]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    options = [
        "--layers",
        "1",
        "--taps",
        "0",
        "2",
        "--rank",
        "4",
        "--draft-vocab",
        "32",
        "--mask-token-id",
        "63",
        "--anchors",
        "4",
        "--minutes",
        "0.03",
    ]
    paths = ["--target", tmp_path / "target", "--data", tmp_path / "data.jsonl", "--output", tmp_path / "drafter"]
    command = [sys.executable, "examples/train_drafter.py", *map(str, paths), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    drafter = DSparkDraftModel.from_pretrained(tmp_path / "drafter", dtype=torch.float32)
    prompt = left_padded([6])
    plain = target.generate(**prompt, max_new_tokens=12)
    assert torch.equal(target.generate(**prompt, max_new_tokens=12, assistant_model=drafter), plain)
