"""`dspark-hf convert`: a drafter of any packaging that is read here, in this package's layout or in a serving engine's.

    dspark-hf convert deepseek-ai/dspark_qwen3_4b_block7 my-drafter
    dspark-hf convert my-drafter for-vllm --to speculators --target Qwen/Qwen3-4B
    dspark-hf convert my-drafter for-sglang --to deepspec --target Qwen/Qwen3-4B

Files are written beside their place first and moved when all are whole.
"""

import argparse
import json
import logging
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from dspark_hf.checkpoints.writers import ExportedDrafter, to_deepspec, to_speculators
from dspark_hf.loading import load_target
from dspark_hf.modeling.configuration_dspark import hub_name
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.taps import check_shape


logger = logging.getLogger(__name__)

LAYOUTS = ("dspark", "deepspec", "speculators")
COMMANDS = {
    "dspark": "dspark-hf generate --target {target} --drafter {folder}",
    "speculators": (
        'vllm serve {target} --speculative-config \'{{"method": "dspark", "model": "{folder}", '
        '"num_speculative_tokens": {tokens}}}\''
    ),
    "deepspec": (
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm DSPARK "
        "--speculative-draft-model-path {folder}"
    ),
}
"""What runs a drafter of each layout. The engines' flags are from their documentation; no engine runs in our tests."""


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("source", help="folder or Hub name of a drafter, in any packaging that is read")
    parser.add_argument("destination", type=Path, help="folder to write; must not exist or be empty")
    parser.add_argument("--to", choices=LAYOUTS, default="dspark", help="layout to write (default: this package's)")
    parser.add_argument("--target", help="folder or Hub name of the target (default: the drafter's)")
    parser.add_argument("--revision", help="revision of the source on the Hub")


def run_convert(args: argparse.Namespace) -> str:
    r"""
    Convert a drafter.

    Returns:
        `str`: A command line that runs the result.

    Raises:
        ValueError: If the destination holds something, or the layout needs a target that is not given or does not fit.
        NotImplementedError: If the layout cannot say what the drafter computes.
    """
    destination: Path = args.destination.resolve()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{args.destination} exists and is not an empty folder. Give another destination.")
    drafter = DSparkDraftModel.from_pretrained(args.source, dtype="auto", revision=args.revision or "main")
    target_name: str | None = args.target or drafter.config.target_name
    drafter.config.target_name = hub_name(target_name)  # for what is published later
    if args.to == "speculators" and target_name is None:
        raise ValueError("--to speculators writes the target's name into the config: pass --target.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    beside = destination if destination.exists() else destination.parent  # an empty folder may be another volume
    with tempfile.TemporaryDirectory(dir=beside, prefix=".partial-") as partial:
        whole = Path(partial) / "drafter"
        if args.to == "dspark":
            drafter.save_pretrained(whole)
        else:
            _save(_exported(drafter, args.to, target_name), whole)
        if destination.exists():
            for file in sorted(whole.iterdir(), key=lambda file: file.name == "config.json"):
                file.replace(destination / file.name)
        else:
            whole.rename(destination)
    if args.to != "dspark" and drafter.config.confidence_temperatures is not None:
        logger.warning("The layout %r has no field for calibration temperatures: they are left out.", args.to)
    return COMMANDS[args.to].format(
        target=target_name or "<target>", folder=args.destination, tokens=drafter.config.block_size
    )


def _exported(drafter: DSparkDraftModel, layout: str, target_name: str | None) -> ExportedDrafter:
    if layout == "speculators":
        return to_speculators(drafter, str(target_name))
    borrows = not (drafter.config.has_embedding and drafter.config.has_lm_head)
    if borrows and target_name is None:
        raise ValueError("DeepSpec's layout carries the target's embedding and head: pass --target.")
    target = load_target(str(target_name), "auto", "cpu") if borrows else None
    if target is not None:
        check_shape(drafter.config, target.config)
    return to_deepspec(drafter, target)


def _save(exported: ExportedDrafter, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(exported.config, indent=2) + "\n")
    save_file(exported.tensors, folder / "model.safetensors", metadata={"format": "pt"})
