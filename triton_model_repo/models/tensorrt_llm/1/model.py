"""Token ids in, token ids out."""

from trtllm_av.triton_model_repo.engine_models import TokenModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
