"""Block drafters: ``dflash``, one pass over a block, and ``dspark``, with a sequential head behind it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trtllm_av.builder.draft_head import HeadSource, check_fingerprint, target_tensors
from trtllm_av.builder.draft_source import LogitPair
from trtllm_av.builder.export import DRAFT_CHAIN, export_chain
from trtllm_av.builder.networks_block import BlockStepNetwork, ChainNetwork
from trtllm_av.builder.verify import TOLERANCE
from trtllm_av.runtime.engines.onnx_plan import OnnxPlan
from trtllm_av.runtime.errors import BuildError, UsageError
from trtllm_av.runtime.models.checkpoint import CheckpointFiles
from trtllm_av.runtime.models.drafters.block_head import BlockHead, load_block_head
from trtllm_av.runtime.models.drafters.dspark_head import figures_of_logits, load_dspark_head
from trtllm_av.runtime.models.drafters.head_file import check_draft_ids
from trtllm_av.runtime.models.llama import LlamaModel


class BlockSource(HeadSource):
    """A head that proposes a block in one pass."""

    __slots__ = ()
    method = "dflash"

    @classmethod
    def find_block(cls, path: Path, target: CheckpointFiles, num_positions: int) -> BlockSource:
        """Raises as ``HeadSource.find``, and UsageError for longer drafts than the head was trained for."""
        head, draft_to_target = cls._load(path, torch.float32)
        check_fingerprint(str(path), head.config.target_fingerprint, target)
        check_draft_ids(path, draft_to_target, target.config.vocab_size)
        if num_positions > head.config.block_size:
            raise UsageError(
                f"--max_draft_len {num_positions}: the head {str(path)!r} drafts blocks of at most "
                f"{head.config.block_size}; lower it"
            )
        return cls(path, head.config.layer, draft_to_target, target)

    @staticmethod
    def _load(path: Path, dtype: torch.dtype) -> tuple[BlockHead, Tensor]:
        return load_block_head(path, dtype)

    def network(self, dtype: torch.dtype) -> BlockStepNetwork:
        """The pass over a block with weights of ``dtype``."""
        head, _ = self._load(self.path, dtype)
        return BlockStepNetwork(head, *target_tensors(self.target, self.draft_to_target, dtype))


class DSparkSource(BlockSource):
    """The same with a sequential head, a network of its own."""

    __slots__ = ()
    method = "dspark"

    @staticmethod
    def _load(path: Path, dtype: torch.dtype) -> tuple[BlockHead, Tensor]:
        return load_dspark_head(path, dtype)

    def export(self, dtype: torch.dtype, max_len: int, folder: Path) -> None:
        BlockSource.export(self, dtype, max_len, folder)
        export_chain(self.chain(dtype), dtype, folder / DRAFT_CHAIN)

    def check(
        self, folder: Path, target: LlamaModel, num_positions: int
    ) -> tuple[float, list[LogitPair]]:
        difference, _ = BlockSource.check(self, folder, target, num_positions)
        _, output = target_tensors(self.target, self.draft_to_target, torch.float32)
        chained, pairs = verify_chain(folder / DRAFT_CHAIN, self.chain(torch.float32), output)
        return max(difference, chained), pairs

    def describe(self) -> dict[str, Any]:
        config = load_dspark_head(self.path)[0].config
        sizes = {"state_size": config.state_size, "sequential_size": config.sequential_size}
        return BlockSource.describe(self) | sizes

    def chain(self, dtype: torch.dtype) -> ChainNetwork:
        """One position of the sequential head with weights of ``dtype``."""
        head, _ = load_dspark_head(self.path, dtype)
        return ChainNetwork(head, *target_tensors(self.target, self.draft_to_target, dtype))


@torch.inference_mode()
def verify_chain(
    path: Path, network: ChainNetwork, output: Tensor
) -> tuple[float, list[LogitPair]]:
    """The largest difference from the torch modules over chains of random blocks, and logits of both.

    ``output`` [V_d, H] is the target's output layer at the draft vocabulary. Raises BuildError above ``TOLERANCE``.
    """
    plan = OnnxPlan(path)
    vocab_size, hidden = network.bias.shape[0], network.embedding.shape[1]
    generator = torch.Generator().manual_seed(7)
    worst = 0.0
    pairs: list[LogitPair] = []
    names = ["logits", "next_carried", "confidence_logit"]
    for rows in (1, 5, 2):
        carried: Tensor | None = None
        for scale in (0.5, 2.0, 20.0):  # the last is nearly certain of its top token
            states = torch.randn(rows, hidden, generator=generator)
            block_logits = scale * torch.randn(rows, vocab_size, generator=generator)
            ids = torch.randint(network.embedding.shape[0], (rows,), generator=generator)
            before = torch.zeros(rows, network.bias.shape[1]) if carried is None else carried
            feed: Mapping[str, Tensor] = {
                "block_state": states,
                "block_logits": block_logits,
                "input_ids": ids,
                "carried": before,
            }
            found = plan.run(feed, names)
            read = network.sequential.read_block(states)
            carried = network.sequential.advance(read, network.embedding[ids], carried)
            logits = block_logits + F.linear(network.sequential.lifted(carried), output)
            confidence = network.confidence(states, carried, figures_of_logits(logits))
            expected = [logits, carried, confidence]
            for name, ours, theirs in zip(names, found, expected, strict=True):
                difference = float((ours - theirs).abs().max())
                if not difference <= TOLERANCE:  # also for NaN
                    raise BuildError(
                        f"{path.name}: {name} differ from the torch module's by {difference:.2g} (at most "
                        f"{TOLERANCE:g}); the file must not be used"
                    )
                worst = max(worst, difference)
            pairs.append((found[0], logits))
    return worst, pairs
