"""TensorRT-LLM 1.0-1.2: engines of trtllm-build whose EAGLE drafts are trimmed before they are verified."""
