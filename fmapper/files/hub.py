"""Folders of the Hugging Face Hub by the name of their repository, through huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SETTINGS = ("*.json", "*.txt", "*.model", "*.jinja")  # configurations and tokenizers
_WEIGHTS = "*.safetensors"
_PICKLES = "*.bin"


def download(name: str) -> Path:
    """Downloads a repository of the Hub into huggingface_hub's cache; returns its folder.

    Only configurations, files of tokenizers and weights are downloaded: safetensors, or `*.bin`
    where the repository has none.

    Raises:
        FileNotFoundError: The text is not the name of a repository, huggingface_hub is not
            installed, or cannot download the repository; says why.
    """
    if not _NAME.fullmatch(name):
        raise FileNotFoundError(
            f"{name}: no such folder, and not the name of a repository, such as 'org/name'"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise FileNotFoundError(
            f"{name}: no such folder. To download a repository of this name, install "
            "huggingface_hub: pip install huggingface_hub"
        ) from error
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*_SETTINGS, _WEIGHTS]))
        if not any(folder.glob(_WEIGHTS)):
            folder = Path(snapshot_download(name, allow_patterns=[*_SETTINGS, _PICKLES]))
    except Exception as error:  # of the network, of access, of the name
        reason = str(error).strip().splitlines()
        raise FileNotFoundError(
            f"{name}: no such folder, and huggingface_hub cannot download a repository of this "
            f"name: {type(error).__name__}: {reason[0] if reason else ''}"
        ) from error
    return folder
