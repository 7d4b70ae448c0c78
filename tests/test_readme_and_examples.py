"""What the README and the examples say runs as it stands, on the real pair: SmolLM2-135M and its drafter."""

import subprocess
import sys
from pathlib import Path

import mktestdocs
import pytest


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
    for name in ("configuration_dspark.py", "layers_dspark.py", "modeling_dspark.py"):
        published = ROOT / "examples" / "smollm2-135m-dspark" / name
        assert published.read_text() == (ROOT / "modeling" / name).read_text(), (
            f"copy modeling/{name} over {published}"
        )
