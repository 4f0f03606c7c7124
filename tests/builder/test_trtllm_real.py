"""The claims about TensorRT-LLM engines on a real one: ``pytest -m trtllm`` in one of its images.

Skipped where TensorRT-LLM is not installed; what is tested without it lies in the other
``test_trtllm_*.py`` files.
"""

from __future__ import annotations

import pytest

from trtllm_av.builder.trtllm.compare import compare_installed
from trtllm_av.builder.trtllm.selftest import run_selftest

pytestmark = pytest.mark.trtllm


def test_interface_is_as_assumed() -> None:
    """Guards against an installed version that differs from what the code was written against."""
    assert [str(difference) for difference in compare_installed()] == []


@pytest.mark.slow
def test_selftest_passes() -> None:
    """Guards against engines that emit other tokens, ignore the control block, or lose their template."""
    failed = [outcome for outcome in run_selftest() if not outcome.is_passed]
    assert not failed, failed
