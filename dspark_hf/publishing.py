"""A drafter becomes a whole Hub repository: weights, modelling files, the target's tokenizer, a card, `custom_generate/`.

    dspark-hf publish my-drafter --target Qwen/Qwen3-4B --record speed.json                        # writes the folder
    dspark-hf publish my-drafter --target Qwen/Qwen3-4B --record speed.json --repo org/my-drafter  # uploads it

Importing `dspark_hf` makes `drafter.push_to_hub(...)` do the same. A card that a person wrote is kept unless asked.
"""

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RemoteEntryNotFoundError
from transformers import AutoConfig, AutoTokenizer

from dspark_hf import model_card
from dspark_hf.modeling.configuration_dspark import DSparkConfig, hub_name
from dspark_hf.modeling.modeling_dspark import PUBLISHERS, DSparkDraftModel
from dspark_hf.taps import check_shape


logger = logging.getLogger(__name__)

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Pipelines compare these with the target's."""
CARD = "README.md"
GENERATE = "custom_generate/generate.py"
REQUIREMENTS = "custom_generate/requirements.txt"


def register_publisher() -> None:
    """Let `drafter.push_to_hub(...)` upload a whole repository."""
    PUBLISHERS[:] = [push_to_hub]


def write_repository(
    drafter: DSparkDraftModel,
    folder: str | os.PathLike,
    *,
    target: str | os.PathLike | None = None,
    tokenizer: Any = None,
    base_model: str | None = None,
    record: str | os.PathLike | Mapping[str, Any] | None = None,
    training: str | None = None,
    name: str | None = None,
    tags: Sequence[str] | str | None = None,
    overwrite_card: bool = False,
    max_shard_size: int | str = "50GB",
    token: bool | str | None = None,
) -> None:
    r"""
    Write all files of a drafter's Hub repository.

    Each file is written beside and then moved: a process that is killed leaves whole files. The drafter's config takes the
    target's special token ids and name. Other files in the folder stay, weights of an earlier save excepted.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.
        folder (`str` or `os.PathLike`): Where to; it is made if need be.
        target (`str` or `os.PathLike`, *optional*): Hub name or folder of the target, for its tokenizer, chat template and
            special ids. Default: `base_model`, or the drafter's `config.target_name`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Saved instead of the target's.
        base_model (`str`, *optional*): Hub name of the target for the card; needed when `target` is a folder.
        record (`str`, `os.PathLike` or `Mapping`, *optional*): Measurements of this drafter by
            `dspark_hf.evaluation.speed`, its file or what is in it.
        training (`str`, *optional*): How the drafter was trained, in Markdown, for the card.
        name (`str`, *optional*): Repository that the card's examples load. Default: the folder.
        tags (`Sequence[str]` or `str`, *optional*): More tags for the card.
        overwrite_card (`bool`, *optional*, defaults to `False`): Replace a card that a person wrote, too.
        max_shard_size (`int` or `str`, *optional*, defaults to `"50GB"`): As in `save_pretrained`.
        token (`bool` or `str`, *optional*): For a target that needs one.

    Raises:
        ValueError: If the drafter was made for another target, the record is of another kind, or `base_model` no Hub name.
        OSError: If the target's config or tokenizer, or the record, cannot be read.
    """
    destination = Path(folder)
    card = destination / CARD
    keeps_card = card.is_file() and not overwrite_card and not model_card.is_written_here(card.read_text("utf-8"))
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination, prefix=".partial-") as temporary:
        partial = Path(temporary)
        target_name = _describe_target(drafter, target, base_model, token)
        facts = _facts(drafter, name or _name_of(destination), target_name, record, training, tags)
        text = model_card.model_card(drafter.config, facts)
        _write_files(drafter, partial, target or target_name, tokenizer, max_shard_size, token)
        if keeps_card:
            logger.warning("Kept %s, which a person wrote. Pass overwrite_card=True to replace it.", card)
        else:
            (partial / CARD).write_text(text, encoding="utf-8")
        _move_files(partial, destination)


