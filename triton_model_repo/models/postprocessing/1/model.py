"""Tokens to text."""

from trtllm_av.triton_model_repo.text_models import Postprocessing as TritonPythonModel

__all__ = ["TritonPythonModel"]
