"""Writing an engine directory: all of it or nothing.

Invariants: a build works in a folder of its own beside the target and renames it when it is complete;
``config.json``, without which nothing loads, is written last; only an engine directory or an empty folder
is ever replaced; a failed build leaves the old engine as it was.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtllm_av.runtime.digest import file_digest
from trtllm_av.runtime.engines.engine_directory import CONFIG, FORMAT, config_digest, is_engine
from trtllm_av.runtime.errors import BuildError, UsageError


def check_target(folder: Path) -> None:
    """Raises UsageError if ``folder`` holds anything but an engine."""
    if folder.is_dir():
        is_replaceable = not any(folder.iterdir()) or is_engine(folder)
    else:
        is_replaceable = not folder.exists() and not folder.is_symlink()
    if not is_replaceable:
        raise UsageError(
            f"--output_dir {str(folder)!r} exists and is no engine directory; give a new folder"
        )


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder to build in, which takes the place of ``folder`` if the block ends without an error.

    Raises BuildError where the file system refuses, for instance on a full disk.
    """
    building: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = _sibling(folder)
        yield building
        building.chmod(0o755)  # mkdtemp's folders are private
        _put_in_place(building, folder)
    except OSError as error:
        raise BuildError(
            f"cannot write the engine to {str(folder)!r}: {error.strerror or error}; free space there "
            "or give another --output_dir"
        ) from None
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)


def _put_in_place(building: Path, folder: Path) -> None:
    """Rename, keeping what ``folder`` held until the new one is there."""
    if not folder.exists():
        building.rename(folder)
        return
    aside = _sibling(folder)
    try:
        kept = folder.rename(aside / folder.name)
        try:
            building.rename(folder)
        except OSError:
            kept.rename(folder)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_config(
    folder: Path,
    pretrained_config: dict[str, Any],
    build_config: dict[str, Any],
    adaptive_verification: dict[str, Any],
) -> None:
    """Write ``config.json`` with the digests of all files that ``folder`` holds, and its own."""
    files = {
        path.relative_to(folder).as_posix(): file_digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    config = {
        "pretrained_config": pretrained_config,
        "build_config": build_config,
        "adaptive_verification": {"format": FORMAT, **adaptive_verification, "files": files},
    }
    config["adaptive_verification"]["config_digest"] = config_digest(config)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _sibling(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
