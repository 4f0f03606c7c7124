"""Device profiles on disk, so that the next start does not measure again.

Invariants: a profile is read only under the key it was stored with; it holds what was measured, never the
ratios that serving added; a damaged or foreign file is measured again with a log message.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_av.runtime.cost_profile import write_whole
from trtllm_av.runtime.cost_table import ProfileKey
from trtllm_av.runtime.engines.cuda.costs import BucketProfile, DeviceCosts

logger = logging.getLogger(__name__)


def load_profile(folder: Path, key: ProfileKey, num_positions: int) -> DeviceCosts | None:
    """The stored profile of ``key``, None if there is no good one."""
    path = _path(folder, key)
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["key"] != asdict(key):
            raise ValueError(f"it is of {data['key']}")
        return from_json(data, num_positions)
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("measuring step costs again: %s is unusable (%s)", path, error)
        return None


def store_profile(folder: Path, key: ProfileKey, costs: DeviceCosts) -> None:
    """Write the profile of ``costs``; a folder that cannot be written costs a log message."""
    text = json.dumps({"key": asdict(key), **to_json(costs)}, indent=1)
    try:
        write_whole(_path(folder, key), text)
    except OSError as error:
        logger.warning("step costs are not cached (%s); they are measured at every start", error)


def to_json(costs: DeviceCosts) -> dict[str, Any]:
    """The profile in ms, by request bucket: token buckets, verify passes and drafts by KV length."""
    return {
        "unit": "ms",
        "kv_lens": list(costs.kv_lens),
        "buckets": [
            {
                "requests": requests,
                "tokens": list(bucket.tokens),
                "verify_ms": bucket.verify.tolist(),
                "draft_ms": bucket.draft.tolist(),
            }
            for requests, bucket in sorted(costs.profile.items())
        ],
    }


def from_json(data: dict[str, Any], num_positions: int) -> DeviceCosts:
    """The inverse of ``to_json``; ValueError, KeyError or TypeError for anything else."""
    profile = {
        int(row["requests"]): BucketProfile(
            tuple(int(size) for size in row["tokens"]),
            np.array(row["verify_ms"], np.float64),
            np.array(row["draft_ms"], np.float64),
        )
        for row in data["buckets"]
    }
    for bucket in profile.values():
        is_whole = bucket.verify.shape == (2, len(bucket.tokens)) and bucket.draft.shape == (2, 2)
        # Costs divide measured times; only a further position may cost nothing that a clock sees.
        positive = np.concatenate([bucket.verify.ravel(), bucket.draft[:, :1].ravel()])
        is_usable = (positive > 0.0).all() and (bucket.draft >= 0.0).all()
        if not (is_whole and is_usable and np.isfinite(positive.sum() + bucket.draft.sum())):
            raise ValueError("its costs are incomplete")
    low, high = data["kv_lens"]
    return DeviceCosts(profile, num_positions=num_positions, kv_lens=(int(low), int(high)))


def _path(folder: Path, key: ProfileKey) -> Path:
    identity = json.dumps(asdict(key), sort_keys=True)
    return folder / f"costs-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
