"""Where a checkpoint lies: the embedded model, a folder, or a snapshot in the local Hub cache."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = {"tiny": Path(__file__).resolve().parent.parent / "assets" / "tiny"}


def checkpoint_folder(model: str | Path) -> Path:
    """Folder of a checkpoint; nothing is downloaded.

    Args:
        model: the name of an embedded model, a folder, or a Hub id (``owner/name``) in the local cache.

    Raises:
        ValueError: there is no such thing; the sentence says how to get it.
    """
    if str(model) in EMBEDDED:
        return EMBEDDED[str(model)]
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.exists():
        raise ValueError(f"model.path {folder} holds no config.json, so it is no checkpoint folder")
    parts = str(model).split("/")
    if len(parts) != 2 or not all(parts):
        raise ValueError(
            f"model.path {model} does not exist; give a checkpoint folder or a Hub id such as Qwen/Qwen3-0.6B"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise ValueError(
            f"model.path {model} is neither a folder nor in the local Hub cache; `hf download {model}` gets it"
        ) from None
