"""From a loaded model to an engine on a device: what can run there, what fits, what is refused.

Invariants: nothing is allocated before the list of buffers fits; every setting that the device path does
not honour is refused by name with the remedy; the drafter is the trained head; an engine that adapts has
costs measured on this device or given by the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtllm_av.plugins import cuda_launch
from trtllm_av.plugins.cuda_trim import MAX_ROWS
from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.coefficient_store import (
    CoefficientKey,
    CoefficientStore,
    drafter_identity,
)
from trtllm_av.runtime.controller import AdaptiveController
from trtllm_av.runtime.cost_model import CostModel
from trtllm_av.runtime.cost_table import ProfileKey
from trtllm_av.runtime.engines.cuda import profile
from trtllm_av.runtime.engines.cuda.buffers import RoundShape
from trtllm_av.runtime.engines.cuda.cost_files import load_profile, store_profile
from trtllm_av.runtime.engines.cuda.costs import DeviceCosts
from trtllm_av.runtime.engines.cuda.eagle import DeviceEagle
from trtllm_av.runtime.engines.cuda.engine import CudaEngine
from trtllm_av.runtime.engines.cuda.executor import CudaExecutor
from trtllm_av.runtime.engines.cuda.graphs import device_error
from trtllm_av.runtime.engines.cuda.memory import (
    Need,
    check_memory,
    decoder_needs,
    describe,
    round_needs,
)
from trtllm_av.runtime.engines.cuda.round import DeviceRound
from trtllm_av.runtime.engines.cuda.round_sampling import Sampling
from trtllm_av.runtime.engines.cuda.state import DeviceState
from trtllm_av.runtime.engines.cuda.target import DeviceTarget
from trtllm_av.runtime.engines.cuda.weights import DecoderWeights
from trtllm_av.runtime.errors import DeviceError, UsageError
from trtllm_av.runtime.models.checkpoint import LoadedModel
from trtllm_av.runtime.models.drafters.eagle import PACKAGED_HEADS, EagleDrafter, has_packaged_head
from trtllm_av.runtime.models.drafters.eagle_head import EagleHead, load_head
from trtllm_av.runtime.models.drafters.head_file import check_target, head_path
from trtllm_av.runtime.models.smollm2 import cache_folder
from trtllm_av.runtime.params import SpeculativeConfig

_SHORT_CONTEXT = 64  # tokens; the other KV length of the profile is the longest there is
CostSource = str | Path | dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A head for the target and the target ids [V_d] that it drafts."""

    head: EagleHead
    draft_to_target: torch.Tensor


def create_engine(
    loaded: LoadedModel,
    speculative: SpeculativeConfig,
    *,
    device: str,
    max_batch_size: int,
    max_seq_len: int,
    prefill_chunk: int,
    cost_table: CostSource = None,
) -> CudaEngine:
    """An engine on ``device`` ("cuda", "cuda:1", …; "cpu" runs the same code without graphs).

    Raises DeviceError without a usable GPU or if the buffers do not fit, UsageError for settings that
    only the CPU's engine honours, and what the drafter's files raise.
    """
    where = resolve_device(device)
    mode = speculative.resolved_mode
    num_positions = 0 if mode == "off" else speculative.num_speculative_tokens
    if max_batch_size > MAX_ROWS:
        raise UsageError(
            f"max_batch_size={max_batch_size} exceeds {MAX_ROWS}, the most on device {device!r}; lower it"
        )
    head = find_head(speculative, loaded) if num_positions else None
    options = AdaptiveOptions.resolve(speculative, None)
    executor = create_executor(
        loaded,
        head,
        device=where,
        num_slots=max_batch_size,
        max_len=max_seq_len + 2 * (num_positions + 1),
        num_positions=num_positions,
        is_greedy_draft=speculative.draft_sample_method == "greedy",
        score_arguments=options.score_arguments,
    )
    costs = None
    store = None
    if mode in ("adaptive", "shadow"):
        key = _profile_key(executor, loaded)
        costs = _costs(executor, key, cost_table)
        if speculative.keep_coefficients:
            drafter = executor.round.drafter
            assert drafter is not None
            store = CoefficientStore(
                cache_folder(),
                CoefficientKey.of(
                    loaded.digest,
                    drafter_identity(drafter.cost_key, speculative),
                    options,
                    num_positions,
                ),
            )
    controller = AdaptiveController(
        mode, num_positions, max_batch_size, costs, options=options, store=store
    )
    return CudaEngine(
        executor,
        controller,
        max_seq_len=max_seq_len,
        eos_token_ids=loaded.eos_token_ids,
        tokenizer=loaded.tokenizer,
        prefill_chunk=prefill_chunk,
        name=str(where),
    )


def resolve_device(device: str) -> torch.device:
    """``device`` if rounds can run there; UsageError for an unknown one, DeviceError for an unusable one."""
    try:
        where = torch.device(device)
    except RuntimeError:
        where = torch.device("meta")
    if where.type == "cpu":
        return where
    if where.type != "cuda":
        raise UsageError(f"device={device!r} is unknown; choose 'cpu' or 'cuda'")
    cuda_launch.architecture(0 if where.index is None else where.index)
    return torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)


