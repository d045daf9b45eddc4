"""Where a checkpoint lies (the embedded model, a folder, or a snapshot in the local Hub cache), and what it is."""

from __future__ import annotations

from pathlib import Path

from paged.core.model_spec import ModelSpec

EMBEDDED = {"tiny": Path(__file__).resolve().parent.parent / "assets" / "tiny"}


def find_model(
    model: str | Path, named: ModelSpec | None = None, *, need_weights: bool = True, max_seq_len: int | None = None
) -> tuple[Path | None, ModelSpec]:
    """A model's folder and its description; nothing is downloaded.

    Args:
        model: as for ``checkpoint_folder``.
        named: what the model should be. A checkpoint must agree with it; without weights it stands alone.
        need_weights: whether the checkpoint must be there; it must be anyway if nothing is ``named``.
        max_seq_len: most tokens of a text, see ``ModelSpec.from_config``.

    Returns:
        The folder, or None for a Hub id that is not in the local cache and is not needed; and the spec.

    Raises:
        ValueError: the checkpoint is not there, not supported, or not the model that is named.
    """
    if named is not None and not need_weights:
        return _local_folder(model), named
    folder = checkpoint_folder(model)
    spec = ModelSpec.from_folder(folder, max_seq_len=max_seq_len)
    if named is not None:
        named.check_agrees(spec)
    return folder, spec


def checkpoint_folder(model: str | Path) -> Path:
    """Folder of a checkpoint; nothing is downloaded.

    Args:
        model: the name of an embedded model, a folder, or a Hub id (``owner/name``) in the local cache.

    Raises:
        ValueError: there is no such thing; the sentence says how to get it.
    """
    folder = _local_folder(model)
    if folder is None:
        raise ValueError(
            f"model.path {model} is neither a folder nor in the local Hub cache; `hf download {model}` gets it"
        )
    return folder


def _local_folder(model: str | Path) -> Path | None:
    """The folder, or None for what may be a Hub id that is not in the local cache."""
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
        return None
