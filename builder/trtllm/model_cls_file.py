"""For ``trtllm-build --model_cls_file``: names the class, which lives in an importable module.

``python -m trtllm_av.builder.trtllm.model_cls_file`` prints the path of this file. trtllm-build loads it
under a name that no worker process can import, so the class itself must not be defined here.
"""

if __name__ == "__main__":
    print(__file__)
else:
    from trtllm_av.builder.trtllm.installed import AdaptiveEagleForCausalLM

    __all__ = ["AdaptiveEagleForCausalLM"]
