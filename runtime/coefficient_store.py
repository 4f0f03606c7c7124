"""The estimator's coefficients on disk, so that a restart begins where the last run ended.

Invariants: coefficients are read only under the key they were saved with; a damaged or foreign file is
ignored with a logged reason and overwritten later; a file is written whole or not at all, at most every
``WRITE_SECONDS`` and at the end; a folder that cannot be written costs a log message, never a round.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.cost_profile import write_whole
from trtllm_av.runtime.digest import file_digest
from trtllm_av.runtime.params import SpeculativeConfig

logger = logging.getLogger(__name__)

WRITE_SECONDS = 60.0


def drafter_identity(cost_key: str, config: SpeculativeConfig) -> str:
    """What acceptance depends on of a drafter: ``cost_key`` (its sizes), its weights, how it samples."""
    weights = "packaged" if config.model is None else config.model
    if config.model is not None and Path(config.model).is_file():
        weights = file_digest(Path(config.model))
    return f"{cost_key} {weights} {config.draft_sample_method}"


@dataclass(frozen=True, slots=True)
class CoefficientKey:
    """What a fit depends on; any difference makes it foreign."""

    target_digest: str
    drafter: str  # with its weights and how it samples: see drafter_identity
    source: str
    features: tuple[str, ...]
    feature_bound: float
    temperature_floor: float
    num_positions: int

    @classmethod
    def of(
        cls, target_digest: str, drafter: str, options: AdaptiveOptions, num_positions: int
    ) -> CoefficientKey:
        return cls(
            target_digest,
            drafter,
            options.source,
            options.extra_features,
            options.feature_bound,
            options.temperature_floor,
            num_positions,
        )


class CoefficientStore:
    """One file in ``folder`` for ``key``. ``clock`` counts seconds."""

    def __init__(
        self, folder: Path, key: CoefficientKey, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._key: dict[str, Any] = json.loads(json.dumps(asdict(key)))
        identity = json.dumps(self._key, sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:24]
        self.path = folder / f"coefficients-{digest}.json"
        self._clock = clock
        self._written = -float("inf")
        self._pending: list[float] | None = None

    def load(self) -> NDArray[np.float32] | None:
        """The coefficients [F+K] of this key, not checked for their size; None where there are none."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["key"] != self._key:
                raise ValueError(f"it was saved for {data['key']}")
            return np.array([float(value) for value in data["coefficients"]], np.float32)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.ignore(error)
            return None

    def ignore(self, error: Exception) -> None:
        """Say why the file is not used."""
        logger.warning(
            "coefficients in %s are ignored: %s: %s", self.path, type(error).__name__, error
        )

    def save(self, coefficients: NDArray[np.float32]) -> None:
        """Keep ``coefficients`` [F+K] for the next start; written now if the last time is long ago."""
        self._pending = [float(value) for value in coefficients]
        if self._clock() - self._written >= WRITE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was saved since the last time."""
        if self._pending is None:
            return
        self._written = self._clock()
        data = {"key": self._key, "coefficients": self._pending}
        self._pending = None
        try:
            write_whole(self.path, json.dumps(data, indent=1))
        except OSError as error:
            logger.warning("coefficients are not kept (%s); the next start begins cold", error)
