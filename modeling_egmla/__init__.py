"""
EG-MLA (Embedding-Gated Multi-head Latent Attention, arXiv:2509.16686) for Hugging Face Transformers.

Importing this package registers the model with the Auto classes:

```python
>>> import modeling_egmla
>>> from transformers import AutoModelForCausalLM

>>> model = AutoModelForCausalLM.from_pretrained(folder_or_hub_id)
```
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .cache_egmla import CacheMemory, EGMLACache, EGMLAStaticCache
from .configuration import preset_path
from .configuration_egmla import EGMLAConfig
from .modeling_egmla import (
    EGMLAForCausalLM,
    EGMLAForSequenceClassification,
    EGMLAForTokenClassification,
    EGMLAModel,
    EGMLAPreTrainedModel,
)
from .placement_egmla import GateStatistics
from .version import __version__


AutoConfig.register(EGMLAConfig.model_type, EGMLAConfig)
EGMLAConfig.register_for_auto_class()
for auto_class, model_class in (
    (AutoModel, EGMLAModel),
    (AutoModelForCausalLM, EGMLAForCausalLM),
    (AutoModelForSequenceClassification, EGMLAForSequenceClassification),
    (AutoModelForTokenClassification, EGMLAForTokenClassification),
):
    auto_class.register(EGMLAConfig, model_class)
    # Saved folders then carry the code, and load with `trust_remote_code=True` where this package is not installed.
    model_class.register_for_auto_class(auto_class.__name__)
del auto_class, model_class

__all__ = [
    "CacheMemory",
    "EGMLACache",
    "EGMLAConfig",
    "EGMLAForCausalLM",
    "EGMLAForSequenceClassification",
    "EGMLAForTokenClassification",
    "EGMLAModel",
    "EGMLAPreTrainedModel",
    "EGMLAStaticCache",
    "GateStatistics",
    "__version__",
    "preset_path",
]
