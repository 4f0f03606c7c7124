"""Text in, text out, in one model."""

from trtllm_av.triton_model_repo.engine_models import TextModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