def push_to_hub(
    drafter: DSparkDraftModel,
    repo_id: str,
    *,
    target: str | os.PathLike | None = None,
    tokenizer: Any = None,
    base_model: str | None = None,
    record: str | os.PathLike | Mapping[str, Any] | None = None,
    training: str | None = None,
    overwrite_card: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: Sequence[str] | str | None = None,
) -> Any:
    r"""
    Upload a drafter as a whole repository; `drafter.push_to_hub(...)` calls this.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.
        repo_id (`str`): The repository, made if need be.
        target (`str` or `os.PathLike`, *optional*): Hub name or folder of the target. See [`write_repository`], as for all
            up to `training`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Saved instead of the target's.
        base_model (`str`, *optional*): Hub name of the target for the card.
        record (`str`, `os.PathLike` or `Mapping`, *optional*): Measurements for the card.
        training (`str`, *optional*): How the drafter was trained.
        overwrite_card (`bool`, *optional*, defaults to `False`): Replace the repository's card even if a person wrote it.
        commit_message (`str`, *optional*): As in [`PreTrainedModel.push_to_hub`], as all that follow.
        commit_description (`str`, *optional*): More about the commit.
        private (`bool`, *optional*): Whether a new repository is private.
        token (`bool` or `str`, *optional*): For the Hub.
        revision (`str`, *optional*): Branch to upload to, made if need be.
        create_pr (`bool`, *optional*, defaults to `False`): Open a pull request.
        max_shard_size (`int` or `str`, *optional*, defaults to `"50GB"`): Most bytes of a weight file.
        tags (`Sequence[str]` or `str`, *optional*): More tags for the card, also for one that is kept.

    Returns:
        `huggingface_hub.CommitInfo`: Of the one commit.

    Raises:
        ValueError, OSError: As [`write_repository`]; nothing has been uploaded then.
    """
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        target_name = _describe_target(drafter, target, base_model, token)
        facts = _facts(drafter, repo_id, target_name, record, training, tags)
        model_card.model_card(drafter.config, facts)  # its mistakes show before there is a repository
        _write_files(drafter, folder, target or target_name, tokenizer, max_shard_size, token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        _make_branch(api, repo_id, revision, create_pr)
        card = _card_on_the_hub(api, repo_id, revision)
        if card is None or overwrite_card or model_card.is_written_here(card):
            card = model_card.model_card(drafter.config, replace(facts, name=repo_id))  # with its owner now
        else:
            logger.warning("Kept the card of %s: a person wrote it. Pass overwrite_card=True to replace it.", repo_id)
            card = model_card.with_tags(card, facts.tags)
        (folder / CARD).write_text(card, encoding="utf-8")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return api.create_commit(
            repo_id,
            [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files],
            commit_message=commit_message or "Upload DSpark drafter",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )


def _describe_target(
    drafter: DSparkDraftModel, target: str | os.PathLike | None, base_model: str | None, token: bool | str | None
) -> str | None:
    """Give the drafter's config the target's special ids and name; return that name."""
    if base_model is not None and hub_name(base_model) is None:
        raise ValueError(f"base_model={base_model!r} must be a Hub name such as 'Qwen/Qwen3-4B', not a folder.")
    source = target or base_model or drafter.config.target_name
    name = base_model or hub_name(str(source or "")) or drafter.config.target_name
    if source is None:
        logger.warning(
            "The target is not known, so the repository gets no tokenizer and its card names no base model, and pipelines "
            "cannot load it by name. Pass target=<Hub name or folder>."
        )
        return name
    target_config = _load_of_target(AutoConfig, source, token)
    check_shape(drafter.config, target_config)
    text = target_config.get_text_config(decoder=True)
    for field in SPECIAL_IDS:
        setattr(drafter.config, field, getattr(text, field, None))
    drafter.config.target_name = name
    return name


def _load_of_target(auto_class: Any, target: str | os.PathLike, token: bool | str | None) -> Any:
    try:
        return auto_class.from_pretrained(target, token=token)
    except OSError as error:
        raise OSError(
            f"Cannot read the target {str(target)!r}, its {auto_class.__name__[4:].lower()} is needed. Pass another `target`. {error}"
        ) from error


def _write_files(
    drafter: DSparkDraftModel,
    folder: Path,
    target: str | os.PathLike | None,
    tokenizer: Any,
    max_shard_size: int | str,
    token: bool | str | None,
) -> None:
    """Write everything but the card into an empty folder."""
    if tokenizer is None and target is not None:
        tokenizer = _load_of_target(AutoTokenizer, target, token)
        for name in ("is_local", "local_files_only"):  # how it was loaded here, which transformers 5.24 would save
            tokenizer.init_kwargs.pop(name, None)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    drafter.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / GENERATE).parent.mkdir()
    (folder / GENERATE).write_text((Path(__file__).parent / "custom_generate.py").read_text("utf-8"), encoding="utf-8")
    (folder / REQUIREMENTS).write_text("dspark_hf\n", encoding="utf-8")


def _facts(
    drafter: DSparkDraftModel,
    name: str,
    base_model: str | None,
    record: str | os.PathLike | Mapping[str, Any] | None,
    training: str | None,
    tags: Sequence[str] | str | None,
) -> model_card.CardFacts:
    found = json.loads(Path(record).read_text("utf-8")) if isinstance(record, str | os.PathLike) else record
    size = sum(tensor.nbytes for tensor in drafter.state_dict().values())
    weights = f"{size / 1e6:,.0f} MB in {str(drafter.dtype).removeprefix('torch.')}"
    more = [tags] if isinstance(tags, str) else list(tags or [])
    all_tags = [*(drafter.model_tags or []), *more]
    return model_card.CardFacts(name, weights, base_model, found, training, all_tags)


