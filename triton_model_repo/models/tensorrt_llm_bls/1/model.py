"""Text in, text out, over the model tensorrt_llm."""

from trtllm_av.triton_model_repo.bls_model import BlsModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
