"""Models on the Hugging Face hub: understands their names, downloads what a server needs.

Without a network the hub client's local cache serves; its environment variables (HF_HOME,
HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT) apply.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmserve.errors import StartupError
from llmserve.files.mapping import quoted

_CONFIG_PATTERNS = ("*.json", "*.jinja", "*.model", "tokenizer*", "vocab*", "merges*")
_WEIGHT_PATTERN = "*.safetensors"
# Other formats of the same model lie in folders, Mistral's own format beside the common one.
_IGNORED = ("*/*", "consolidated*")

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_MODEL_ID = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:[:/](?P<file>.+\.gguf))?")
_SHORT_ID = re.compile(_NAME)
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository, or one GGUF file in it."""

    repo_id: str
    gguf_file: str | None = None


def parse_hub_id(model: str) -> HubModel | None:
    """Reads `repo`, `owner/repo`, `owner/repo:file.gguf` and `owner/repo/folder/file.gguf`.

    Returns None for what cannot be a hub id, as most paths.
    """
    match = _MODEL_ID.fullmatch(model)
    if match is None:
        is_short = _SHORT_ID.fullmatch(model) and not model.endswith(".gguf")
        return HubModel(model) if is_short else None
    repo_id, file = match["repo"], match["file"]
    if file is not None and not all(part.strip(".") for part in file.split("/")):
        return None
    if file is None and repo_id.endswith(".gguf"):  # a path with a folder and a file
        return None
    return HubModel(repo_id, file)


def download(
    model: HubModel,
    revision: str | None,
    download_dir: str | None,
    report: Callable[[str], None],
    *,
    with_weights: bool = True,
) -> Path:
    """The folder of the repository, or the GGUF file in it, downloaded unless it is in the cache.

    Shows the hub client's progress bars. Raises StartupError if the hub does not have it or cannot
    be reached and the cache does not have it either.
    """
    if model.gguf_file is not None:
        patterns = [_gguf_pattern(model.gguf_file)]
        ignored = None
    else:
        patterns = [*_CONFIG_PATTERNS, *([_WEIGHT_PATTERN] if with_weights else [])]
        ignored = list(_IGNORED)
    report(f"looking up {model.repo_id} on the Hugging Face hub")
    folder = _snapshot(model.repo_id, revision, download_dir, patterns, ignored)
    if model.gguf_file is None:
        return folder
    path = folder / model.gguf_file
    if not path.exists():
        raise StartupError(
            f"--model names the file {quoted(model.gguf_file)}, "
            f"which the repository {model.repo_id} does not have"
        )
    return path


def _gguf_pattern(file: str) -> str:
    """Matches the file, and with one part of a split model all parts."""
    match = _PART.search(file)
    if match is None:
        return glob.escape(file)
    return glob.escape(file[: match.start()]) + f"-?????-of-{match[1]}.gguf"


def _snapshot(
    repo_id: str,
    revision: str | None,
    download_dir: str | None,
    patterns: list[str],
    ignored: list[str] | None,
) -> Path:
    # Late: takes a quarter of a second to import, which local models need not wait for.
    from huggingface_hub import errors, snapshot_download

    # What goes wrong is said once, in our words.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=ignored,
        )
    except errors.HFValidationError:
        raise StartupError(f"--model {repo_id} is neither an existing path nor a hub id") from None
    except errors.GatedRepoError as error:
        raise StartupError(
            f"--model {repo_id} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise StartupError(
            f"--revision {revision} does not exist in the repository {repo_id}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise StartupError(
            f"--model {repo_id} is neither an existing path nor a repository on the hub "
            "that you may read (for a private one set HF_TOKEN)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise StartupError(
            f"--model {repo_id} is not an existing path, the hub cannot be reached and the local "
            "cache does not have it whole; check the path or the network"
        ) from error
    except Exception as error:  # those of the client's HTTP library, and of the disk
        cause = str(error).strip().split("\n")[0] or type(error).__name__
        raise StartupError(f"--model {repo_id} cannot be downloaded: {cause}") from error
    return Path(folder)
