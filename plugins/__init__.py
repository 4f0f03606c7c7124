"""The device work of adaptive verification: score, trim, pack, labels and statistics.

``reference`` defines in NumPy what each operation means; ``torch_ops`` offers the same operations as
``torch.ops.trtllm_av.*``. Nothing in this package knows models, tokens' meaning or servers, and no
operation takes a drawn token: what is verified can never depend on what a draft is.
"""
