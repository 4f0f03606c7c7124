"""The device work of adaptive verification: score, trim, pack, labels and statistics.

``reference`` defines in NumPy what each operation means; ``torch_ops`` offers the same operations as
``torch.ops.trtllm_av.*``. Nothing in this package knows models, tokens' meaning or servers. No
operation that scores or trims reads a drawn token (``verify_pass`` only copies them into the next pass):
what is verified can never depend on what a draft is.
"""
