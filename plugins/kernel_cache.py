"""Compiled kernels on disk, so that only the first process of a machine compiles.

Invariants: an entry appears whole or not at all (written beside its place, then renamed); it starts with
a digest of its content, so that a damaged one reads as missing; a folder that cannot be written to costs
compile time, never an error.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

_DIGEST_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


def default_folder() -> Path:
    """``$TRTLLM_AV_CACHE/kernels``, by default in the user's cache folder."""
    root = os.environ.get("TRTLLM_AV_CACHE")
    if root:
        return Path(root) / "kernels"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "trtllm-av" / "kernels"


def read(path: Path) -> bytes | None:
    """The content stored at ``path``, None if there is none or it is damaged."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, content = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        _log.warning("kernel cache: %s is damaged and will be rebuilt", path)
        return None
    return content


def write(path: Path, content: bytes) -> None:
    """Store ``content`` at ``path``; a failure is logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        _log.warning("kernel cache: %s cannot be written (%s); set TRTLLM_AV_CACHE", path, error)
