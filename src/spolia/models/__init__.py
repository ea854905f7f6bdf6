"""Files to models that can run: GGUF or safetensors, tokenizer, chat template, and a program for the kernels.

    source --sources--> file or folder --gguf, safetensors--> tensors + metadata --arch--> Program
                                                              |--tokenizer, chat_template--> text to token ids and back

`load` does it all. What each name needs is imported when it is first used: the tokenizer's library alone takes longer
to import than a small model to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spolia.models.chat_template import ChatTemplate
    from spolia.models.model import Model, load
    from spolia.models.recipes import (
        BlobWriter,
        Recipe,
        blob_path,
        check_is_kept,
        check_name,
        list_recipes,
        made_of,
        read_recipe,
        remove,
    )
    from spolia.models.sources import BUILTINS, Progress, check_source, list_models, models_folder, pull
    from spolia.models.tokenizer import Tokenizer

__all__ = [
    "BUILTINS",
    "BlobWriter",
    "ChatTemplate",
    "Model",
    "Progress",
    "Recipe",
    "Tokenizer",
    "blob_path",
    "check_is_kept",
    "check_name",
    "check_source",
    "list_models",
    "list_recipes",
    "load",
    "made_of",
    "models_folder",
    "pull",
    "read_recipe",
    "remove",
]

_HOMES = {
    "BUILTINS": "sources",
    "BlobWriter": "recipes",
    "ChatTemplate": "chat_template",
    "Model": "model",
    "Progress": "sources",
    "Recipe": "recipes",
    "Tokenizer": "tokenizer",
    "blob_path": "recipes",
    "check_is_kept": "recipes",
    "check_name": "recipes",
    "check_source": "sources",
    "list_models": "sources",
    "list_recipes": "recipes",
    "load": "model",
    "made_of": "recipes",
    "models_folder": "sources",
    "pull": "sources",
    "read_recipe": "recipes",
    "remove": "recipes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spolia.models' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(f"spolia.models.{_HOMES[name]}"), name)
