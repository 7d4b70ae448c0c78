"""DSpark speculative decoding (arXiv 2607.05147) for Hugging Face `generate()`.

Importing this package makes `target.generate(..., assistant_model=<DSpark drafter>)` run DSpark; see `integration.py`
for what that changes in transformers, and [`disable`] to undo it.
"""

from dspark_hf.checkpoints import register_readers
from dspark_hf.integration import attach, detach, disable, enable, register_auto_classes
from dspark_hf.modeling.configuration_dspark import DSparkConfig
from dspark_hf.modeling.modeling_dspark import DSparkDraftModel
from dspark_hf.publishing import register_publisher


__version__ = "0.1.0"

register_readers()
register_publisher()
register_auto_classes()
enable()

__all__ = ["DSparkConfig", "DSparkDraftModel", "attach", "detach", "disable", "enable"]
