"""Draft with this repository's drafter: `target.generate(..., custom_generate="org/name", trust_remote_code=True)`.

Needs the package `dspark_hf`, which does the decoding. Every argument of `generate()` keeps its meaning. Published as
`custom_generate/generate.py` in a drafter's repository.
"""

import inspect
import weakref
from typing import Any

import dspark_hf


HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_loaded: weakref.WeakKeyDictionary[Any, dict] = weakref.WeakKeyDictionary()


def generate(model: Any, **kwargs: Any) -> Any:
    """Generate with the drafter, which the first call for a target loads and later ones find."""
    if kwargs.pop("assistant_model", None) is not None:
        raise ValueError("`custom_generate` brings its own drafter: leave out `assistant_model`.")
    hub_arguments = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    source = _this_repository()
    drafters = _loaded.setdefault(model, {})
    key = (source, hub_arguments.get("revision"))
    if key not in drafters:
        drafters[key] = dspark_hf.DSparkDraftModel.from_pretrained(source, dtype=model.dtype, **hub_arguments)
    drafter = drafters[key].to(model.get_output_embeddings().weight.device)
    return model.generate(**kwargs, assistant_model=drafter)


def _this_repository() -> str:
    """The folder or name given as `custom_generate`, from the calling frame: `generate()` does not pass it on."""
    frame = inspect.currentframe()
    while frame is not None:
        source = frame.f_locals.get("custom_generate")
        if isinstance(source, str):
            return source
        frame = frame.f_back
    raise RuntimeError("Call this through target.generate(..., custom_generate=<repository>, trust_remote_code=True).")