def find_head(speculative: SpeculativeConfig, loaded: LoadedModel) -> DraftHead:
    """The trained head for ``loaded``; UsageError for drafters and options of the CPU's engine."""
    method = speculative.method
    if method is None and has_packaged_head(loaded):
        method = EagleDrafter.name
    if method != EagleDrafter.name:
        what = f"method={method!r}" if method else "a target without a packaged head"
        raise UsageError(
            f"{what}: device 'cuda' drafts with method 'eagle' only; choose it, or device 'cpu'"
        )
    for name, is_set in (
        ("extra_features", bool(speculative.extra_features)),
        ("soft_labels", speculative.soft_labels),
        ("early_stop", speculative.early_stop),
        (
            f"confidence_source={speculative.confidence_source!r}",
            speculative.confidence_source not in ("auto", "estimator"),
        ),
    ):
        if is_set:
            raise UsageError(
                f"{name}: device 'cuda' does not do this; leave it out or use device 'cpu'"
            )
    path = head_path(speculative, loaded, method, PACKAGED_HEADS)
    head, draft_to_target = load_head(path, loaded.dtype)
    check_target(path, head.config, draft_to_target, loaded)
    return DraftHead(head, draft_to_target)


def create_executor(
    loaded: LoadedModel,
    head: DraftHead | None,
    *,
    device: torch.device,
    num_slots: int,
    max_len: int,
    num_positions: int,
    is_greedy_draft: bool = False,
    score_arguments: Mapping[str, float] | None = None,
    dtype: torch.dtype | None = None,
) -> CudaExecutor:
    """Target, drafter and buffers on ``device``; DeviceError naming the buffers if they do not fit.

    ``dtype`` None means that of ``loaded``. Without a head an engine still has one, never drafted, position.
    """
    config, dtype = loaded.config, dtype or loaded.dtype
    width = max(num_positions, 1)
    needs = _needs(loaded, head, dtype, num_slots, max_len, width)
    check_memory(needs, device)
    try:
        weights = DecoderWeights.copy_of(loaded.model, device, dtype)
        target = DeviceTarget(config, weights, num_slots=num_slots, max_len=max_len)
        drafter = None if head is None else DeviceEagle(head.head, head.draft_to_target, target)
        state = DeviceState(num_slots, device)
        round = DeviceRound(
            target,
            drafter,
            state,
            num_positions=width,
            is_greedy_draft=is_greedy_draft,
            score_arguments=score_arguments,
        )
        return CudaExecutor(round)
    except torch.cuda.OutOfMemoryError as error:
        raise DeviceError(f"{device} ran out of memory at start; {describe(needs)}") from error
    except RuntimeError as error:
        raise device_error(f"starting on {device}", error) from error


def _needs(
    loaded: LoadedModel,
    head: DraftHead | None,
    dtype: torch.dtype,
    num_slots: int,
    max_len: int,
    width: int,
) -> list[Need]:
    num_tokens = num_slots * (1 + width)
    sizes = {"num_slots": num_slots, "max_len": max_len, "num_tokens": num_tokens}
    needs = decoder_needs("target", loaded.config, dtype, **sizes)
    columns = hidden = 0
    if head is not None:
        layer = head.head.config.as_layer()
        needs += decoder_needs("drafting head", layer, dtype, **sizes)
        columns, hidden = head.draft_to_target.numel(), layer.hidden_size
    return needs + round_needs(RoundShape(width, columns, hidden, dtype), num_slots)


def _profile_key(executor: CudaExecutor, loaded: LoadedModel) -> ProfileKey:
    identity, drafter = executor.identity, executor.round.drafter
    assert drafter is not None
    shape = f"{executor.num_slots}x{executor.max_len}x{executor.num_positions}"
    return ProfileKey(
        model_digest=f"{loaded.digest}+{drafter.cost_key}+{shape}",
        executor=f"{identity.executor} {profile.VERSION} torch {torch.__version__}",
        device=identity.device,
        dtype=identity.dtype,
        num_threads=identity.threads,
    )


def _costs(
    executor: CudaExecutor, key: ProfileKey, cost_table: CostSource
) -> CostModel | DeviceCosts:
    """The user's step costs, or this device's own: stored ones if they fit, else measured now."""
    if cost_table is not None:
        return CostModel.from_table(cost_table, num_positions=executor.num_positions, key=key)
    costs = load_profile(cache_folder(), key, executor.num_positions)
    if costs is None:
        kv_lens = (min(_SHORT_CONTEXT, executor.max_len // 4), executor.max_len // 2)
        costs = profile.measure_costs(executor, kv_lens=kv_lens, sampling=Sampling.PLAIN)
        store_profile(cache_folder(), key, costs)
    return costs
