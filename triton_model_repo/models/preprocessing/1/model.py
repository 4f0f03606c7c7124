"""Text to tokens."""

from trtllm_av.triton_model_repo.text_models import Preprocessing as TritonPythonModel

__all__ = ["TritonPythonModel"]