def _move_files(source: Path, destination: Path) -> None:
    """Move files over those in `destination`, the config last, and remove weights that an earlier save left."""
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    for file in sorted(files, key=lambda file: file.name == "config.json"):
        (destination / file).parent.mkdir(exist_ok=True)
        (source / file).replace(destination / file)
    for old in destination.glob("model*.safetensors*"):
        if old.relative_to(destination) not in files:
            old.unlink()


def _name_of(folder: Path) -> str:
    """A folder as a card may name it: no path that means something on one machine only."""
    inside = not folder.is_absolute() and folder.name and ".." not in folder.parts
    return folder.as_posix() if inside else folder.resolve().name


def _make_branch(api: HfApi, repo_id: str, revision: str | None, create_pr: bool) -> None:
    if revision is None or revision.startswith("refs/pr"):
        return
    try:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    except HfHubHTTPError as error:
        if not (create_pr and error.response.status_code == 403):  # a pull request needs no right to write
            raise


def _card_on_the_hub(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    """The card that a repository has, or `None`."""
    try:
        return Path(api.hf_hub_download(repo_id, CARD, revision=revision)).read_text("utf-8")
    except RemoteEntryNotFoundError:
        return None
    except LocalEntryNotFoundError as error:  # offline: not knowing is no reason to overwrite a card
        raise OSError(f"Cannot see whether {repo_id} has a card: {error}") from error


# Command


def add_publish_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dspark-hf publish`."""
    parser.add_argument("drafter", help="folder or Hub name of the drafter, in any packaging that loads")
    parser.add_argument("--target", help="folder or Hub name of the target (default: the one in the drafter's config)")
    parser.add_argument("--base-model", help="Hub name of the target for the card, when --target is a folder")
    parser.add_argument("--record", type=Path, help="record of this drafter by python -m dspark_hf.evaluation.speed")
    parser.add_argument(
        "--training-notes",
        type=Path,
        help="Markdown for the card's section on training (default: the trainer's state)",
    )
    parser.add_argument("--output", help="folder to write (default: the drafter's own, unless there is --repo)")
    parser.add_argument("--repo", help="Hub repository to upload to, such as org/my-drafter")
    parser.add_argument("--overwrite-card", action="store_true", help="replace a README.md that a person wrote, too")
    parser.add_argument("--tags", nargs="+", help="more tags for the card")
    parser.add_argument("--max-shard-size", default="50GB")
    parser.add_argument("--private", action="store_true", default=None, help="with --repo, when it is new")
    parser.add_argument("--revision", help="with --repo: branch to upload to")
    parser.add_argument("--create-pr", action="store_true", help="with --repo: open a pull request")
    parser.add_argument("--commit-message", help="with --repo")


def _is_own_layout(folder: Path) -> bool:
    config = folder / "config.json"
    return not config.is_file() or json.loads(config.read_text("utf-8")).get("model_type") == DSparkConfig.model_type


def run_publish(args: argparse.Namespace) -> str:
    """Write or upload as the parsed arguments say; return where it is now."""
    if args.repo is None and (args.private or args.revision or args.create_pr or args.commit_message):
        raise ValueError("--private, --revision, --create-pr and --commit-message go with --repo.")
    if args.repo is not None and args.output is not None:
        raise ValueError("Give --output or --repo, not both.")
    local = Path(args.drafter)
    if args.repo is None and args.output is None and not local.is_dir():
        raise ValueError(f"{args.drafter} is no folder: give --output FOLDER or --repo NAME.")
    notes = args.training_notes
    described = {
        "target": args.target,
        "base_model": args.base_model,
        "record": args.record,
        "training": notes.read_text("utf-8") if notes else model_card.training_facts(local),
        "overwrite_card": args.overwrite_card,
        "tags": args.tags,
        "max_shard_size": args.max_shard_size,
    }
    if args.repo is None and args.output is None and not _is_own_layout(local):
        raise ValueError(
            f"{args.drafter} is in another layout, and publishing would overwrite it in this package's. Give --output FOLDER, or "
            "convert it first: dspark-hf convert."
        )
    drafter = DSparkDraftModel.from_pretrained(args.drafter, dtype="auto")
    if args.repo is None:
        output = args.output or args.drafter
        write_repository(drafter, output, **described)
        return output
    uploaded = push_to_hub(
        drafter,
        args.repo,
        **described,
        private=args.private,
        revision=args.revision,
        create_pr=args.create_pr,
        commit_message=args.commit_message,
    )
    return uploaded.pr_url or uploaded.commit_url
