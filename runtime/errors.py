"""Every error a user can cause, each printed as one line: the offending value and the remedy."""

from __future__ import annotations


class AdaptiveVerificationError(Exception):
    """Base of all errors of this package that are not bugs."""


class UsageError(AdaptiveVerificationError, ValueError):
    """A wrong argument, flag or configuration key (exit code 2)."""


class RequestError(AdaptiveVerificationError, ValueError):
    """One request cannot be served as asked; other requests go on."""


class OverloadError(RequestError):
    """The queue in front of the engine is full; the same request may be served later."""


class EngineStoppedError(AdaptiveVerificationError):
    """The engine ended with an error or was shut down: its requests fail, and it takes no new ones."""


class CheckpointError(AdaptiveVerificationError):
    """A model folder or file cannot be read, or is of an unsupported architecture (exit code 1)."""


class BuildError(AdaptiveVerificationError):
    """An engine cannot be built, or does not compute what its checkpoint says (exit code 1)."""


class CostTableError(AdaptiveVerificationError):
    """A cost table is missing, flat, foreign or malformed (exit code 1)."""


class RecordingError(AdaptiveVerificationError):
    """A recording cannot be written any further, for instance on a full disk (exit code 1)."""


class MissingDependencyError(AdaptiveVerificationError, ImportError):
    """An optional package is not installed; the message names the command (exit code 1)."""


class DeviceError(AdaptiveVerificationError):
    """No usable GPU, or the driver refused a kernel; the message names it (exit code 1)."""
